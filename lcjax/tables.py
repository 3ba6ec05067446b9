"""Rows of named values as a table on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def show(title: str, rows: Sequence[Mapping[str, Any]], leave_out: Sequence[str] = ()) -> None:
    """Prints rows of equal fields.

    Args:
      title: the table's headline.
      rows: the first row's fields are the columns.
      leave_out: fields that are not shown.
    """
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return
    fields = [field for field in rows[0] if field not in leave_out]
    table = Table(title=title)
    for field in fields:
        table.add_column(field, justify="left" if isinstance(rows[0][field], str) else "right")
    for row in rows:
        table.add_row(*(_text(row[field]) for field in fields))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)

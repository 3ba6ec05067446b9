"""Placeholder until the real module is here: no partners, roles as found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lcjax._tree_leaves import Leaf


class Partners(NamedTuple):
    """Placeholder."""

    param: str | None
    mu: str | None
    nu: str | None


def partners(leaves: Sequence[Leaf]) -> dict[str, Partners]:
    """Placeholder."""
    return {}


def stated(leaves: Sequence[Leaf], patterns: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Placeholder."""
    return tuple(leaf.role for leaf in leaves)

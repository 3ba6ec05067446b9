"""What makes Orbax v1 take an lcjax item for a pytree.

``ocp.load`` and ``training.Checkpointer.load`` open an item only if it holds Orbax's own file
``_METADATA``. So a v1 save leaves a file of that name, which says in words what the item is:
Orbax without lcjax fails on it with that sentence in its error. Items without the file (the v0
handler writes none) are recognised by their manifest.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

from etils import epath
from orbax.checkpoint.experimental.v1._src.layout import orbax_layout

from lcjax import storage
from lcjax.chain import MANIFEST_FILE, NOTE_FILE

MARKER_FILE = "_METADATA"
_SENTENCE = (
    f"This item was written by lcjax, not by Orbax's own handler: read {NOTE_FILE} beside it"
)
_CHECKS = ("has_pytree_metadata_file", "has_tensorstore_data_files")


def write_marker(item: epath.Path) -> None:
    """Writes the file into an item's (temporary) directory; the caller syncs the directory."""
    # Orbax quotes a key's type in its error when it does not know it.
    key = {"key": "lcjax", "key_type": _SENTENCE}
    entry = {"key_metadata": [key], "value_metadata": {}}
    text = json.dumps({"tree_metadata": {"('lcjax',)": entry}}, indent=1)
    storage.write(item / MARKER_FILE, [text.encode()])


def recognise_items() -> None:
    """Lets Orbax v1 recognise items by their manifest, for the rest of the process.

    This only adds directories that hold ``manifest.lcjax`` to those that ``ocp.load`` and
    ``ocp.metadata`` accept. Where Orbax has no such checks any more, nothing is done.
    """
    for name in _CHECKS:
        check = getattr(orbax_layout, name, None)
        if check is not None and not hasattr(check, "__wrapped__"):
            setattr(orbax_layout, name, _or_manifest(check))


def _or_manifest(check: Callable[[Any], Awaitable[bool]]) -> Callable[[Any], Awaitable[bool]]:
    @functools.wraps(check)
    async def has(path: Any) -> bool:
        return await asyncio.to_thread((path / MANIFEST_FILE).exists) or await check(path)

    return has

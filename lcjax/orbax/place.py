"""Which step and item a directory is: Orbax tells a handler neither."""

from __future__ import annotations

import re
from typing import NamedTuple

from etils import epath

from lcjax.chain import COMMIT_MARKER

_TEMPORARY = re.compile(r"\.orbax-checkpoint-tmp(-\d+)?$")
_STEP = re.compile(r"(\d+)$")
_STEP_METADATA = "_CHECKPOINT_METADATA"


class Place(NamedTuple):
    """Where an item's directory stands.

    Attributes:
      root: directory of the steps; None where the directory's name has no step.
      item: the item's name; empty where the step's directory is the item itself.
      step: the training step, or None.
      final: the item's directory after commit.
      marker: the file whose existence means that the step is committed, where the directory
        is written under its final name (commit-file mode); else None.
    """

    root: epath.Path | None
    item: str
    step: int | None
    final: epath.Path
    marker: epath.Path | None


def find(directory: epath.Path, step: int | None = None) -> Place:
    """Works out the place of a directory given to save or restore.

    While saving, Orbax marks temporary names: if the parent's has the mark, the directory is
    an item within a step; if only its own has, it is a step. Without marks the step's
    metadata file tells, and as a last resort the names: what lies in a directory whose name
    ends in a number is an item (``5/layer2``), unless it is a bare number itself (``run5/2``).

    Args:
      directory: what the handler was given.
      step: the step, if the caller said so.
    """
    own, own_marked = _strip(directory.name)
    above, above_marked = _strip(directory.parent.name)
    if above_marked:
        within = True
    elif own_marked or (directory / _STEP_METADATA).exists():
        within = False
    elif (directory.parent / _STEP_METADATA).exists():
        within = True
    else:
        within = _number(above) is not None and not own.isdigit()
    step_name = above if within else own
    outside = directory.parent.parent if within else directory.parent
    found = _number(step_name) if step is None else step
    final_step = outside / step_name
    final = final_step / own if within else final_step
    unmarked = not (own_marked or above_marked)
    return Place(
        outside if found is not None else None,
        own if within else "",
        found,
        final,
        final_step / COMMIT_MARKER if unmarked else None,
    )


def _strip(name: str) -> tuple[str, bool]:
    stripped = _TEMPORARY.sub("", name)
    return stripped, stripped != name


def _number(name: str) -> int | None:
    found = _STEP.search(name)
    return int(found.group(1)) if found else None

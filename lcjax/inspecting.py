"""``lcjax inspect``: what each step of a run holds, and what was lost of it."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from lcjax import chain, storage
from lcjax.chain import MANIFEST_FILE
from lcjax.errors import MissingFileError
from lcjax.record import Lost
from lcjax.session import Opened

NOTHING_LOST = Lost(0.0, 0.0, 0, 0, 0.0, 0.0)


class Leaf(NamedTuple):
    """A leaf of one step.

    Attributes:
      name: the leaf's name.
      dtype: its dtype, or the Python type of a scalar.
      shape: its shape.
      codec: as the manifest has it, ``"record"`` for scalars.
      bytes: of its chunks in this step's own segments; earlier segments are not counted.
      bits: the same in bits per element; None without elements.
      lost: what this save lost, None where it is exact.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    bytes: int
    bits: float | None
    lost: Lost | None


class Step(NamedTuple):
    """An item of one step.

    Attributes:
      step: the training step, or None where nothing tells.
      item: the item's name, empty where the step is the item.
      preset: the preset's name.
      key_frame: whether it stands by itself.
      bytes: new in this step: manifest, own segment, the chain's last segment.
      needed: bytes of all files that a restore reads.
      raw: bytes of the arrays in memory.
      relative_error: of the lossy parameters together; None where nothing is lost.
      max_error: of the same.
      zeros: elements postponed or dropped, over all lossy leaves.
      odd: elements stored exactly for not being finite or out of range.
      leaves: the leaves.
    """

    step: int | None
    item: str
    preset: str
    key_frame: bool
    bytes: int
    needed: int
    raw: int
    relative_error: float | None
    max_error: float | None
    zeros: int
    odd: int
    leaves: tuple[Leaf, ...]


def items_below(root: epath.Path) -> list[tuple[str, epath.Path]]:
    """The items that lcjax wrote below a directory: of a manager, a step, or one item itself.

    Returns:
      Names and directories, by step.

    Raises:
      MissingFileError: there are none.
    """
    if (root / MANIFEST_FILE).exists():
        return [("", root)]
    found: list[tuple[str, epath.Path]] = []
    for child in sorted(p for p in root.iterdir() if p.is_dir()) if root.exists() else ():
        if (child / MANIFEST_FILE).exists():
            found.append(("" if child.name.isdigit() else child.name, child))
            continue
        found += [
            (item.name, item)
            for item in sorted(p for p in child.iterdir() if p.is_dir())
            if (item / MANIFEST_FILE).exists()
        ]
    if not found:
        raise MissingFileError(
            f"{root}: no item that lcjax wrote lies here; give a manager's directory, a step's, "
            f"or an item's, which holds {MANIFEST_FILE}"
        )
    return found


def read(name: str, item: epath.Path) -> Step:
    """Describes an item from its manifest and the indices of its newest segments.

    Raises:
      MissingFileError: a file is not there.
      CorruptDataError: a file is damaged.
    """
    with Opened(item) as opened:
        record = opened.record
        last = {ref.process: ref for ref in opened.chain_refs}
        new = [*last.values(), *(ref for ref in opened.refs if ref.kind == "own")]
        sizes: dict[str, int] = {}
        stored: dict[str, int] = {}  # the words of a PRNG key have one dimension more
        files, segments = chain.open_segments(item, new)
        try:
            for opened_segment in segments:
                for leaf in opened_segment.leaves.values():
                    stored[leaf.name] = math.prod(leaf.shape) * leaf.dtype.itemsize
                    for chunk in leaf.chunks.values():
                        size = opened_segment.reader.chunk_size(chunk.number)
                        sizes[leaf.name] = sizes.get(leaf.name, 0) + size
        finally:
            for file in files:
                file.close()
        leaves = []
        for leaf_name, entry in zip(record.names, record.leaves, strict=True):
            if entry.spec is None:
                leaves.append(Leaf(leaf_name, entry.kind, (), "record", 0, None, None))
                continue
            elements, size = math.prod(entry.spec.shape), sizes.get(leaf_name, 0)
            bits = 8 * size / elements if elements else None
            leaves.append(
                Leaf(
                    leaf_name,
                    entry.spec.dtype,
                    entry.spec.shape,
                    entry.codec or "",
                    size,
                    bits,
                    entry.lost,
                )
            )
        manifest = storage.size_of(item / MANIFEST_FILE) or 0
        fidelity = record.fidelity or {}
        losses = [leaf.lost for leaf in leaves if leaf.lost is not None]
        return Step(
            record.step,
            name,
            record.preset["name"],
            record.key_frame,
            manifest + sum(ref.size for ref in new),
            manifest + sum(ref.size for ref in opened.refs),
            sum(stored.values()),
            fidelity.get("relative_error"),
            fidelity.get("max_error"),
            sum(lost.zeros for lost in losses),
            sum(lost.odd for lost in losses),
            tuple(leaves),
        )


def inspect(root: epath.PathLike) -> list[Step]:
    """Describes every item that lcjax wrote below a directory, by step.

    Args:
      root: directory of a manager, of a step or of an item.

    Raises:
      MissingFileError: nothing of lcjax's is there.
      CorruptDataError: a file is damaged.
    """
    steps = [read(name, item) for name, item in items_below(epath.Path(root))]
    return sorted(steps, key=lambda s: (-1 if s.step is None else s.step, s.item))


def to_json(step: Step) -> dict[str, Any]:
    """The description as JSON-able dicts."""
    leaves = [
        leaf._asdict() | {"lost": None if leaf.lost is None else leaf.lost._asdict()}
        for leaf in step.leaves
    ]
    return step._asdict() | {"leaves": leaves}


def picture(steps: Sequence[Step], path: pathlib.Path) -> None:
    """Draws bytes and error along the run, a line per item."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for item in sorted({s.item for s in steps}):
        mine = [s for s in steps if s.item == item and s.step is not None]
        at = [s.step for s in mine]
        above.plot(at, [s.bytes for s in mine], "o-", label=item or "item")
        keys = [s for s in mine if s.key_frame]
        above.plot([s.step for s in keys], [s.bytes for s in keys], "ks", fillstyle="none")
        errors = [math.nan if s.relative_error is None else s.relative_error for s in mine]
        below.plot(at, errors, "o-")
    above.set(yscale="log", ylabel="bytes new in the step (squares: key frames)")
    above.legend()
    below.set(xlabel="step", ylabel="relative error of the parameters' delta")
    figure.savefig(path, dpi=120)

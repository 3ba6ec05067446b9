"""Index ranges: how a leaf is cut into chunks, and hashing within them.

A *box* is ``(lo, hi)``, two tuples with one entry per dimension: the elements with
``lo[d] <= index[d] < hi[d]`` of a leaf. A 0-d leaf has the one box ``((), ())``.
"""

from __future__ import annotations

import math

import numpy as np

from lcjax import hashing

Box = tuple[tuple[int, ...], tuple[int, ...]]
CHUNK_ELEMENTS = 1 << 22  # target: large enough for tables to vanish, small enough to share out


def split(shape: tuple[int, ...], limit: int = CHUNK_ELEMENTS) -> list[Box]:
    """Cuts a whole leaf into boxes of at most ``limit`` elements, row-major, in order.

    Each box is contiguous in the row-major leaf. Along the first dimension whose rows fit
    the limit it takes as many rows as fit.
    """
    size = math.prod(shape)
    if size <= limit or not shape:
        return [((0,) * len(shape), tuple(shape))]
    row = size // shape[0]
    if row > limit:
        inner = split(shape[1:], limit)
        return [((i, *lo), (i + 1, *hi)) for i in range(shape[0]) for lo, hi in inner]
    step = max(1, limit // row)
    return [
        ((i,) + (0,) * (len(shape) - 1), (min(i + step, shape[0]), *shape[1:]))
        for i in range(0, shape[0], step)
    ]


def box_shape(box: Box) -> tuple[int, ...]:
    """Shape of the elements in a box."""
    return tuple(b - a for a, b in zip(*box, strict=True))


def flat_start(box: Box, shape: tuple[int, ...]) -> int:
    """Row-major index of a box's first element."""
    start = 0
    for low, size in zip(box[0], shape, strict=True):
        start = start * size + low
    return start


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index into the leaf."""
    return tuple(slice(a, b) for a, b in zip(*box, strict=True))


def tile_exactly(shape: tuple[int, ...], parts: list[Box]) -> bool:
    """Whether boxes, each within the shape, cover every element exactly once."""
    total = math.prod(shape)
    if len(parts) == 1:
        return parts[0] == ((0,) * len(shape), shape) or total == 0
    sizes = [math.prod(box_shape(box)) for box in parts]
    if sum(sizes) != total:
        return False
    at = 0
    for box, size in zip(parts, sizes, strict=True):
        if flat_start(box, shape) != at or not _is_one_run(box, shape):
            break
        at += size
    else:
        return True  # what ``split`` writes: contiguous boxes in order
    # With the sizes adding up, covering exactly once is the same as no two overlapping. Painting
    # takes a byte per element, and time in proportion to the leaf, however many boxes claim it.
    painted = np.zeros(shape, np.bool_)
    for box in parts:
        area = painted[slices(box)]
        if area.any():
            return False
        area[...] = True
    return True


def _is_one_run(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the box's elements lie side by side in the row-major leaf."""
    sizes = box_shape(box)
    dim = len(shape)
    while dim > 0 and sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    return math.prod(sizes[: max(dim - 1, 0)]) == 1


def box_hash(values: np.ndarray, box: Box, shape: tuple[int, ...]) -> str:
    """``hashing.value_hash`` of a box's elements, weighted by their place in the leaf.

    Args:
      values: contiguous, the box's elements in row-major order.
      box: where they lie.
      shape: shape of the whole leaf.
    """
    if _is_one_run(box, shape):
        return hashing.value_hash(values, flat_start(box, shape))
    return hashing.value_hash_of_runs(values, *_runs(box, shape))


def _runs(box: Box, shape: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Where the box's row-major runs start in the leaf, and how long each is."""
    sizes = box_shape(box)
    run = 1
    dim = len(shape)
    while dim > 0:
        dim -= 1
        run *= sizes[dim]
        if sizes[dim] != shape[dim]:
            break
    starts = np.zeros(1, np.int64)
    for d in range(dim):
        index = np.arange(box[0][d], box[1][d], dtype=np.int64)
        starts = (starts[:, None] * shape[d] + index).reshape(-1)
    rest = math.prod(shape[dim:])
    inner = flat_start((box[0][dim:], box[1][dim:]), shape[dim:])
    return starts * rest + inner, run

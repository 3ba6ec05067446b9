"""First moments without a chain: predicted from what a reader knows anyway, then corrected.

Adam's ``m`` is a mean of recent gradients, and what a parameter moved since a save is, up to
the learning rate, the sum of ``-m / sqrt(v)`` over the steps between. A single quantized delta
tells little of that, several tell more: the *trail* of a parameter is ``D <- memory * D +
(c_new - c_old)`` over the deltas of its chain, and ``m`` is predicted as ``gain * sqrt(v) *
D``, with one gain per leaf, found when saving and stored. What the prediction misses of ``m /
sqrt(v)`` is quantized with a dead zone, or dropped. A momentum buffer without second moments
has ``sqrt(v) = 1``; a key frame, or a leaf whose parameter is elsewhere, has no trail, and the
gain 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lcjax import entropy
from lcjax.codecs import _exceptions, steps
from lcjax.codecs._floats import float32
from lcjax.errors import CorruptDataError
from lcjax.hashing import read_only

DTYPES = ("float32", "bfloat16", "float16")


MEMORY_UNIT = 256  # a trail's memory is a whole number of these parts


class Recipe(NamedTuple):
    """How a trail is made.

    Attributes:
      param: the parameter's name.
      span: over how many of the chain's last deltas, 1 or more.
      memory: what one delta leaves of the trail before, in parts of ``MEMORY_UNIT``.
    """

    param: str
    span: int
    memory: int


class Fit(NamedTuple):
    """Sums over a leaf, with ``p = sqrt(v) D`` and ``y = m / sqrt(v)``.

    Attributes:
      cross: of ``m p``.
      predicted_squares: of ``p^2``.
      own_squares: of ``m^2``.
      scaled_cross: of ``y D``.
      trail_squares: of ``D^2``.
      scaled_squares: of ``y^2``.
      elements: how many count: everything finite, ``v`` positive.
    """

    cross: float
    predicted_squares: float
    own_squares: float
    scaled_cross: float
    trail_squares: float
    scaled_squares: float
    elements: int


class Encoded(NamedTuple):
    """A chunk.

    Attributes:
      table: float32 ``(codes,)``.
      exceptions: how many elements are stored exactly.
      payload: the bytes.
      values: what a reader rebuilds.
      losses: what was lost of ``m``.
    """

    table: np.ndarray
    exceptions: int
    payload: bytes
    values: np.ndarray
    losses: steps.Losses


def extended(trail: np.ndarray | None, new: np.ndarray, old: np.ndarray, memory: int) -> np.ndarray:
    """A trail one delta on: ``memory / 256 * trail + (new - old)``, in float32, flat.

    Args:
      trail: float32 ``(elements,)``, not changed; None for the first delta.
      new: the parameter after the delta, one of ``DTYPES``.
      old: the parameter before it.
      memory: see ``Recipe``.

    Returns:
      ``(elements,)``. Each operation is rounded to float32; a difference, and a sum, that is
      not finite counts as 0.
    """
    from lcjax.codecs import _moment_kernels as kernels

    out = np.zeros(new.size, np.float32) if trail is None else trail.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        kernels.extend(
            *(float32(new.reshape(-1)), float32(old.reshape(-1))),
            *(np.float32(memory / MEMORY_UNIT), out),
        )
    return out


def root_of(v: np.ndarray) -> np.ndarray:
    """``sqrt(v)`` in float32, flat; 0 where ``v`` is negative or not finite."""
    x = v.reshape(-1).astype(np.float32)
    with np.errstate(invalid="ignore"):
        x[~((x > 0) & np.isfinite(x))] = 0
    # IEEE 754 asks for the correctly rounded root, so every machine computes the same.
    return np.sqrt(x, out=x)


def fit(m: np.ndarray, trail: np.ndarray, root: np.ndarray) -> Fit:
    """Sums for the gain.

    Args:
      m: values, flat, one of ``DTYPES``.
      trail: float32, see ``extended``.
      root: float32, see ``root_of``.
    """
    from lcjax.codecs import _moment_kernels as kernels

    out = np.zeros(7)
    kernels.fit(float32(m), read_only(trail), read_only(root), out)
    sums = [float(x) for x in out]
    return Fit(sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], int(sums[6]))


def encode(
    m: np.ndarray,
    trail: np.ndarray,
    root: np.ndarray,
    gain: float,
    step: float | None,
    dead_zone: float,
) -> Encoded:
    """Encodes a chunk.

    Args:
      m: values, flat, one of ``DTYPES``.
      trail: float32, see ``extended``.
      root: float32, see ``root_of``.
      gain: of the prediction, a float32 number.
      step: of the quantizer, in units of ``m / root``; None drops the remainder.
      dead_zone: its threshold, in steps.
    """
    from lcjax.codecs import _moment_kernels as kernels

    rest = np.empty(m.size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        kernels.remainder(float32(m), read_only(trail), read_only(root), np.float32(gain), rest)
    if step is None:
        odd = ~np.isfinite(rest)
        where = np.flatnonzero(odd) if odd.any() else np.zeros(0, np.int64)
        codes, table = np.zeros(m.size, np.uint8), np.zeros(1, np.float32)
    else:
        made = steps.quantize(rest, np.zeros_like(rest), step, dead_zone)
        codes, table, where = made.codes, made.table, made.where
    exact = m[where]
    values = _rebuild(trail, root, gain, codes, table, m.dtype)
    values[where] = exact
    payload = _exceptions.pack(where, exact) + entropy.encode(codes, threads=1)
    zeros = m.size - int(np.count_nonzero(codes)) - where.size
    losses = steps.Losses(*steps.losses(m, values), zeros, int(where.size))
    return Encoded(table, int(where.size), payload, values, losses)


def decode(
    payload: memoryview,
    trail: np.ndarray,
    root: np.ndarray,
    gain: float,
    table: np.ndarray,
    exceptions: int,
    dtype: np.dtype,
) -> np.ndarray:
    """Inverse of ``encode``.

    Raises:
      CorruptDataError: the payload is not what ``encode`` writes.
    """
    count = root.size
    where, bits, rest = _exceptions.unpack(payload, exceptions, count, dtype.itemsize)
    codes = entropy.decode(rest, count=count, threads=1)
    if codes.size and int(codes.max()) >= table.size:
        raise CorruptDataError(
            f"code {int(codes.max())} is outside its table of {table.size} entries"
        )
    values = _rebuild(trail, root, gain, codes, table, dtype)
    _exceptions.put(values, where, bits)
    return values


def _rebuild(
    trail: np.ndarray,
    root: np.ndarray,
    gain: float,
    codes: np.ndarray,
    table: np.ndarray,
    dtype: np.dtype,
) -> np.ndarray:
    from lcjax.codecs import _moment_kernels as kernels

    out = np.empty(codes.size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        kernels.rebuild(
            *(read_only(trail), read_only(root), np.float32(gain), read_only(codes)),
            *(read_only(table), out, out.view(np.uint32)),
        )
        return out if dtype == np.float32 else out.astype(dtype)

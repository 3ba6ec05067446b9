"""First moments without a chain: predicted from what a reader knows anyway, then corrected.

Adam's ``m`` is a mean of recent gradients, and the parameter's last delta is, up to the
learning rate, the sum of ``-m / sqrt(v)`` over the steps since the save before: so ``m`` is
predicted as ``gain * sqrt(v) * (c_new - c_old)``, with one gain per leaf, fitted when saving
and stored. What the prediction misses of ``m / sqrt(v)`` is quantized with a dead zone, or
dropped. A momentum buffer without second moments has ``sqrt(v) = 1``; a key frame, or a leaf
whose parameter is elsewhere, has no delta, and the gain 0.
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


class Fit(NamedTuple):
    """Sums over a leaf, with ``y = m / sqrt(v)``: of ``y delta``, ``delta^2`` and ``y^2``."""

    cross: float
    delta_squares: float
    own_squares: float
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


def delta_of(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """``new - old`` in float32, flat; 0 where that is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        d = new.reshape(-1).astype(np.float32) - old.reshape(-1).astype(np.float32)
    d[~np.isfinite(d)] = 0
    return d


def root_of(v: np.ndarray) -> np.ndarray:
    """``sqrt(v)`` in float32, flat; 0 where ``v`` is negative or not finite."""
    x = v.reshape(-1).astype(np.float32)
    with np.errstate(invalid="ignore"):
        x[~((x > 0) & np.isfinite(x))] = 0
    # IEEE 754 asks for the correctly rounded root, so every machine computes the same.
    return np.sqrt(x, out=x)


def fit(m: np.ndarray, delta: np.ndarray, root: np.ndarray) -> Fit:
    """Sums for the gain.

    Args:
      m: values, flat, one of ``DTYPES``.
      delta: float32, see ``delta_of``.
      root: float32, see ``root_of``.
    """
    from lcjax.codecs import _moment_kernels as kernels

    out = np.zeros(4)
    kernels.fit(float32(m), read_only(delta), read_only(root), out)
    return Fit(float(out[0]), float(out[1]), float(out[2]), int(out[3]))


def encode(
    m: np.ndarray,
    delta: np.ndarray,
    root: np.ndarray,
    gain: float,
    step: float | None,
    dead_zone: float,
) -> Encoded:
    """Encodes a chunk.

    Args:
      m: values, flat, one of ``DTYPES``.
      delta: float32, see ``delta_of``.
      root: float32, see ``root_of``.
      gain: of the prediction, a float32 number.
      step: of the quantizer, in units of ``m / root``; None drops the remainder.
      dead_zone: its threshold, in steps.
    """
    from lcjax.codecs import _moment_kernels as kernels

    rest = np.empty(m.size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        kernels.remainder(float32(m), read_only(delta), read_only(root), np.float32(gain), rest)
    if step is None:
        odd = ~np.isfinite(rest)
        where = np.flatnonzero(odd) if odd.any() else np.zeros(0, np.int64)
        codes, table = np.zeros(m.size, np.uint8), np.zeros(1, np.float32)
    else:
        made = steps.quantize(rest, np.zeros_like(rest), step, dead_zone)
        codes, table, where = made.codes, made.table, made.where
    exact = m[where]
    values = _rebuild(delta, root, gain, codes, table, m.dtype)
    values[where] = exact
    payload = _exceptions.pack(where, exact) + entropy.encode(codes, threads=1)
    zeros = m.size - int(np.count_nonzero(codes)) - where.size
    losses = steps.Losses(*steps.losses(m, values), zeros, int(where.size))
    return Encoded(table, int(where.size), payload, values, losses)


def decode(
    payload: memoryview,
    delta: np.ndarray,
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
    values = _rebuild(delta, root, gain, codes, table, dtype)
    _exceptions.put(values, where, bits)
    return values


def _rebuild(
    delta: np.ndarray,
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
            *(read_only(delta), read_only(root), np.float32(gain), read_only(codes)),
            *(read_only(table), out, out.view(np.uint32)),
        )
        return out if dtype == np.float32 else out.astype(dtype)

"""Parameters by steps that follow their updates: a uniform quantizer with a dead zone.

A *delta* takes ``d = u - c`` of a chunk: ``|d|`` up to the threshold is code 0 and is
postponed, as in LC-Checkpoint; above, bins of one step each are numbered ``+1, -1, +2, ...``
as codes 1, 2, 3, ... Their representatives are one step apart. The chunk is stored as a
table and codes, and read as LC-Checkpoint's are (``c + table[code]``, see
``lcjax.codecs.lc``).

A *key frame* stores integers ``n`` with ``c = n * 2^e``, exact in float32.

Representatives are multiples of a power of two, 1/16 or less of a step: as long as ``|n|``
stays below 2^24 every addition is exact, so deltas can be joined by adding integers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lcjax.codecs import _exceptions, _planes, lc
from lcjax.codecs._floats import float32
from lcjax.errors import CorruptDataError
from lcjax.hashing import read_only

DTYPES = ("float32", "bfloat16", "float16")
LEAST_STEP = 2.0**-120
_ODD = 255
_MAX_WORD = 1 << 25  # zigzag of +-2^24


class Measure(NamedTuple):
    """Sums over the elements whose delta is finite.

    Attributes:
      delta_squares: of ``u - c``; of ``u`` where there is no reference.
      state_squares: of ``u``.
      elements: how many they are.
      top: largest ``|u|``.
    """

    delta_squares: float
    state_squares: float
    elements: int
    top: float


class Losses(NamedTuple):
    """What a chunk lost, over its finite elements.

    Attributes:
      error_squares: sum of ``(u - c_new)^2``.
      max_error: largest ``|u - c_new|``.
      zeros: elements with code 0, or the value 0 where there is no delta.
      odd: elements that are not finite, or out of range: stored exactly.
    """

    error_squares: float
    max_error: float
    zeros: int
    odd: int


def measure(u: np.ndarray, c: np.ndarray | None) -> Measure:
    """Measures a chunk's delta.

    Args:
      u: new values, flat, one of ``DTYPES``.
      c: the reference, same shape and dtype, or None.
    """
    from lcjax.codecs import _step_kernels as kernels

    out = np.zeros(4)
    if c is None:
        kernels.measure_alone(float32(u), out)
    else:
        kernels.measure(float32(u), float32(c), out)
    return Measure(float(out[0]), float(out[1]), int(out[2]), float(out[3]))


class Delta(NamedTuple):
    """A quantized chunk.

    Attributes:
      codes: uint8 ``(elements,)``.
      table: float32 ``(codes,)``, ``table[0] == 0``.
      where: int64 indices of the exceptions, ascending.
      exact: their elements.
      reference: the new reference of the chunk.
      losses: what was lost.
    """

    codes: np.ndarray
    table: np.ndarray
    where: np.ndarray
    exact: np.ndarray
    reference: np.ndarray
    losses: Losses


def quantize(
    u: np.ndarray, c: np.ndarray, step: float, dead_zone: float, reach: float | None = None
) -> Delta:
    """Quantizes a chunk's delta.

    Args:
      u: new values, flat, one of ``DTYPES``.
      c: the reference, same shape and dtype.
      step: width of a bin, in the leaf's units.
      dead_zone: the threshold in steps; 0.5 makes all bins alike.
      reach: the first representative, in steps; the others follow one step apart. None
        takes the bins' middles.
    """
    from lcjax.codecs import _step_kernels as kernels

    step = max(step, LEAST_STEP)
    with np.errstate(invalid="ignore", over="ignore"):
        d = float32(u) - float32(c)
    codes = np.empty(u.size, np.uint8)
    counts = np.zeros(256, np.int64)
    odd = kernels.quantize(
        read_only(d), np.float32(dead_zone * step), np.float32(step), codes, counts
    )
    where = np.flatnonzero(codes == _ODD) if odd else np.zeros(0, np.int64)
    codes[where] = 0
    word = np.dtype(f"u{u.dtype.itemsize}")
    where = where[u.view(word)[where] != c.view(word)[where]]  # what stays needs no exception
    table = _table(counts, step, dead_zone + 0.5 if reach is None else reach)
    reference = c.copy()
    apply(reference, codes, table)
    exact = u[where]
    reference[where] = exact
    zeros = u.size - int(counts.sum()) - where.size
    lost = Losses(*losses(u, reference), zeros, where.size)
    return Delta(codes, table, where, exact, reference, lost)


def _table(counts: np.ndarray, step: float, first: float) -> np.ndarray:
    """Representatives up to the last code in use, on the grid of the step."""
    used = np.flatnonzero(counts)
    codes = np.arange(int(used[-1]) + 1 if used.size else 1)
    unit = _unit(step)
    sizes = np.rint(((codes + 1) // 2 - 1 + first) * step / unit) * unit
    table = np.where(codes % 2 == 1, sizes, -sizes).astype(np.float32)
    table[0] = 0
    return table


def _unit(step: float) -> float:
    """The grid of the representatives for a step."""
    return 2.0 ** (math.floor(math.log2(step)) - 4)


def bounded_step(bound: float) -> float:
    """The largest step whose bins, rounded to the middle, err by no more than ``bound``.

    It is a multiple of the grid, so that the middles are on it.
    """
    unit = _unit(2 * bound)
    return math.floor(2 * bound / unit) * unit


def losses(u: np.ndarray, c: np.ndarray) -> tuple[float, float]:
    """Sum of squares and largest value of ``u - c``, over finite ones."""
    from lcjax.codecs import _step_kernels as kernels

    out = np.zeros(2)
    kernels.losses(float32(u), float32(c), out)
    return float(out[0]), float(out[1])


def shorten(u: np.ndarray, mantissa: int) -> np.ndarray:
    """The values rounded to ``mantissa`` explicit bits (ties away from 0).

    Args:
      u: one of ``DTYPES``; values that are not finite come out as anything.
      mantissa: bits to keep, 0 or more.
    """
    width = {"float32": 23, "bfloat16": 7, "float16": 10}[u.dtype.name]
    drop = width - mantissa
    if drop <= 0:
        return u.copy()
    word = np.dtype(f"u{u.dtype.itemsize}")
    half, mask = word.type(1 << (drop - 1)), ~word.type((1 << drop) - 1)
    with np.errstate(over="ignore"):
        return ((u.view(word) + half) & mask).view(u.dtype)


def apply(reference: np.ndarray, codes: np.ndarray, table: np.ndarray) -> None:
    """Moves a reference by a delta, in place, see ``lc.apply``; float16 as bfloat16."""
    if reference.dtype.name in lc.SUPPORTED_DTYPES:
        lc.apply(reference, codes, table)
        return
    moved = np.flatnonzero(codes)
    with np.errstate(over="ignore"):
        reference[moved] = (float32(reference[moved]) + table[codes[moved]]).astype(reference.dtype)


# --- key frames -------------------------------------------------------------------------


class Key(NamedTuple):
    """A chunk as integers on a grid.

    Attributes:
      exponent: ``e``; the values are ``n * 2^e``, rounded to the leaf's dtype.
      payload: planes of the integers, after the exceptions' head.
      exceptions: how many there are.
      reference: the chunk's new reference.
      losses: what was lost.
    """

    exponent: int
    payload: bytes
    exceptions: int
    reference: np.ndarray
    losses: Losses


def grid_exponent(step: float, top: float) -> int:
    """The grid for values up to ``top``: a power of two no larger than ``step``.

    ``|n|`` stays below 2^24, and the grid above 2^-126, below which backends see 0.
    """
    wanted = math.floor(math.log2(step)) if step > 0 else -126
    least = math.frexp(top)[1] - 24 if top > 0 else -126
    return min(max(wanted, least, -126), 127)


def encode_key(u: np.ndarray, exponent: int) -> Key:
    """Encodes a chunk by itself.

    Args:
      u: values, flat, one of ``DTYPES``.
      exponent: of the grid, -126 to 127, see ``grid_exponent``.
    """
    from lcjax.codecs import _step_kernels as kernels

    values = float32(u)
    words = np.empty(u.size, np.uint32)
    inverse = np.float32(2.0**-exponent)
    top, odd = kernels.to_grid(values, inverse, words)
    reference = _grid_values(words, exponent, u.dtype)
    where = np.zeros(0, np.int64)
    if odd:
        with np.errstate(invalid="ignore", over="ignore"):
            inside = np.abs(np.rint(values * inverse)) <= 1 << 24
        where = np.flatnonzero(~inside)
        reference[where] = u[where]
    from lcjax.codecs import _exact_kernels

    width = max(1, (int(top).bit_length() + 7) // 8)
    planes = np.empty((width, u.size), np.uint8)
    _exact_kernels.split_planes(read_only(words), planes)
    payload = bytearray(_exceptions.pack(where, u[where]))
    payload.append(width)
    payload += _planes.pack(planes)
    zeros = u.size - int(np.count_nonzero(words)) - int(odd)
    return Key(
        exponent,
        bytes(payload),
        int(where.size),
        reference,
        Losses(*losses(u, reference), zeros, int(odd)),
    )


def decode_key(
    payload: memoryview, exponent: int, exceptions: int, dtype: np.dtype, count: int
) -> np.ndarray:
    """Inverse of ``encode_key``.

    Args:
      payload: not trusted.
      exponent: of the grid, -126 to 127.
      exceptions: how many the chunk announces.
      dtype: one of ``DTYPES``.
      count: number of elements; bounds every allocation.

    Raises:
      CorruptDataError: the payload is not what ``encode_key`` writes.
    """
    where, bits, rest = _exceptions.unpack(payload, exceptions, count, dtype.itemsize)
    if len(rest) < 1 or not 1 <= rest[0] <= 4:
        raise CorruptDataError("the number of its planes is damaged")
    planes = _planes.unpack(rest[1:], rest[0], count)
    from lcjax.codecs import _exact_kernels

    words = np.empty(count, np.uint32)
    _exact_kernels.join_planes(read_only(planes), words)
    if count and int(words.max()) > _MAX_WORD:
        raise CorruptDataError("an integer of its grid has more than 24 bits")
    values = _grid_values(words, exponent, dtype)
    _exceptions.put(values, where, bits)
    return values


def _grid_values(words: np.ndarray, exponent: int, dtype: np.dtype) -> np.ndarray:
    from lcjax.codecs import _step_kernels as kernels

    out = np.empty(words.size, np.float32)
    kernels.from_grid(read_only(words), np.float32(2.0**exponent), out)
    if dtype == np.float32:
        return out
    with np.errstate(over="ignore"):
        return out.astype(dtype)

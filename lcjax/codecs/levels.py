"""Second moments as integer levels of their logarithm, which can never become 0.

The level of a positive number is the integer in its leading bits: exponent and six bits of
the mantissa, so 64 levels an octave (linear within each; the logarithm is never computed).
The reference lies on levels. A delta is a drift that all positive elements of a chunk
share, and per element a multiple of ``stride`` levels, 0 within a dead zone. Elements whose
reference is not positive take a level of their own (``low + (symbol - 1) * stride``), so a
key frame is the delta against zeros. What was positive stays positive: levels end at the
smallest normal number. Elements that become 0, negative or not finite are stored exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lcjax import entropy
from lcjax._varint import read_varint, varint
from lcjax.codecs import _exceptions
from lcjax.codecs._floats import float32
from lcjax.errors import CorruptDataError
from lcjax.hashing import read_only

PER_OCTAVE = 64
DTYPES = ("float32", "bfloat16")
MAX_STRIDE = 1 << 14
_ODD = 255
# Bits below a level, and the bits of infinity.
_FORMATS = {"float32": (17, 0x7F800000), "bfloat16": (1, 0x7F80)}
_LEAST, _MOST = PER_OCTAVE, 255 * PER_OCTAVE - 1  # smallest and largest normal numbers


class Spec(NamedTuple):
    """What a chunk's symbols mean; integers, in levels.

    Attributes:
      shift: drift of all positive elements.
      stride: levels between neighbouring symbols.
      extra: the first representative is ``stride + extra`` away.
      low: level of symbol 1 where the reference is not positive.
    """

    shift: int
    stride: int
    extra: int
    low: int


class Losses(NamedTuple):
    """What a chunk lost, over elements positive before and after.

    Attributes:
      state_squares: sum of ``v^2``.
      error_squares: sum of ``(v - c)^2``.
      max_error: largest ``|v - c|``.
      max_octaves: largest ``|log2(v / c)|``, to 1/64.
      zeros: elements that kept the reference's level, drift aside.
      odd: elements stored exactly.
    """

    state_squares: float
    error_squares: float
    max_error: float
    max_octaves: float
    zeros: int
    odd: int


class Encoded(NamedTuple):
    """A chunk.

    Attributes:
      spec: its parameters.
      exceptions: how many elements are stored exactly.
      payload: the bytes.
      reference: the chunk's new reference.
      losses: what was lost.
    """

    spec: Spec
    exceptions: int
    payload: bytes
    reference: np.ndarray
    losses: Losses


def drift(u: np.ndarray, c: np.ndarray) -> tuple[int, int]:
    """Sum of the level differences over elements positive in both, and how many they are."""
    from lcjax.codecs import _level_kernels as kernels

    drop, infinity = _FORMATS[u.dtype.name]
    out = np.zeros(2, np.int64)
    kernels.drift(_bits(u), _bits(c), drop, infinity, out)
    return int(out[0]), int(out[1])


def encode(
    u: np.ndarray, c: np.ndarray | None, octaves: float, dead_zone: float, shift: int = 0
) -> Encoded:
    """Encodes a chunk.

    Args:
      u: values, flat, one of ``DTYPES``; those that are not positive cost 10 bytes each
        unless they stay as they were.
      c: the reference, same shape and dtype; None for a key frame.
      octaves: the stride, in factors of two; at least 1/64.
      dead_zone: in strides; 0.5 rounds to the nearest level.
      shift: drift in levels, shared by the chunk.
    """
    from lcjax.codecs import _level_kernels as kernels

    base = np.zeros_like(u) if c is None else c
    drop, infinity = _FORMATS[u.dtype.name]
    stride = min(max(1, round(octaves * PER_OCTAVE)), MAX_STRIDE)
    dead = max(0, round(dead_zone * stride))
    low = int(kernels.lowest(_bits(u), _bits(base), drop, infinity, _LEAST, _MOST + 1))
    low = 0 if low > _MOST else low  # no element takes a level of its own
    spec = Spec(int(shift), stride, dead - stride // 2, low)
    symbols = np.empty(u.size, np.uint8)
    odd = int(
        kernels.quantize(
            *(_bits(u), _bits(base), drop, infinity, spec.shift, stride, dead, low),
            *(_LEAST, _MOST, symbols),
        )
    )
    where = np.flatnonzero(symbols == _ODD) if odd else np.zeros(0, np.int64)
    symbols[where] = 0
    exact = u[where]
    payload = _exceptions.pack(where, exact)
    mask = np.empty(u.size, np.bool_)
    count = int(kernels.positive(_bits(base), infinity, mask))
    changes, births = np.empty(count, np.uint8), np.empty(u.size - count, np.uint8)
    kernels.split(read_only(symbols), read_only(mask), changes, births)
    first = entropy.encode(changes, threads=1)
    payload += varint(len(first)) + first + entropy.encode(births, threads=1)
    reference = base.copy()
    _apply(reference, spec, symbols)
    reference[where] = exact
    lost = np.zeros(4)
    kernels.losses(
        _bits(u), _bits(reference), drop, infinity, *(float32(u), float32(reference)), lost
    )
    zeros = u.size - int(np.count_nonzero(symbols)) - odd
    state, error, top, distance = map(float, lost)
    losses = Losses(state, error, top, distance / PER_OCTAVE, zeros, odd)
    return Encoded(spec, odd, payload, reference, losses)


def decode(payload: memoryview, spec: Spec, exceptions: int, reference: np.ndarray) -> None:
    """Moves a reference by a chunk, in place.

    Args:
      payload: not trusted.
      spec: as the chunk states it, checked by ``valid``.
      exceptions: how many the chunk announces.
      reference: contiguous, flat, one of ``DTYPES``; zeros for a key frame.

    Raises:
      CorruptDataError: the payload is not what ``encode`` writes.
    """
    from lcjax.codecs import _level_kernels as kernels

    size = reference.size
    where, bits, rest = _exceptions.unpack(payload, exceptions, size, reference.dtype.itemsize)
    length, at = read_varint(rest, 0)
    if length > len(rest) - at:
        raise CorruptDataError(f"stream of {length} bytes where {len(rest) - at} are left")
    _, infinity = _FORMATS[reference.dtype.name]
    mask = np.empty(size, np.bool_)
    count = int(kernels.positive(_bits(reference), infinity, mask))
    changes = entropy.decode(rest[at : at + length], count=count, threads=1)
    births = entropy.decode(rest[at + length :], count=size - count, threads=1)
    symbols = np.empty(size, np.uint8)
    kernels.join(read_only(changes), read_only(births), read_only(mask), symbols)
    _apply(reference, spec, symbols)
    _exceptions.put(reference, where, bits)


def valid(spec: Spec) -> bool:
    """Whether parameters from a file are within range."""
    return (
        all(type(x) is int for x in spec)
        and abs(spec.shift) <= _MOST
        and 1 <= spec.stride <= MAX_STRIDE
        and abs(spec.extra) <= MAX_STRIDE
        and 0 <= spec.low <= _MOST
    )


def _apply(reference: np.ndarray, spec: Spec, symbols: np.ndarray) -> None:
    from lcjax.codecs import _level_kernels as kernels

    drop, infinity = _FORMATS[reference.dtype.name]
    bits = reference.view(np.dtype(f"u{reference.dtype.itemsize}"))
    kernels.apply(
        *(bits, drop, infinity, spec.shift, spec.stride, spec.extra, spec.low),
        *(_LEAST, _MOST, read_only(symbols)),
    )


def _bits(values: np.ndarray) -> np.ndarray:
    return read_only(values.view(np.dtype(f"u{values.dtype.itemsize}")))

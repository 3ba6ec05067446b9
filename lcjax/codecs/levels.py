"""Second moments as integer levels of their logarithm, which can never become 0.

The level of a positive number is the integer in its leading bits: exponent and six bits of
the mantissa, so 64 levels an octave (linear within each; the logarithm is never computed).
The reference lies on levels. A delta is a drift that all positive elements of a chunk
share, and per element a multiple of ``stride`` levels, 0 within a dead zone. Elements whose
reference is not positive take a level of their own (``low + (symbol - 1) * stride``), so a
key frame is the delta against zeros. What was positive stays positive: levels end at the
smallest normal number. Elements that become 0, negative or not finite are stored exactly.

How likely an element is to change depends on how large it is: small second moments rise, large
ones decay. So a delta's symbols are cut into classes by the level of their reference, which a
reader has, each a stream of its own, as many as make the chunk smallest.
"""

from __future__ import annotations

import itertools
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
MAX_EDGES = 15
# Classes are looked for among so many of about the same size, whose edges are a quarter octave
# apart; what a stream costs beside its symbols' entropy is an estimate.
_CANDIDATES, _FOLD = 48, 4
_STREAM_BITS, _SYMBOL_BITS = 100.0, 5.0


class Spec(NamedTuple):
    """What a chunk's symbols mean; integers, in levels.

    Attributes:
      shift: drift of all positive elements.
      stride: levels between neighbouring symbols.
      extra: the first representative is ``stride + extra`` away.
      low: level of symbol 1 where the reference is not positive.
      edges: levels of the reference at which the second, third, ... class begins, ascending.
    """

    shift: int
    stride: int
    extra: int
    low: int
    edges: tuple[int, ...] = ()


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
    if c is not None:
        spec = spec._replace(edges=_edges(_bits(c), symbols, drop, infinity))
    keys, counts = _classes(base, spec)
    mixed = np.empty(u.size, np.uint8)
    kernels.split(read_only(symbols), read_only(keys), _begins(counts), mixed)
    payload = _exceptions.pack(where, exact)
    # Elements without a level of reference are class 0, and come last.
    at = int(counts[0])
    for count in counts[1:]:
        stream = entropy.encode(mixed[at : at + int(count)], threads=1)
        payload += varint(len(stream)) + stream
        at += int(count)
    payload += entropy.encode(mixed[: int(counts[0])], threads=1)
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
    keys, counts = _classes(reference, spec)
    mixed, at, begin = np.empty(size, np.uint8), 0, int(counts[0])
    for number, count in enumerate(int(n) for n in (*counts[1:], counts[0])):
        if number == len(spec.edges) + 1:
            stream, begin = rest[at:], 0
        else:
            length, at = read_varint(rest, at)
            if length > len(rest) - at:
                raise CorruptDataError(f"stream of {length} bytes where {len(rest) - at} are left")
            stream, at = rest[at : at + length], at + length
        mixed[begin : begin + count] = entropy.decode(stream, count=count, threads=1)
        begin += count
    symbols = np.empty(size, np.uint8)
    kernels.join(read_only(mixed), read_only(keys), _begins(counts), symbols)
    _apply(reference, spec, symbols)
    _exceptions.put(reference, where, bits)


def valid(spec: Spec) -> bool:
    """Whether parameters from a file are within range."""
    return (
        all(type(x) is int for x in (*spec[:4], *spec.edges))
        and len(spec.edges) <= MAX_EDGES
        and all(0 < edge <= _MOST for edge in spec.edges)
        and all(a < b for a, b in itertools.pairwise(spec.edges))
        and abs(spec.shift) <= _MOST
        and 1 <= spec.stride <= MAX_STRIDE
        and abs(spec.extra) <= MAX_STRIDE
        and 0 <= spec.low <= _MOST
    )


def _edges(c: np.ndarray, symbols: np.ndarray, drop: int, infinity: int) -> tuple[int, ...]:
    """Where to cut a delta's symbols into classes, see ``Spec.edges``.

    Args:
      c: bits of the reference.
      symbols: uint8, of all elements.
      drop: bits below a level.
      infinity: bits of infinity.
    """
    from lcjax.codecs import _level_kernels as kernels
    from lcjax.codecs._class_kernels import merge_classes

    levels = np.zeros((_MOST >> _FOLD) + 1, np.int64)
    kernels.level_counts(c, drop, infinity, _FOLD, levels)
    below = np.cumsum(levels)
    groups = min(_CANDIDATES, int(below[-1]) // 64)
    if groups < 2:
        return ()
    wanted = np.arange(1, groups) * (int(below[-1]) / groups)
    # The first group of levels is never an edge: nothing would be below it.
    cuts = np.unique(np.searchsorted(below, wanted, side="left") + 1)
    cuts = cuts[(cuts <= _MOST >> _FOLD) & (below[cuts - 1] < below[-1])] << _FOLD
    edges = tuple(int(x) for x in cuts)
    keys, _ = _keys(c, drop, infinity, edges)
    counts = np.zeros((len(edges) + 2, 256), np.int64)
    kernels.joint_counts(symbols, keys, counts)
    begins = np.zeros(len(edges) + 1, np.int64)
    left, _ = merge_classes(counts[1:].copy(), _STREAM_BITS, _SYMBOL_BITS, MAX_EDGES + 1, begins)
    return tuple(edges[int(k) - 1] for k in begins[1:left])


def _classes(reference: np.ndarray, spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    """The class of each element, 0 without a level, and the size of each class."""
    drop, infinity = _FORMATS[reference.dtype.name]
    return _keys(_bits(reference), drop, infinity, spec.edges)


def _keys(
    bits: np.ndarray, drop: int, infinity: int, edges: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    from lcjax.codecs import _level_kernels as kernels

    table = 1 + np.searchsorted(edges, np.arange(_MOST + 1), side="right")
    keys = np.empty(bits.size, np.uint8)
    counts = np.zeros(len(edges) + 2, np.int64)
    kernels.classify(bits, drop, infinity, table.astype(np.uint8), keys, counts)
    return keys, counts


def _begins(counts: np.ndarray) -> np.ndarray:
    """Where each class begins among symbols sorted by class."""
    return np.cumsum(counts) - counts


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

"""Floats of 2 and 4 bytes as tokens and raw bits.

A word is mapped to an integer ``z`` that is small, or alike for many words; its *token*
holds where the leading one of ``z`` is and ``depth`` bits below it, and the bits after that
are stored as they are. Raw bits are near random, so nothing is lost by that, and tokens are
few. Forms:

* ``DIFF``: zigzag of the difference to the base, of integers that are ordered like floats.
* ``XOR``: the bits that are not the base's, the sign lowest.
* ``ALONE``: the value by itself; its token is its exponent and ``depth`` bits of mantissa.

How far a word moves depends on how large it is, so tokens are cut into classes by exponent
and a mantissa bit of the base, which a reader has, each class with a table of its own.
Where most words stay as they were, a stream of which ones moved comes first (``sparse``), and
only those have tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from lcjax import entropy
from lcjax._varint import read_varint, varint
from lcjax.errors import CorruptDataError
from lcjax.hashing import read_only

DIFF, XOR, ALONE = 0, 1, 2
# Mantissa bits of the dtypes that can be coded; complex numbers are pairs.
MANTISSA = {"float32": 23, "complex64": 23, "float16": 10, "bfloat16": 7}
_MAX_EDGES = 15
_PIECE, _PIECES = 256, 32
_SMALLEST = 32
_GROUPS = 32
# Bits that a class costs and each token in it, estimates; how much smaller words by themselves
# must be with classes to make them need a base.
_LIMITS = np.array([20.0, 4.5, 0.999])
_WRONG = {
    1: "its tables end elsewhere than its bytes, or have a length out of range",
    2: "a token does not fit its words",
    3: "a table has no room for its tokens, or has none",
    4: "its words do not end where its bits do",
    5: "a number in the head of its tokens is out of range",
    6: "its parts are longer than its bytes",
}


class Spec(NamedTuple):
    """How words become tokens.

    Attributes:
      form: ``DIFF``, ``XOR`` or ``ALONE``.
      sparse: whether a stream says which words have tokens.
      signed: of ``ALONE``, whether any word is negative.
      strip: lowest bits, 0 in all words, that are left out.
      depth: bits of a token below the leading one.
      first: of ``ALONE``, the leading bits that are token 2.
      edges: keys of the base at which the second, third, ... class begins, ascending.
    """

    form: int
    sparse: bool = False
    signed: bool = False
    strip: int = 0
    depth: int = 0
    first: int = 0
    edges: tuple[int, ...] = ()

    @property
    def needs_base(self) -> bool:
        """Whether a reader needs the base."""
        return self.form != ALONE or bool(self.edges)


class Plan(NamedTuple):
    """What a look at words led to.

    Attributes:
      spec: the form to take.
      size: about how many bytes it will have.
      repeats: whether lowest bytes are so often alike that byte planes may be smaller.
    """

    spec: Spec
    size: float
    repeats: bool


def plan(bits: np.ndarray, base: np.ndarray | None, mantissa: int) -> Plan | None:
    """Chooses the form for words, on a sample.

    Args:
      bits: uint16 or uint32, flat, read-only.
      base: the same, or None.
      mantissa: bits of the floats' mantissa.

    Returns:
      The choice; None for few words.
    """
    if bits.size < _SMALLEST:
        return None
    from lcjax.codecs import _token_kernels as kernels

    starts, piece = _sample(bits.size)
    chosen, edges = np.zeros(8, np.int64), np.zeros(_GROUPS - 1, np.int64)
    against = bits if base is None else base
    each = kernels.choose(
        bits, against, base is not None, mantissa, starts, piece, _LIMITS, chosen, edges
    )
    form, sparse, signed, strip, depth, first, count, repeats = (int(n) for n in chosen)
    found = tuple(int(n) for n in edges[:count])
    spec = Spec(form, bool(sparse), bool(signed), strip, depth, first, found)
    return Plan(spec, float(each) * bits.size / 8, bool(repeats))


def pack(bits: np.ndarray, base: np.ndarray | None, mantissa: int, spec: Spec) -> bytes:
    """Encodes words.

    Args:
      bits: uint16 or uint32, flat, read-only.
      base: the same; None where ``spec`` needs none.
      mantissa: bits of the floats' mantissa.
      spec: from ``plan``.
    """
    from lcjax.codecs import _ans_kernels as ans
    from lcjax.codecs import _token_kernels as kernels

    against = bits if base is None else base
    payload: list[bytes | memoryview] = [_head(spec)]
    if spec.sparse:
        changed = np.empty(bits.size, np.uint8)
        count = int(kernels.mark_changed(bits, against, changed))
        payload.append(_with_length(entropy.encode(changed, threads=1)))
        bits, against = (_compact(words, changed, count) for words in (bits, against))
    if not bits.size:
        return b"".join(payload)
    # No word has more raw bits than itself, nor a token more than a state has.
    raw = np.empty(bits.nbytes + 16, np.uint8)
    room = -(-bits.size // ans.LANES) * ans.MOST_LOG // 8 + 24
    lanes = np.empty(ans.LANES * room, np.uint8)
    tables = np.zeros((len(spec.edges) + 1) * 513, np.uint8)
    sizes = np.zeros(16, np.int64)
    ans.pack(*(bits, against), *_arrays(spec), mantissa - spec.strip, raw, lanes, tables, sizes)
    used, size, log, fraction, *lane = (int(n) for n in sizes)
    parts = [lane[k : k + 3] for k in range(0, 3 * ans.LANES, 3)]
    payload.append(bytes([fraction << 4 | log]) + varint(used))
    payload += [varint(state) + varint(end - begin) for begin, end, state in parts]
    payload.append(raw[:used].data)
    payload += [lanes[begin:end].data for begin, end, _ in parts]
    # Last, because a decoder reads past the end of what is before.
    payload.append(tables[:size].data)
    return b"".join(payload)


def unpack(
    payload: memoryview,
    word: np.dtype,
    count: int,
    base: np.ndarray | None,
    mantissa: int,
    form: int,
) -> np.ndarray:
    """Inverse of ``pack``.

    Args:
      payload: not trusted.
      word: uint16 or uint32.
      count: words.
      base: ``(count,)`` words, read-only, or None.
      mantissa: bits of the floats' mantissa.
      form: ``DIFF``, ``XOR`` or ``ALONE``.

    Raises:
      CorruptDataError: the payload is not what ``pack`` writes.
    """
    from lcjax.codecs import _ans_kernels as ans
    from lcjax.codecs import _token_kernels as kernels

    data = np.frombuffer(payload, np.uint8)
    numbers, edges = np.zeros(7, np.int64), np.zeros(_MAX_EDGES, np.int64)
    at = int(ans.read_spec(data, word.itemsize * 8, mantissa, form, numbers, edges))
    if at < 0:
        raise CorruptDataError("tokens of a form that is out of range")
    _, sparse, _, strip, _, _, count_edges = (int(n) for n in numbers)
    edges = edges[:count_edges]
    if form == ALONE and not count_edges:
        base = np.zeros(0, word)
    elif base is None:
        raise CorruptDataError("tokens in classes need a base, and this chunk has none")
    spec = numbers, edges, mantissa - strip
    if not sparse:
        return _unpack_dense(data, at, count, read_only(base), spec)
    size, at = read_varint(payload, at)
    if size > len(payload) - at:
        raise CorruptDataError(f"marks of {size} bytes where {len(payload) - at} are left")
    changed = entropy.decode(payload[at : at + size], count=count, threads=1)
    if count and int(changed.max()) > 1:
        raise CorruptDataError("a mark of what changed is neither 0 nor 1")
    dense = int(np.count_nonzero(changed))
    part = _compact(base, changed, dense)
    words = _unpack_dense(data, at + size, dense, part, spec)
    out = np.empty(count, word)
    kernels.scatter(words, base, changed, out)
    return out


def _unpack_dense(
    data: np.ndarray,
    at: int,
    count: int,
    base: np.ndarray,
    spec: tuple[np.ndarray, np.ndarray, int],
) -> np.ndarray:
    """Words of which each has a token; see ``unpack``."""
    from lcjax.codecs import _ans_kernels as ans

    out = np.empty(count, base.dtype)
    if not count:
        if at != len(data):
            raise CorruptDataError(f"{len(data) - at} bytes where no word has a token")
        return out
    head = np.zeros(17, np.int64)
    wrong = ans.read_head(data, at, head)
    if not wrong:
        if len(data) - head[2] < 8:  # the kernel reads eight bytes at a time
            data = read_only(np.concatenate([data, np.zeros(8, np.uint8)]))
        wrong = ans.unpack(base, *spec, data, head, out)
    if wrong:
        raise CorruptDataError(_WRONG[wrong])
    return out


def _compact(words: np.ndarray, changed: np.ndarray, count: int) -> np.ndarray:
    from lcjax.codecs import _token_kernels as kernels

    out = np.empty(count, words.dtype)
    kernels.compact(words, read_only(changed), out)
    return read_only(out)


@functools.lru_cache(64)
def _sample(count: int) -> tuple[np.ndarray, int]:
    """Where pieces of a sample begin, and how long they are."""
    size = _PIECE * _PIECES
    if count <= size * 5 // 4:
        return np.zeros(1, np.int64), count
    stretch = count // _PIECES
    # One piece somewhere in each of equal stretches (a multiplicative hash of its number): at
    # equal distances pieces could fall on the same columns of every row.
    number = np.arange(_PIECES, dtype=np.int64)
    inside = (number * 0x9E3779B1 & 0xFFFFFFFF) * (stretch - _PIECE + 1) >> 32
    return number * stretch + inside, _PIECE


def _arrays(spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    """All but the edges, and the edges, for a kernel."""
    return np.array(spec[:6], np.int64), np.array(spec.edges, np.int64)


def _with_length(stream: bytes) -> bytes:
    return varint(len(stream)) + stream


def _head(spec: Spec) -> bytes:
    head = bytes([spec.depth | spec.sparse << 3 | spec.signed << 4, spec.strip, len(spec.edges)])
    return head + b"".join(varint(n) for n in (spec.first, *spec.edges))

"""Bit-exact coding of any fixed-size dtype, by itself or against a base.

The elements are taken as unsigned integers of their width. Floats of 2 and 4 bytes are coded as
tokens and raw bits (``_tokens``), all else, and what repeats, as byte planes, of which each is
entropy-coded by itself. Modes:

* ``plain``: planes of the bits as they are (integers, booleans).
* ``float``: planes of the bits rotated left by one, which puts the exponent into whole bytes
  and the sign into the lowest bit.
* ``diff``: planes of the zigzag of the difference to the base, modulo 2^width. Floats are first
  mapped to integers that are ordered like the floats (two's complement for negative ones), so a
  small change is a small integer at any magnitude; NaN payloads, -0.0 and subnormals are
  integers like all others.
* ``tokens``: tokens of values by themselves; ``tokens-by-base``: the same, in classes by base.
* ``tokens-diff``, ``tokens-xor``: tokens of that difference, and of the bits that are not the
  base's.

Payload of planes: for each, lowest byte first, the length of its stream as a little-endian
base-128 integer, then the stream of ``lcjax.entropy``. Complex numbers count as pairs.
"""

from __future__ import annotations

import numpy as np

from lcjax import entropy
from lcjax.codecs import _planes, _tokens
from lcjax.errors import CorruptDataError
from lcjax.hashing import read_only

_FORMS = {
    "tokens": _tokens.ALONE,
    "tokens-by-base": _tokens.ALONE,
    "tokens-diff": _tokens.DIFF,
    "tokens-xor": _tokens.XOR,
}
MODES = ("plain", "float", "diff", *_FORMS)
NEEDS_BASE = ("diff", "tokens-by-base", "tokens-diff", "tokens-xor")
# Runs of 256 elements looked at to choose between planes.
_RUNS = 64


def encode(values: np.ndarray, base: np.ndarray | None = None) -> tuple[str, bytes]:
    """Encodes a flat array, against ``base`` where that is smaller.

    Args:
      values: contiguous ``(elements,)``, native byte order.
      base: the same shape and dtype, or None.

    Returns:
      The mode, and the payload.
    """
    word, _ = _word(values.dtype)
    bits = read_only(values.reshape(-1).view(word))
    against = None if base is None else read_only(base.reshape(-1).view(word))
    floats = _is_float(values.dtype)
    mantissa = _tokens.MANTISSA.get(values.dtype.name)
    found = None if mantissa is None else _tokens.plan(bits, against, mantissa)
    if found is None or found.repeats:
        alone = "float" if floats else "plain"
        mode, size = alone, np.inf
        if bits.size and (against is not None or found is not None):
            size = _sampled_size(bits, None, alone, floats)
        if against is not None and bits.size:
            planes = _sampled_size(bits, against, "diff", floats)
            mode, size = ("diff", planes) if planes <= size else (mode, size)
        # Tokens are the faster of the two.
        if found is None or size < 0.97 * found.size:
            return mode, _planes.pack(_split(bits, against, mode, floats))
    assert mantissa is not None
    spec = found.spec
    modes = [m for m, form in _FORMS.items() if form == spec.form]
    mode = modes[-1] if spec.needs_base else modes[0]
    return mode, _tokens.pack(bits, against if spec.needs_base else None, mantissa, spec)


def decode(
    payload: memoryview, mode: str, dtype: np.dtype, count: int, base: np.ndarray | None = None
) -> np.ndarray:
    """Inverse of ``encode``.

    Args:
      payload: the stored bytes, not trusted.
      mode: as returned by ``encode``.
      dtype: the elements' dtype, native byte order.
      count: number of elements; bounds every allocation.
      base: ``(elements,)`` of ``dtype``; needed by the modes in ``NEEDS_BASE``.

    Returns:
      ``(count,)`` of ``dtype``.

    Raises:
      CorruptDataError: the payload is not what ``encode`` writes.
    """
    if mode not in MODES:
        raise CorruptDataError(f"unknown mode {mode!r}, expected one of {', '.join(MODES)}")
    if mode in NEEDS_BASE and base is None:
        raise CorruptDataError(f"mode {mode!r} needs a base, and this chunk has none")
    if base is not None and (base.dtype, base.size) != (dtype, count):
        raise CorruptDataError(
            f"a base of {base.size} {base.dtype.name} for {count} elements of {dtype.name}"
        )
    word, per_element = _word(dtype)
    words = count * per_element
    against = None
    if mode in NEEDS_BASE:
        assert base is not None
        against = read_only(base.reshape(-1).view(word))
    if mode in _FORMS:
        if dtype.name not in _tokens.MANTISSA:
            raise CorruptDataError(f"mode {mode!r} is not for {dtype.name}")
        mantissa = _tokens.MANTISSA[dtype.name]
        return _tokens.unpack(payload, word, words, against, mantissa, _FORMS[mode]).view(dtype)
    planes = _planes.unpack(payload, word.itemsize, words)
    from lcjax.codecs import _exact_kernels as kernels

    out = np.empty(words, word)
    kernels.join_planes(read_only(planes), out)
    if mode == "float":
        kernels.unrotate(out)
    elif mode == "diff":
        kernels.undo_difference(out, against, _is_float(dtype))
    if dtype == np.bool_ and out.size and int(out.max()) > 1:
        raise CorruptDataError(f"{int(out.max())} stands where a bool, 0 or 1, is expected")
    return out.view(dtype)


def _is_float(dtype: np.dtype) -> bool:
    return dtype.name.startswith(("float", "bfloat", "complex"))


def _word(dtype: np.dtype) -> tuple[np.dtype, int]:
    """The unsigned word that carries a dtype, and how many of them make an element."""
    parts = 2 if dtype.kind == "c" else 1
    return np.dtype(f"u{dtype.itemsize // parts}"), parts


def _split(bits: np.ndarray, base: np.ndarray | None, mode: str, is_float: bool) -> np.ndarray:
    """Byte planes ``(width, words)`` of the mapped words."""
    from lcjax.codecs import _exact_kernels as kernels

    mapped = bits
    if mode != "plain":
        mapped = np.empty_like(bits)
    if mode == "diff":
        kernels.difference(bits, base, mapped, is_float)
    elif mode == "float":
        kernels.rotate(bits, mapped)
    planes = np.empty((bits.dtype.itemsize, bits.size), np.uint8)
    kernels.split_planes(read_only(mapped), planes)
    return planes


def _sampled_size(bits: np.ndarray, base: np.ndarray | None, mode: str, is_float: bool) -> float:
    """About the bytes of the planes, by their order-0 entropy in a sample."""
    count = bits.size
    if count > 256 * _RUNS:
        # Runs of 256 elements spread over the array: cheap to gather, yet everywhere.
        starts = np.linspace(0, count - 256, _RUNS).astype(np.int64)
        where = (starts[:, None] + np.arange(256)).reshape(-1)
        bits = bits[where]
        base = None if base is None else base[where]
    planes = _split(bits, base, mode, is_float)
    # A stream and its table take some 12 bytes where its symbols are not all the same.
    bits_each = [entropy.entropy_bits(plane) for plane in planes]
    return sum(n * count / 8 + (12 if n else 3) for n in bits_each)

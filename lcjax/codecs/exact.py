"""Bit-exact coding of any fixed-size dtype, by itself or against a base.

The elements are taken as unsigned integers of their width, mapped so that values close to
each other differ in low bits only, and cut into byte planes; each plane is entropy-coded
by itself. Modes:

* ``plain``: the bits as they are (integers, booleans).
* ``float``: bits rotated left by one, which puts the exponent into whole bytes and the
  sign into the lowest bit.
* ``diff``: zigzag of the difference to the base, modulo 2^width. Floats are first mapped
  to integers that are ordered like the floats (two's complement for negative ones), so a
  small change is a small integer at any magnitude; NaN payloads, -0.0 and subnormals are
  integers like all others.

Payload: for each plane, lowest byte first, the length of its stream as a little-endian
base-128 integer, then the stream of ``lcjax.entropy``. Complex numbers count as pairs.
"""

from __future__ import annotations

import numpy as np

from lcjax import entropy
from lcjax.codecs import _planes
from lcjax.errors import CorruptDataError
from lcjax.hashing import read_only

MODES = ("plain", "float", "diff")
NEEDS_BASE = ("diff",)
_SAMPLE = 1 << 16  # elements looked at to choose between a delta and the values alone


def encode(values: np.ndarray, base: np.ndarray | None = None) -> tuple[str, bytes]:
    """Encodes a flat array, against ``base`` where that is smaller.

    Args:
      values: contiguous ``(elements,)``, native byte order.
      base: the same shape and dtype, or None.

    Returns:
      The mode, and the payload.
    """
    alone = "float" if _is_float(values.dtype) else "plain"
    mode = alone
    if (
        base is not None
        and values.size
        and (_sampled_size(values, base, "diff") <= _sampled_size(values, None, alone))
    ):
        mode = "diff"
    return mode, _planes.pack(_split(values, base if mode == "diff" else None, mode))


def decode(
    payload: memoryview, mode: str, dtype: np.dtype, count: int, base: np.ndarray | None = None
) -> np.ndarray:
    """Inverse of ``encode``.

    Args:
      payload: the stored bytes, not trusted.
      mode: as returned by ``encode``.
      dtype: the elements' dtype, native byte order.
      count: number of elements; bounds every allocation.
      base: ``(elements,)`` of ``dtype``; needed by mode ``diff``.

    Returns:
      ``(count,)`` of ``dtype``.

    Raises:
      CorruptDataError: the payload is not what ``encode`` writes.
    """
    if mode not in MODES:
        raise CorruptDataError(f"unknown mode {mode!r}, expected one of {', '.join(MODES)}")
    if mode == "diff" and base is None:
        raise CorruptDataError("mode 'diff' needs a base, and this chunk has none")
    if base is not None and (base.dtype, base.size) != (dtype, count):
        raise CorruptDataError(
            f"a base of {base.size} {base.dtype.name} for {count} elements of {dtype.name}"
        )
    word, per_element = _word(dtype)
    planes = _planes.unpack(payload, word.itemsize, count * per_element)
    from lcjax.codecs import _exact_kernels as kernels

    out = np.empty(count * per_element, word)
    kernels.join_planes(read_only(planes), out)
    if mode == "float":
        kernels.unrotate(out)
    elif mode == "diff":
        assert base is not None
        kernels.undo_difference(out, read_only(base.reshape(-1).view(word)), _is_float(dtype))
    if dtype == np.bool_ and out.size and int(out.max()) > 1:
        raise CorruptDataError(f"{int(out.max())} stands where a bool, 0 or 1, is expected")
    return out.view(dtype)


def _is_float(dtype: np.dtype) -> bool:
    return dtype.name.startswith(("float", "bfloat", "complex"))


def _word(dtype: np.dtype) -> tuple[np.dtype, int]:
    """The unsigned word that carries a dtype, and how many of them make an element."""
    parts = 2 if dtype.kind == "c" else 1
    return np.dtype(f"u{dtype.itemsize // parts}"), parts


def _split(values: np.ndarray, base: np.ndarray | None, mode: str) -> np.ndarray:
    """Byte planes ``(width, words)`` of the mapped values."""
    from lcjax.codecs import _exact_kernels as kernels

    word, _ = _word(values.dtype)
    bits = read_only(values.reshape(-1).view(word))
    if mode == "diff":
        assert base is not None
        mapped = np.empty_like(bits)
        kernels.difference(
            bits, read_only(base.reshape(-1).view(word)), mapped, _is_float(values.dtype)
        )
    elif mode == "float":
        mapped = np.empty_like(bits)
        kernels.rotate(bits, mapped)
    else:
        mapped = bits
    mapped = read_only(mapped)
    planes = np.empty((word.itemsize, bits.size), np.uint8)
    kernels.split_planes(mapped, planes)
    return planes


def _sampled_size(values: np.ndarray, base: np.ndarray | None, mode: str) -> float:
    """Order-0 entropy of the planes of a sample; only the encoder's choice hangs on it."""
    if values.size > _SAMPLE:
        # Runs of 256 elements spread over the array: cheap to gather, yet everywhere.
        starts = np.linspace(0, values.size - 256, _SAMPLE // 256).astype(np.int64)
        where = (starts[:, None] + np.arange(256)).reshape(-1)
        values = values[where]
        base = None if base is None else base[where]
    return sum(entropy.entropy_bits(plane) for plane in _split(values, base, mode))

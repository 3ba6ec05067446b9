"""Elements that a lossy codec stores exactly: values that are not finite, or out of its range."""

from __future__ import annotations

import numpy as np

from lcjax import hashing
from lcjax.errors import CorruptDataError


def pack(where: np.ndarray, values: np.ndarray) -> bytes:
    """The head of a lossy chunk's payload.

    Args:
      where: indices within the chunk, ascending, int64 ``(exceptions,)``.
      values: their elements, contiguous, in the leaf's dtype.

    Returns:
      The indices as uint64, then the elements; empty for no exceptions.
    """
    if not where.size:
        return b""
    return where.astype("<u8").tobytes() + hashing.words(values).tobytes()


def unpack(
    payload: memoryview, count: int, size: int, itemsize: int
) -> tuple[np.ndarray, np.ndarray, memoryview]:
    """Takes the head off a payload.

    Args:
      payload: not trusted.
      count: how many exceptions the chunk announces.
      size: elements of the chunk.
      itemsize: bytes of an element, 1, 2, 4 or 8.

    Returns:
      The indices (int64), the elements' bits, and the rest of the payload.

    Raises:
      CorruptDataError: cut short, or indices out of order or range.
    """
    head = count * (8 + itemsize)
    if head > len(payload):
        raise CorruptDataError(
            f"{count} exceptions take {head} bytes, the chunk has {len(payload)}"
        )
    where = np.frombuffer(payload[: count * 8], "<u8")
    if count and (int(where.max()) >= size or np.any(where[1:] <= where[:-1])):
        raise CorruptDataError("the indices of its exceptions are out of order or range")
    bits = np.frombuffer(payload[count * 8 : head], np.dtype(f"u{itemsize}"))
    return where.astype(np.int64), bits, payload[head:]


def put(values: np.ndarray, where: np.ndarray, bits: np.ndarray) -> None:
    """Writes exceptions into contiguous values, in place."""
    if where.size:
        values.reshape(-1).view(bits.dtype)[where] = bits

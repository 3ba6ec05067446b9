"""Planes of bytes as payloads: each one's length, then its stream."""

from __future__ import annotations

import numpy as np

from lcjax import entropy
from lcjax._varint import read_varint, varint
from lcjax.errors import CorruptDataError


def pack(planes: np.ndarray) -> bytes:
    """Entropy-codes planes, uint8 ``(planes, count)``, one after the other."""
    out = bytearray()
    for plane in planes:
        stream = entropy.encode(plane, threads=1)
        out += varint(len(stream)) + stream
    return bytes(out)


def unpack(data: memoryview, width: int, count: int) -> np.ndarray:
    """Inverse of ``pack``, where nothing may follow the last plane.

    Args:
      data: not trusted.
      width: number of planes; with ``count`` it bounds the allocation.
      count: bytes of each.

    Returns:
      uint8 ``(width, count)``.

    Raises:
      CorruptDataError: the data are not what ``pack`` writes.
    """
    planes = np.empty((width, count), np.uint8)
    at = 0
    for plane in planes:
        size, at = read_varint(data, at)
        if size > len(data) - at:
            raise CorruptDataError(
                f"plane of {size} bytes in a payload that has {len(data) - at} left"
            )
        entropy.decode(data[at : at + size], count=count, out=plane, threads=1)
        at += size
    if at != len(data):
        raise CorruptDataError(f"{len(data) - at} bytes after the last plane")
    return planes

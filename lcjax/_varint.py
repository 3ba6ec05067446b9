"""Lengths in payloads: little-endian base-128 integers."""

from __future__ import annotations

from lcjax.errors import CorruptDataError


def varint(value: int) -> bytes:
    """A non-negative integer in as few bytes as it needs, seven bits each."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Reads one at ``at``; returns it and the place after it.

    Raises:
      CorruptDataError: cut short, or over 63 bits.
    """
    value = 0
    for shift in range(0, 63, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise CorruptDataError("a stream's length is cut short or over 63 bits")

"""The container: every file lcjax writes, and every message of the pure functions.

A container is a header, chunks one after the other, an index and a trailer; see
``FORMAT.md`` beside this file for the bytes. The index is JSON and says what each chunk
is; this module checks lengths and hashes and knows nothing of what chunks mean.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lcjax import hashing
from lcjax.errors import CorruptDataError, UnsupportedFormatError

VERSION = 4
HEADER_MAGIC = b"\x89LCJX\r\n\x1a"
TRAILER_MAGIC = b"LCJXEND\n"
_HEADER = struct.Struct("<8sHHI")
_TRAILER = struct.Struct("<QQQ16s8s")
HEADER_SIZE = _HEADER.size
TRAILER_SIZE = _TRAILER.size
MAX_INDEX_BYTES = 1 << 28  # limits on the uncompressed index, whatever a file claims:
FREE_INDEX_BYTES = 1 << 22  # beyond this, at most MAX_INDEX_RATIO times its compressed size
MAX_INDEX_RATIO = 100


class Writer:
    """Collects chunks and yields the bytes of a container.

    The parts are kept as a list, so a file can be written without joining them.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._table: list[list[Any]] = []

    def add(self, payload: bytes) -> int:
        """Appends a chunk and returns its number."""
        self._parts.append(payload)
        self._table.append([len(payload), hashing.bytes_hash(payload)])
        return len(self._table) - 1

    def finish(self, meta: dict[str, Any]) -> Container:
        """Closes the container with ``meta``, a JSON-able description of the chunks."""
        index = json.dumps(
            {"chunks": self._table, "meta": meta},
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        ).encode("utf-8", "surrogatepass")
        packed = zlib.compress(index, 9)
        header = _HEADER.pack(HEADER_MAGIC, VERSION, 0, 0)
        offset = len(header) + sum(map(len, self._parts))
        sizes = struct.pack("<QQQ", offset, len(packed), len(index))
        name = hashing.content_name(header + packed + sizes)
        trailer = _TRAILER.pack(offset, len(packed), len(index), bytes.fromhex(name), TRAILER_MAGIC)
        return Container([header, *self._parts, packed, trailer], name)


@dataclass(frozen=True)
class Container:
    """A finished container.

    Attributes:
      parts: the file's bytes, in order.
      name: content hash, 32 hexadecimal digits: XXH3-128 over header, index and sizes; the
        index holds a hash of every chunk, so the name covers all bytes.
    """

    parts: list[bytes]
    name: str

    @property
    def size(self) -> int:
        """Bytes of the whole container."""
        return sum(map(len, self.parts))

    def to_bytes(self) -> bytes:
        """The whole container as one bytes object."""
        return b"".join(self.parts)


class Reader:
    """Reads an index at once and chunks on demand; every byte is checked before use.

    Args:
      read: ``read(offset, size) -> bytes`` of exactly that size.
      size: bytes of the whole container.
      where: how errors call it, normally the file's path.

    Attributes:
      meta: the description given to ``Writer.finish``.
      name: content hash, as in ``Container``.

    Raises:
      CorruptDataError: not a container, truncated, or its index fails the hash.
      UnsupportedFormatError: written by a later version of the format.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, where: str) -> None:
        self.where = where
        self._read = read
        if size < HEADER_SIZE + TRAILER_SIZE:
            raise CorruptDataError(
                f"{where}: {size} bytes are too few for an lcjax file "
                f"({HEADER_SIZE + TRAILER_SIZE} at least); it is truncated or not one"
            )
        header = read(0, HEADER_SIZE)
        magic, version, flags, reserved = _HEADER.unpack(header)
        if magic != HEADER_MAGIC:
            raise CorruptDataError(
                f"{where}: does not begin with the lcjax magic; it is damaged or not an lcjax file"
            )
        if version > VERSION:
            raise UnsupportedFormatError(
                f"{where}: format version {version}; this release reads up to {VERSION}. "
                "Upgrade lcjax: pip install -U lcjax"
            )
        if version < 1 or flags or reserved:
            raise CorruptDataError(f"{where}: the header's version or reserved fields are damaged")
        offset, packed_size, index_size, digest, end = _TRAILER.unpack(
            read(size - TRAILER_SIZE, TRAILER_SIZE)
        )
        if end != TRAILER_MAGIC:
            raise CorruptDataError(
                f"{where}: does not end with the lcjax trailer; the file of {size} bytes is "
                "truncated or damaged"
            )
        if offset < HEADER_SIZE or offset + packed_size + TRAILER_SIZE != size:
            raise CorruptDataError(
                f"{where}: the trailer puts the index at {offset}+{packed_size} bytes, which does "
                f"not fit a file of {size} bytes"
            )
        limit = min(MAX_INDEX_BYTES, max(FREE_INDEX_BYTES, MAX_INDEX_RATIO * packed_size))
        if index_size > limit:
            raise CorruptDataError(
                f"{where}: an index of {index_size} bytes is over the limit of {limit}"
            )
        packed = read(offset, packed_size)
        sizes = struct.pack("<QQQ", offset, packed_size, index_size)
        self.name = hashing.content_name(header + packed + sizes)
        if self.name != digest.hex():
            raise CorruptDataError(
                f"{where}: the index's hash is {self.name}, expected {digest.hex()}; the file is "
                "damaged"
            )
        self._load_index(packed, index_size, offset)

    def _load_index(self, packed: bytes, index_size: int, end: int) -> None:
        where = self.where
        try:
            unpacker = zlib.decompressobj()
            raw = unpacker.decompress(packed, index_size + 1)
            if len(raw) != index_size or not unpacker.eof or unpacker.unused_data:
                raise CorruptDataError(
                    f"{where}: the index does not unpack to the {index_size} bytes it declares"
                )
            index = json.loads(raw.decode("utf-8", "surrogatepass"), parse_constant=_no_constant)
        except (zlib.error, ValueError, RecursionError) as e:
            if isinstance(e, CorruptDataError):
                raise
            raise CorruptDataError(f"{where}: the index cannot be read: {e}") from e
        if not (
            isinstance(index, dict)
            and isinstance(index.get("meta"), dict)
            and isinstance(index.get("chunks"), list)
        ):
            raise CorruptDataError(f"{where}: the index lacks its fields 'meta' and 'chunks'")
        self.meta: dict[str, Any] = index["meta"]
        self._chunks: list[tuple[int, int, str]] = []
        at = HEADER_SIZE
        for number, entry in enumerate(index["chunks"]):
            if not (
                isinstance(entry, list)
                and len(entry) == 2
                and type(entry[0]) is int
                and 0 <= entry[0] <= end - at
                and isinstance(entry[1], str)
            ):
                raise CorruptDataError(f"{where}: chunk {number} lies outside the file")
            self._chunks.append((at, entry[0], entry[1]))
            at += entry[0]
        if at != end:
            raise CorruptDataError(
                f"{where}: the chunks end at byte {at}, expected {end}, where the index begins"
            )

    def __len__(self) -> int:
        return len(self._chunks)

    def chunk_size(self, number: int) -> int:
        """Bytes of a chunk, without reading it."""
        return self._chunks[number][1]

    def chunk(self, number: int) -> memoryview:
        """The bytes of a chunk, checked against their hash.

        Raises:
          CorruptDataError: no such chunk, or its bytes are damaged.
        """
        if not 0 <= number < len(self._chunks):
            raise CorruptDataError(
                f"{self.where}: chunk {number} is not one of its {len(self._chunks)} chunks"
            )
        offset, size, digest = self._chunks[number]
        data = self._read(offset, size)
        found = hashing.bytes_hash(data)
        if found != digest:
            raise CorruptDataError(
                f"{self.where}: chunk {number} ({size} bytes at {offset}) has hash {found}, "
                f"expected {digest}; the file is damaged"
            )
        return memoryview(data)


def from_bytes(data: Any, where: str = "message") -> Reader:
    """A reader over a bytes-like object."""
    view = memoryview(data).cast("B")

    def read(offset: int, size: int) -> bytes:
        return bytes(view[offset : offset + size])

    return Reader(read, len(view), where)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not allowed")

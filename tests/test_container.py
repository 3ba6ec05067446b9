"""The container: layout by hand, damage anywhere is found, hostile numbers are refused."""

import json
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax import container, hashing
from lcjax.errors import CorruptDataError, LcjaxError, UnsupportedFormatError

CHUNKS = [b"first", b"", bytes(range(256)) * 4]
META = {"kind": "own", "note": "h\u00e9llo", "deep": [1, {"a": None}]}


def build(chunks=CHUNKS, meta=META) -> bytes:
    writer = container.Writer()
    for chunk in chunks:
        writer.add(chunk)
    return writer.finish(meta).to_bytes()


def forge(
    index: bytes, body: bytes = b"", packed: bytes | None = None, version: int = container.VERSION
) -> bytes:
    """A container with right hashes around any index."""
    header = struct.pack("<8sHHI", container.HEADER_MAGIC, version, 0, 0)
    packed = zlib.compress(index) if packed is None else packed
    sizes = struct.pack("<QQQ", len(header) + len(body), len(packed), len(index))
    digest = bytes.fromhex(hashing.content_name(header + packed + sizes))
    return header + body + packed + sizes + digest + container.TRAILER_MAGIC


def test_round_trip():
    writer = container.Writer()
    assert [writer.add(c) for c in CHUNKS] == [0, 1, 2]
    finished = writer.finish(META)
    data = finished.to_bytes()
    assert len(data) == finished.size
    reader = container.from_bytes(data)
    assert reader.meta == META
    assert reader.name == finished.name
    assert [bytes(reader.chunk(k)) for k in range(len(reader))] == CHUNKS
    assert build() == data


def test_the_bytes_are_those_of_the_format_page():
    data = build([b"abc"], {})
    assert data[:16] == bytes.fromhex("894c434a580d0a1a 0400 0000 00000000")
    assert data[16:19] == b"abc"
    offset, packed, size, digest, magic = struct.unpack("<QQQ16s8s", data[-48:])
    assert (offset, magic) == (19, b"LCJXEND\n")
    index = zlib.decompress(data[19 : 19 + packed])
    assert len(index) == size
    assert json.loads(index) == {"chunks": [[3, hashing.bytes_hash(b"abc")]], "meta": {}}
    hashed = data[:16] + data[19:-48] + data[-48:-24]
    assert digest.hex() == hashing.content_name(hashed)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_found(data):
    raw = bytearray(build())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(LcjaxError, match="message: "):
        reader = container.from_bytes(raw)
        for k in range(len(reader)):
            reader.chunk(k)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1500))
def test_a_truncated_file_is_found(size):
    raw = build()
    with pytest.raises(CorruptDataError, match=r"truncated|too few|damaged"):
        container.from_bytes(raw[: min(size, len(raw) - 1)])


def test_trailing_bytes_are_found():
    with pytest.raises(CorruptDataError):
        container.from_bytes(build() + b"\0")


def test_a_later_version_says_what_to_do():
    with pytest.raises(
        UnsupportedFormatError, match=r"format version 5.*reads up to 4.*pip install"
    ):
        container.from_bytes(forge(b'{"chunks":[],"meta":{}}', version=5))


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"{",
        b'{"chunks":[]}',
        b'{"chunks":{},"meta":{}}',
        b'{"chunks":[],"meta":[]}',
        b'{"chunks":[[5,"00"]],"meta":{}}',
        b'{"chunks":[[-1,"00"]],"meta":{}}',
        b'{"chunks":[[true,"00"]],"meta":{}}',
        b'{"chunks":[[1e3,"00"]],"meta":{}}',
        b'{"chunks":[[3]],"meta":{}}',
        b'{"chunks":[[3,7]],"meta":{}}',
        b'{"chunks":[[99999999999999999999999,"00"]],"meta":{}}',
        b'{"chunks":[[2,"00"]],"meta":{}}',
        b'{"chunks":[],"meta":{"a":NaN}}',
        b'{"chunks":[],"meta":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"chunks":[[3,"00"]],"meta":{"n":' + b"1" * 100_000 + b"}}",
        b'\xff\xfe{"chunks":[],"meta":{}}',
    ],
)
def test_hostile_indices_are_refused(index):
    with pytest.raises(CorruptDataError, match="message: "):
        container.from_bytes(forge(index, b"abc"))


def test_an_index_that_unpacks_to_more_than_it_says_is_refused():
    bomb = zlib.compress(b" " * 50_000_000)
    with pytest.raises(CorruptDataError, match="does not unpack to the 10 bytes"):
        container.from_bytes(forge(b"x" * 10, packed=bomb))


def test_an_index_over_the_limit_is_refused_before_unpacking():
    header = struct.pack("<8sHHI", container.HEADER_MAGIC, container.VERSION, 0, 0)
    packed = zlib.compress(b"{}")
    sizes = struct.pack("<QQQ", len(header), len(packed), container.MAX_INDEX_BYTES + 1)
    digest = bytes.fromhex(hashing.content_name(header + packed + sizes))
    with pytest.raises(CorruptDataError, match="over the limit"):
        container.from_bytes(header + packed + sizes + digest + container.TRAILER_MAGIC)


def test_a_missing_chunk_is_named():
    with pytest.raises(CorruptDataError, match="chunk 3 is not one of its 3"):
        container.from_bytes(build()).chunk(3)


def test_a_small_file_cannot_claim_a_large_index():
    index = b'{"chunks":[],"meta":{"a":[' + b"[]," * 3_000_000 + b"[]]}}"
    data = forge(index)
    assert len(data) < len(index) / 500
    with pytest.raises(CorruptDataError, match="over the limit of 4194304"):
        container.from_bytes(data)

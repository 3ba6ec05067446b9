"""The codecs that ``lcjax bench lossless`` compares, behind one small interface."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lcjax import boxes
from lcjax.bench._lossless_pairs import Leaf
from lcjax.hashing import read_only

OURS = "lcjax"
FILE = "lcjax file"
LMZ_CHUNK = 8 << 20  # bytes, lmzip's own default


class Stored(NamedTuple):
    """What a method made of a state: the bytes to store, and all that decoding needs."""

    size: int
    data: Any


class Method(NamedTuple):
    """A way to store the new arrays for a reader who has the old ones.

    Attributes:
      name: with what is coded: nothing more for the values alone, ``xor`` or ``diff`` or
        ``delta`` for a change.
      encode: from leaves to what is stored.
      decode: back to the new arrays, as anything that has their bytes; of the leaves it
        looks at the old side, shapes and dtypes alone.
      joins: whether it may take all leaves as one array.
      prepare: from leaves to what ``encode`` and ``decode`` are given in their stead; here
        goes what a run does once and has at hand when it saves.
    """

    name: str
    encode: Callable[[Any], Stored]
    decode: Callable[[Stored, Any], list[Any]]
    joins: bool = True
    prepare: Callable[[Sequence[Leaf]], Any] = lambda leaves: leaves


def peers(module: str) -> list[Method]:
    """The methods of one package, or none if it is not installed."""
    if importlib.util.find_spec(module) is None:
        return []
    return PEERS[module][1]()


def own() -> list[Method]:
    """What the package itself stores: chunk payloads, and for context whole messages."""
    return [
        Method(OURS, _own_encode, _own_decode, joins=False),
        Method(FILE, _file_encode, _file_decode, joins=False, prepare=_file_prepare),
    ]


# --- lcjax ------------------------------------------------------------------------------


def _own_encode(leaves: Sequence[Leaf]) -> Stored:
    """Leaf by leaf in the package's chunks, on this thread."""
    from lcjax.codecs import exact

    coded = [
        exact.encode(leaf.new.reshape(-1)[part], leaf.old.reshape(-1)[part])
        for leaf in leaves
        for part in _parts(leaf)
    ]
    return Stored(sum(len(payload) for _, payload in coded), coded)


def _own_decode(stored: Stored, leaves: Sequence[Leaf]) -> list[Any]:
    from lcjax.codecs import exact

    coded = iter(stored.data)
    made = []
    for leaf in leaves:
        out = np.empty(leaf.old.size, leaf.old.dtype)
        for part in _parts(leaf):
            mode, payload = next(coded)
            base = leaf.old.reshape(-1)[part]
            out[part] = exact.decode(memoryview(payload), mode, out.dtype, base.size, base)
        made.append(out)
    return made


def _parts(leaf: Leaf) -> list[slice]:
    """Where a leaf's chunks lie in its flat values."""
    shape = leaf.old.shape
    found = []
    for box in boxes.split(shape):
        start = boxes.flat_start(box, shape)
        found.append(slice(start, start + math.prod(boxes.box_shape(box))))
    return found


def _file_prepare(leaves: Sequence[Leaf]) -> tuple[list[np.ndarray], Any]:
    """The new arrays, and the reference that a trainer and a reader have of the old ones."""
    import lcjax

    _, base = lcjax.encode([leaf.old for leaf in leaves], preset="lossless")
    return [leaf.new for leaf in leaves], base


def _file_encode(given: tuple[list[np.ndarray], Any]) -> Stored:
    """A whole message: with descriptions, and hashes of values and of bytes."""
    import lcjax

    message, _ = lcjax.encode(*given)
    return Stored(len(message), message)


def _file_decode(stored: Stored, given: tuple[list[np.ndarray], Any]) -> list[Any]:
    """Its values, with every hash checked."""
    import lcjax

    return lcjax.decode(stored.data, given[1]).tree


# --- peers ------------------------------------------------------------------------------


def _each(
    name: str,
    encode: Callable[[Leaf], bytes],
    decode: Callable[[bytes, Leaf], Any],
) -> Method:
    """A method that codes one array at a time to bytes that describe themselves."""

    def encode_all(leaves: Sequence[Leaf]) -> Stored:
        coded = [encode(leaf) for leaf in leaves]
        return Stored(sum(map(len, coded)), coded)

    def decode_all(stored: Stored, leaves: Sequence[Leaf]) -> list[Any]:
        return [decode(part, leaf) for part, leaf in zip(stored.data, leaves, strict=True)]

    return Method(name, encode_all, decode_all)


def _words(array: np.ndarray) -> np.ndarray:
    """The bits of an array, flat and read-only."""
    return read_only(array.reshape(-1).view(f"u{array.dtype.itemsize}"))


def _bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array, without copying."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _zstd() -> list[Method]:
    """At two levels, of the values and of their XOR, as they are and byte-shuffled."""
    import zstandard

    from lcjax.codecs import _exact_kernels as kernels

    def method(level: int, xor: bool, shuffled: bool) -> Method:
        compress = zstandard.ZstdCompressor(level=level).compress
        decompress = zstandard.ZstdDecompressor().decompress

        def encode(leaf: Leaf) -> bytes:
            words = _words(leaf.new)
            words = words ^ _words(leaf.old) if xor else words
            if shuffled:
                planes = np.empty((words.dtype.itemsize, words.size), np.uint8)
                kernels.split_planes(read_only(words), planes)
                words = planes
            return compress(memoryview(words))  # type: ignore[arg-type]

        def decode(part: bytes, leaf: Leaf) -> np.ndarray:
            old = _words(leaf.old)
            words = np.frombuffer(decompress(part), old.dtype)
            if shuffled:
                planes = words.view(np.uint8).reshape(old.dtype.itemsize, -1)
                words = np.empty_like(old)
                kernels.join_planes(read_only(planes), words)
            return words ^ old if xor else words

        name = f"zstd {level}" + " xor" * xor + " shuffled" * shuffled
        return _each(name, encode, decode)

    both = (False, True)
    return [method(level, xor, shuffled) for level in (1, 3) for xor in both for shuffled in both]


def _pcodec() -> list[Method]:
    """At its default level: of the values, and of the zigzag of ordered bits' change.

    Pcodec has no bfloat16, whose bits it gets as integers ordered like the values.
    """
    from pcodec import ChunkConfig, standalone

    from lcjax.codecs import _exact_kernels as kernels

    config = ChunkConfig()

    def encode(leaf: Leaf) -> bytes:
        flat = leaf.new.reshape(-1)
        return standalone.simple_compress(
            flat if flat.dtype == np.float32 else _order(flat), config
        )

    def decode(part: bytes, leaf: Leaf) -> np.ndarray:
        values = standalone.simple_decompress(part)
        return values if leaf.old.dtype == np.float32 else _unorder(values)

    def encode_change(leaf: Leaf) -> bytes:
        new = _words(leaf.new)
        change = np.empty_like(new)
        kernels.difference(new, _words(leaf.old), change, True)
        return standalone.simple_compress(change, config)

    def decode_change(part: bytes, leaf: Leaf) -> np.ndarray:
        words = standalone.simple_decompress(part)
        kernels.undo_difference(words, _words(leaf.old), True)
        return words

    return [_each("pcodec", encode, decode), _each("pcodec diff", encode_change, decode_change)]


def _order(values: np.ndarray) -> np.ndarray:
    """Bits of 16-bit floats as uint16 that are ordered like the values."""
    bits = _words(values)
    top = np.uint16(0x8000)
    return np.where(bits & top, ~bits, bits | top)


def _unorder(words: np.ndarray) -> np.ndarray:
    """Inverse of ``_order``."""
    top = np.uint16(0x8000)
    return np.where(words & top, words ^ top, ~words)


def _zipnn() -> list[Method]:
    """On one thread, by itself and with the older bytes as its second data."""
    import zipnn

    def method(name: str, delta: bool) -> Method:
        options = {"delta_compressed_type": "byte"} if delta else {}

        def second(leaf: Leaf) -> dict[str, Any]:
            return {"delta_second_data": _bytes(leaf.old)} if delta else {}

        def tool(leaf: Leaf) -> Any:
            return zipnn.ZipNN(bytearray_dtype=leaf.old.dtype.name, threads=1, **options)

        def encode(leaf: Leaf) -> bytes:
            # By itself it reorders bits within the bytes that it is given: a copy.
            return tool(leaf).compress(leaf.new.tobytes(), **second(leaf))

        def decode(part: bytes, leaf: Leaf) -> Any:
            return tool(leaf).decompress(part, **second(leaf))

        return _each(name, encode, decode)

    return [method("zipnn", False), method("zipnn delta", True)]


def _lmzip() -> list[Method]:
    """The codec at its default level and chunk size, without checksums, in memory."""
    from lmz import codec
    from lmz.planner import KIND_BF16, KIND_BYTES

    def options(leaf: Leaf) -> tuple[int, int]:
        width = leaf.old.dtype.itemsize
        return width, KIND_BF16 if leaf.old.dtype.name == "bfloat16" else KIND_BYTES

    def pieces(leaf: Leaf) -> list[tuple[memoryview, memoryview]]:
        new, old = _bytes(leaf.new), _bytes(leaf.old)
        cuts = range(0, len(old), LMZ_CHUNK)
        return [(new[at : at + LMZ_CHUNK], old[at : at + LMZ_CHUNK]) for at in cuts]

    def encode_all(leaves: Sequence[Leaf], delta: bool) -> Stored:
        coded = []
        for leaf in leaves:
            width, kind = options(leaf)
            for new, old in pieces(leaf):
                if delta:
                    parts, flags, _ = codec.encode_delta(new, old, width, checksum=False, kind=kind)
                    coded.append((b"".join(parts), None, flags))
                else:
                    parts, number, flags, _ = codec.encode_chunk(
                        new, width, checksum=False, kind=kind
                    )
                    coded.append((b"".join(parts), number, flags))
        return Stored(sum(len(part) for part, *_ in coded), coded)

    def decode_all(stored: Stored, leaves: Sequence[Leaf]) -> list[Any]:
        coded = iter(stored.data)
        made = []
        for leaf in leaves:
            out = bytearray()
            for _, old in pieces(leaf):
                part, number, flags = next(coded)
                width = leaf.old.dtype.itemsize
                if number is None:
                    out += codec.decode_delta(part, width, flags, len(old), old)
                else:
                    out += codec.decode_chunk(part, number, width, flags, len(old))
            made.append(out)
        return made

    return [
        Method("lmzip", lambda leaves: encode_all(leaves, False), decode_all),
        Method("lmzip delta", lambda leaves: encode_all(leaves, True), decode_all),
    ]


def _z4ai() -> list[Method]:
    """Default effort without plane workers, by itself and against a reference."""
    import z4ai

    codes = {"float32": "fp32", "bfloat16": "bf16"}

    def encode(leaf: Leaf) -> bytes:
        return z4ai.compress(_bytes(leaf.new), dtype=codes[leaf.old.dtype.name], threads=1)

    def decode(part: bytes, leaf: Leaf) -> Any:
        return z4ai.decompress(part)

    def encode_delta(leaf: Leaf) -> bytes:
        code = codes[leaf.old.dtype.name]
        return z4ai.compress_delta(_bytes(leaf.new), _bytes(leaf.old), dtype=code)

    def decode_delta(part: bytes, leaf: Leaf) -> Any:
        return z4ai.decompress_delta(part, _bytes(leaf.old))

    return [_each("z4ai", encode, decode), _each("z4ai delta", encode_delta, decode_delta)]


# Module to import: the package's name, and what makes its methods.
PEERS: dict[str, tuple[str, Callable[[], list[Method]]]] = {
    "zstandard": ("zstandard", _zstd),
    "pcodec": ("pcodec", _pcodec),
    "zipnn": ("zipnn", _zipnn),
    "lmz": ("lmzip", _lmzip),
    "z4ai": ("z4ai", _z4ai),
}

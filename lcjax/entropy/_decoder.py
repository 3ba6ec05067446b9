"""Decoding: check the header, build the tables, decode block by block."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptDataError
from . import _format as f

Bytes = bytes | bytearray | memoryview | NDArray[np.uint8]

STATUS = {
    -1: "it ends early",
    -2: "a code length is a reserved value (expected 0 to 12, or a mark)",
    -3: "a word is longer than 8 symbols",
    -4: "a word tree has more than 65536 nodes",
    -5: "the code lengths are not a complete code (expected a Kraft sum of exactly 1)",
    -6: "a bit stream does not end where its block says",
    -7: "a run goes past the end of its stream",
    -8: "a value lies outside the alphabet",
    -9: "padding bits are not zero",
    -10: "a number is not a varint in its shortest form, below 2**63",
}

# Symbols that `decode` is willing to allocate when the caller names no number: 4 GiB.
DEFAULT_LIMIT = 1 << 32


class _Header(NamedTuple):
    mode: int
    streams: int
    indexed: bool
    form: int
    symbols: int
    position: int  # of the first byte after mode and count


class _Blocks(NamedTuple):
    starts: NDArray[np.int64]  # (blocks, streams + 1), byte positions
    stops: NDArray[np.int64]  # (blocks, streams + 1), symbol positions
    streams: int


def _fail(what: str) -> CorruptDataError:
    return CorruptDataError(f"not a valid symbol stream: {what}")


def _checked(result: int) -> int:
    """Pass on a kernel's result unless it is a negative status."""
    if result < 0:
        raise _fail(STATUS[int(result)])
    return int(result)


def _as_bytes(data: Bytes) -> NDArray[np.uint8]:
    """View the input as a flat uint8 array, without a copy."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise TypeError(f"data must be contiguous bytes, got an array of {data.dtype}")
        return data.reshape(-1)
    view = memoryview(data)
    if not view.nbytes:
        return np.zeros(0, np.uint8)
    return np.frombuffer(view, np.uint8)


def _varint(data: NDArray[np.uint8], position: int) -> tuple[int, int]:
    value = 0
    for k in range(9):
        if position + k >= len(data):
            raise _fail(STATUS[-1])
        byte = int(data[position + k])
        value |= (byte & 127) << (7 * k)
        if byte < 128:
            if byte == 0 and k:
                break
            return value, position + k + 1
    raise _fail(STATUS[-10])


def _read_header(data: NDArray[np.uint8]) -> _Header:
    if not len(data):
        raise _fail("it is empty (expected at least a mode byte and a count)")
    first = int(data[0])
    count, position = _varint(data, 1)
    mode = first & f.MODE_MASK
    if mode > f.RUNS:
        raise _fail(f"mode {mode} is not known (expected 0 to {f.RUNS})")
    if mode in (f.RAW, f.CONSTANT) and first != mode:
        raise _fail(f"mode byte {first:#04x} has bits set that mode {mode} does not use")
    if mode != f.RAW and count == 0:
        raise _fail(f"mode {mode} needs at least one symbol, the header says 0")
    streams = 1 << ((first >> f.STREAMS_SHIFT) & 3)
    indexed = bool(first & f.INDEXED)
    return _Header(mode, streams, indexed, first >> f.ALPHABET_SHIFT, count, position)


def encoded_symbols(data: Bytes) -> int:
    """Number of symbols that a stream declares, without decoding it.

    Args:
        data: what `encode` returned.

    Returns:
        The count of its header.

    Raises:
        CorruptDataError: the header is damaged.
    """
    return _read_header(_as_bytes(data)).symbols


def _read_alphabet(
    data: NDArray[np.uint8], position: int, form: int
) -> tuple[NDArray[np.uint8], int]:
    """The symbols that occur (2 to 256 different ones), and the position after them."""
    if form == f.BITMAP:
        bits = data[position : position + 32]
        if len(bits) < 32:
            raise _fail(STATUS[-1])
        alphabet = np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.uint8)
        position += 32
    else:
        fields = 2 if form == f.RANGE else 1
        if position + fields > len(data):
            raise _fail(STATUS[-1])
        first = int(data[position]) if form == f.RANGE else 0
        size = int(data[position + fields - 1]) + 1
        position += fields
        if form == f.LIST:
            alphabet = data[position : position + size].copy()
            if len(alphabet) < size:
                raise _fail(STATUS[-1])
            if len(np.unique(alphabet)) != size:
                raise _fail("its alphabet names a symbol twice")
            position += size
        else:
            alphabet = ((first + np.arange(size)) & 255).astype(np.uint8)
    if len(alphabet) < 2:
        raise _fail(f"its alphabet has {len(alphabet)} symbols (expected at least 2)")
    return alphabet, position


def _read_blocks(data: NDArray[np.uint8], position: int, header: _Header) -> _Blocks:
    """Read the index. All ranges returned lie inside the data and the declared symbols."""
    from ._decode_kernels import parse_varints

    block = header.symbols
    if header.indexed:
        block, position = _varint(data, position)
        if not f.MIN_BLOCK <= block < header.symbols:
            raise _fail(
                f"blocks of {block} symbols (expected {f.MIN_BLOCK} to {header.symbols - 1})"
            )
    if block > f.MAX_BLOCK:
        raise _fail(f"a block of {block} symbols (expected at most {f.MAX_BLOCK})")
    blocks = -(-header.symbols // block)
    known = blocks * header.streams - 1
    # Each size is at least one byte, which bounds what is allocated here by the input.
    if known > len(data) - position:
        raise _fail(f"an index of {known} sizes in {len(data) - position} bytes")
    sizes = np.zeros(known + 1, np.int64)
    position = _checked(parse_varints(data, position, sizes[:known]))
    payload = len(data) - position
    # Compared one by one first: a sum of hostile sizes could overflow.
    if known and int(sizes.max()) > payload:
        raise _fail(f"a bit stream of {int(sizes.max())} bytes where {payload} are left")
    total = int(sizes.sum())
    if total > payload:
        raise _fail(f"bit streams of {total} bytes where {payload} are left")
    sizes[known] = payload - total
    edges = np.zeros(known + 2, np.int64)
    np.cumsum(sizes, out=edges[1:])
    edges += position
    row = np.arange(blocks)[:, None] * header.streams
    starts = edges[row + np.arange(header.streams + 1)]
    return _Blocks(starts, f.block_stops(header.symbols, block, header.streams), header.streams)


def _words_decoder(
    data: NDArray[np.uint8], alphabet: NDArray[np.uint8], position: int, header: _Header
) -> tuple[_Blocks, Callable[..., int]]:
    from . import _decode_kernels as k

    words = np.zeros(f.MAX_LEAVES, np.uint64)
    word_sizes = np.zeros(f.MAX_LEAVES, np.uint8)
    lengths = np.zeros(f.MAX_LEAVES, np.uint8)
    found = np.zeros(1, np.int64)
    position = _checked(k.parse_tree(data, position, alphabet, words, word_sizes, lengths, found))
    blocks = _read_blocks(data, position, header)
    payload = len(data) - int(blocks.starts[0, 0])
    if header.symbols > 64 * payload:
        raise _fail(f"{header.symbols} symbols in {payload} bytes (expected at most 64 a byte)")
    table = np.empty(f.MAX_LEAVES, np.uint64)
    meta = np.empty(f.MAX_LEAVES, np.uint32)
    # Filling several words an entry pays off once the table is used often enough.
    several = int(header.symbols >= 4096)
    bits = k.build_word_table(words, word_sizes, lengths, int(found[0]), several, table, meta)

    def decode_block(starts: Any, stops: Any, out: Any) -> int:
        return int(k.decode_words(data, starts, out, stops, header.streams, table, meta, bits))

    return blocks, decode_block


def _runs_decoder(
    data: NDArray[np.uint8], alphabet: NDArray[np.uint8], position: int, header: _Header
) -> tuple[_Blocks, Callable[..., int]]:
    from . import _decode_kernels as k

    others = len(alphabet) - 1
    lengths = np.zeros(f.RUN_TOKENS, np.uint8)
    found = np.zeros(1, np.int64)
    position = _checked(k.parse_tokens(data, position, f.value_classes(others), lengths, found))
    blocks = _read_blocks(data, position, header)
    table = np.empty(f.MAX_LEAVES, np.uint64)
    bits = k.build_run_table(lengths, table)
    values = np.zeros(512, np.uint8)
    values[:others] = alphabet[1:]
    values[511] = alphabet[0]

    def decode_block(starts: Any, stops: Any, out: Any) -> int:
        return int(
            k.decode_runs(data, starts, out, stops, header.streams, table, bits, values, others)
        )

    return blocks, decode_block


def _target(
    header: _Header, count: int | None, out: NDArray[np.uint8] | None, limit: int
) -> Callable[[], NDArray[np.uint8]]:
    """Check the declared number of symbols; the result allocates (or returns `out`)."""
    if count is not None and count != header.symbols:
        raise CorruptDataError(
            f"the stream declares {header.symbols} symbols, expected {count}: it belongs to "
            "something else or is damaged"
        )
    if out is not None:
        if not isinstance(out, np.ndarray) or out.dtype != np.uint8 or out.ndim != 1:
            raise TypeError("out must be a one-dimensional uint8 array")
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out must be contiguous and writable")
        if len(out) != header.symbols:
            raise CorruptDataError(
                f"the stream declares {header.symbols} symbols, out has room for {len(out)}"
            )
    elif count is None and header.symbols > limit:
        raise CorruptDataError(
            f"the stream declares {header.symbols} symbols, more than max_symbols={limit}; pass "
            "count= (or a larger max_symbols) if that many are expected"
        )
    return lambda: np.empty(header.symbols, np.uint8) if out is None else out


def decode(
    data: Bytes,
    *,
    count: int | None = None,
    out: NDArray[np.uint8] | None = None,
    threads: int | None = None,
    max_symbols: int = DEFAULT_LIMIT,
) -> NDArray[np.uint8]:
    """Decode what `encode` returned.

    Args:
        data: the stream: bytes, a contiguous memoryview, or a uint8 array; not copied. Bytes after
            its end are an error.
        count: the expected number of symbols. Checked before anything is allocated.
        out: a uint8 array of exactly that length to fill, C-contiguous, shape (count,). After an
            error its contents are undefined.
        threads: the number of threads; by default all for large inputs and one for small.
        max_symbols: the most symbols to allocate where neither `count` nor `out` tells how many to
            expect: a few bytes can legitimately stand for any number of equal symbols.

    Returns:
        The symbols, uint8, shape (count,): `out` where it was given, else a new array.

    Raises:
        CorruptDataError: the data is damaged, is truncated, has trailing bytes, or declares another
            number of symbols than expected.
        TypeError: `data` is not bytes, or `out` not a one-dimensional uint8 array.
        ValueError: `out` is not contiguous or not writable, or `threads` is less than 1.
    """
    source = _as_bytes(data)
    header = _read_header(source)
    allocate = _target(header, count, out, max_symbols)
    threads = f.thread_count(threads, header.symbols)
    position = header.position
    if header.mode in (f.RAW, f.CONSTANT):
        body = source[position:]
        size = header.symbols if header.mode == f.RAW else 1
        if len(body) != size:
            raise _fail(f"its body has {len(body)} bytes (expected {size})")
        result = allocate()
        result[:] = body
        return result
    alphabet, position = _read_alphabet(source, position, header.form)
    build = _words_decoder if header.mode == f.WORDS else _runs_decoder
    blocks, decode_block = build(source, alphabet, position, header)
    result = allocate()

    def work(b: int) -> int:
        return decode_block(blocks.starts[b], blocks.stops[b], result)

    for status in f.run_all(work, range(len(blocks.starts)), threads):
        _checked(status)
    return result

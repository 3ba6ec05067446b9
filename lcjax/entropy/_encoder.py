"""Encoding: choose the smallest mode by its computed size, then encode block by block.

Everything here is a choice that the decoder does not depend on. All choices are made from integers
and from the symbols alone, so the bytes are the same on every machine and for any number of
threads.

Up to a million symbols the candidates are compared on a sample (short inputs: on all symbols), and
the one that wins is counted in full. Longer inputs are coded after a survey of a part of them, with
a code for everything that the rest may hold; if the result comes out larger than the survey
promised, the input is encoded again with everything counted.
"""

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _format as f
from ._models import Code, Layout, Runs, Single, Tree, Words

# Compressed bytes of a block: large enough that its index entry (some 10 bytes) does not count,
# small enough to share a few megabytes among cores and to stay in a second-level cache.
_BLOCK_BYTES = 1 << 17
# Nearly constant input reaches that size never; this keeps it parallel.
_BLOCK_SYMBOLS = 1 << 24
# A stream costs some 2.5 bytes; it is cut in several if each has at least so many.
_STREAMS_FROM = 1024
# Trees are compared on at most this many symbols.
_SAMPLE = 1 << 16
# Longer inputs get a code made from a survey of a 16th of them (2**18 to 2**28 symbols).
_SURVEY_FROM = 1 << 20
_SURVEY_LEAST = 1 << 18
_SURVEY_MOST = 1 << 28
# Symbols that one call of a kernel without blocks gets.
_STRETCH = 1 << 22
_PIECE = 1 << 12
# Sizes of word trees that are tried.
_TREE_LEAVES = (24, 64, 160, 320)
# Counted run tokens below which a survey says too little.
_ENOUGH_TOKENS = 1 << 13


def as_symbols(symbols: ArrayLike | bytes | memoryview) -> NDArray[np.uint8]:
    """A flat contiguous uint8 view (or copy, where the input is not contiguous).

    Raises:
        TypeError: the elements are not uint8.
    """
    if isinstance(symbols, bytes | bytearray | memoryview):
        view = memoryview(symbols)
        if view.format not in ("B", "c"):
            raise TypeError(f"symbols must be uint8, got a memoryview of format {view.format!r}")
        if not view.nbytes:
            return np.zeros(0, np.uint8)
        raw = view if view.c_contiguous else view.tobytes()
        return np.frombuffer(raw, np.uint8)
    array = np.asarray(symbols)
    if array.dtype != np.uint8:
        raise TypeError(f"symbols must be uint8, got {array.dtype}")
    return np.ascontiguousarray(array).reshape(-1)


def _layout(count: int, payload: int, most: int = 4) -> Layout:
    """Cut the input by its (estimated) compressed bytes, blocks into at most `most` streams."""
    blocks = max(
        1 if payload < 3 * _BLOCK_BYTES // 2 else round(payload / _BLOCK_BYTES),
        -(-count // _BLOCK_SYMBOLS),
    )
    block = -(-count // blocks)
    if blocks > 1:
        block = -(-block // 64) * 64
    streams = most if payload >= _STREAMS_FROM * most * blocks else 1
    stops = f.block_stops(count, block, streams)
    stops = stops - stops[:, :1]
    return Layout(block, streams, stops)


def _histogram(symbols: NDArray[np.uint8], threads: int) -> NDArray[np.int64]:
    from ._encode_kernels import histogram

    def work(begin: int) -> NDArray[np.int64]:
        counts = np.zeros(256, np.int64)
        histogram(symbols[begin : begin + _STRETCH], counts)
        return counts

    return np.asarray(sum(f.run_all(work, range(0, len(symbols), _STRETCH), threads)))


def entropy_bits(symbols: ArrayLike | bytes | memoryview) -> float:
    """Order-0 entropy: the bits a symbol that an ideal code without context would use.

    Args:
        symbols: uint8, any shape.

    Returns:
        Bits per symbol, 0 to 8; 0.0 for no symbols.

    Raises:
        TypeError: the elements are not uint8.
    """
    flat = as_symbols(symbols)
    if not len(flat):
        return 0.0
    counts = _histogram(flat, f.thread_count(None, len(flat)))
    share = counts[counts > 0] / len(flat)
    return float(max(0.0, -(share * np.log2(share)).sum()))


def _pieces(symbols: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """About `size` symbols in pieces from the whole length, or all where there are few more.

    One piece lies somewhere in each of equal stretches: at equal distances the pieces could fall on
    the same columns of every row.
    """
    if len(symbols) <= size * 5 // 4:
        return symbols
    pieces = size // _PIECE
    stretch = len(symbols) // pieces
    # A fixed pseudo-random sequence (a multiplicative hash of the piece's number).
    begins = [
        stretch * k + ((k * 0x9E3779B1 & 0xFFFFFFFF) * (stretch - _PIECE + 1) >> 32)
        for k in range(pieces)
    ]
    return np.concatenate([symbols[b : b + _PIECE] for b in begins])


def _whole(count: int) -> Layout:
    """One block, for counting only; eight streams are counted faster than one."""
    streams = 8 if count >= 4096 else 1
    return Layout(count, streams, f.block_stops(count, count, streams))


def _choose(
    symbols: NDArray[np.uint8], part: NDArray[np.uint8], counts: NDArray[np.int64], threads: int
) -> tuple[Code, Layout]:
    """The smallest code, and how to lay out the input.

    Args:
        symbols: the input.
        part: the input itself, or a survey of it.
        counts: the histogram of `part`; at least 1 for each value that may occur in `symbols`.
        threads: how many to use.
    """
    from ._encode_kernels import entropy_bits_of

    total = len(symbols)
    count = len(part)
    surveyed = count < total
    alphabet = np.flatnonzero(counts).astype(np.uint8)
    top = int(counts.max())
    single = Single(counts, alphabet).code()
    layout = _layout(total, single.size(total))
    ideal = int(entropy_bits_of(counts, alphabet.astype(np.int64), int(counts.sum())))
    # With many symbols and none frequent, plain Huffman is as near to the entropy as words are.
    if len(alphabet) > 16 and 4 * top < count and single.bits - ideal < ideal // 100:
        return single, layout
    sample = _pieces(part, _SAMPLE)
    sampled = len(sample) < total
    # (estimated size, tokens, streams, how to make the code for a layout). Parsing words gains from
    # eight streams; runs do not.
    choices: list[tuple[int, int, int, Callable[[Layout], Code]]] = []
    if 2 * top >= count:
        runs = Runs(counts, alphabet)
        trial = runs.code(runs.count(sample, _whole(len(sample)), 1), len(sample))

        def make_runs(layout: Layout) -> Code:
            if surveyed:
                code = runs.code(runs.count(part, _whole(count), threads), count, True)
                # Where runs are long they are few in a survey, and quickly counted in full.
                if code.tokens >= _ENOUGH_TOKENS:
                    return code
            return runs.code(runs.count(symbols, layout, threads), total)

        choices.append((trial.size(total), trial.tokens, 4, make_runs))
    # Where a symbol is this frequent, words of 8 symbols cannot compete with runs.
    if 100 * top < 96 * count or count < 4096:
        words = Words(counts, alphabet)
        for leaves in _TREE_LEAVES:
            if leaves < 2 * len(alphabet) - 1 or leaves > max(count, 64):
                continue
            tree = words.tree(leaves)
            uses = words.count(tree, sample, _whole(len(sample)), 1)
            trial = words.code(tree, uses, len(sample), sampled)

            def make_words(layout: Layout, tree: Tree = tree) -> Code:
                if surveyed:
                    return words.code(tree, words.count(tree, part, _whole(count), 1), count, True)
                return words.code(tree, words.count(tree, symbols, layout, threads), total)

            choices.append((trial.size(total), trial.tokens, 8, make_words))
    smallest = min((choice[0] for choice in choices), default=None)
    # Single symbols are the fastest to write, and several of them are read at once.
    if smallest is None or single.size(total) <= smallest + smallest // 256:
        return single, layout
    # Of sizes within 0.4% the one with the fewest codes to read and write.
    near = [c for c in choices if c[0] <= smallest + smallest // 256]
    estimate, _, streams, make = min(near, key=lambda c: c[1])
    other = _layout(total, estimate, streams)
    code = make(other)
    if code.size(total) < single.size(total):
        return code, other
    return single, layout


def _survey(
    symbols: NDArray[np.uint8], threads: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
    """Part of a long input and its histogram, with every value that the rest may hold.

    Returns:
        None where the values seen tell too little about those that occur.
    """
    from ._encode_kernels import value_range

    part = _pieces(symbols, min(max(_SURVEY_LEAST, len(symbols) >> 4), _SURVEY_MOST))
    counts = _histogram(part, threads)
    seen = np.flatnonzero(counts)
    # The range is taken from the middle of the widest gap, so that -3..3 is one range.
    gaps = (np.roll(seen, -1) - seen - 1) % 256 + 1
    widest = int(np.argmax(gaps))
    offset = int(seen[widest] + (gaps[widest] + 1) // 2) & 255
    if len(seen) < 256:

        def work(begin: int) -> NDArray[np.int64]:
            found = np.zeros(2, np.int64)
            value_range(symbols[begin : begin + _STRETCH], offset, found)
            return found

        found = np.array(f.run_all(work, range(0, len(symbols), _STRETCH), threads))
        values = (offset + np.arange(int(found[:, 0].min()), int(found[:, 1].max()) + 1)) & 255
        # Values that do not occur cost table bytes, and the small alphabets their short words.
        if len(values) - len(seen) > max(4, len(seen) // 4):
            return None
        counts[values] = np.maximum(counts[values], 1)
    return part, counts


def encode(symbols: ArrayLike | bytes | memoryview, *, threads: int | None = None) -> bytes:
    """Encode symbols into a self-describing stream.

    Args:
        symbols: uint8, any shape and any number of them (flattened in C order), or bytes.
        threads: the number of threads; by default all for large inputs and one for small. The
            result does not depend on it.

    Returns:
        The stream, for `decode`. It is at most a few bytes longer than the symbols.

    Raises:
        TypeError: the elements are not uint8.
        ValueError: `threads` is less than 1.
    """
    flat = as_symbols(symbols)
    count = len(flat)
    threads = f.thread_count(threads, count)
    if count > _SURVEY_FROM:
        survey = _survey(flat, threads)
        if survey is not None:
            part, counts = survey
            if np.count_nonzero(counts) == 1:
                return _constant(flat)
            code, layout = _choose(flat, part, counts, threads)
            estimate = code.size(count)
            if estimate >= count:
                return _raw(flat)
            stream = _write(flat, code, layout, threads)
            # If the survey was not like the rest, start again with everything counted.
            if len(stream) <= estimate + estimate // 64 + 1024:
                return stream
    if not count:
        return _raw(flat)
    counts = _histogram(flat, threads)
    if int(counts.max()) == count:
        return _constant(flat)
    code, layout = _choose(flat, flat, counts, threads)
    if code.size(count) < count:
        stream = _write(flat, code, layout, threads)
        if len(stream) <= count:
            return stream
    return _raw(flat)


def _constant(symbols: NDArray[np.uint8]) -> bytes:
    return bytes([f.CONSTANT]) + f.varint(len(symbols)) + symbols[:1].tobytes()


def _raw(symbols: NDArray[np.uint8]) -> bytes:
    return bytes([f.RAW]) + f.varint(len(symbols)) + symbols.tobytes()


def _write(symbols: NDArray[np.uint8], code: Code, layout: Layout, threads: int) -> bytes:
    """A stream of words or runs."""
    count = len(symbols)
    streams = layout.streams
    write = code.writer()
    # Room for the worst case of a stream, of which only what is used is ever touched, and for the
    # last eight-byte store.
    longest = int(np.diff(layout.stops[0]).max())
    room = longest * code.worst_bits // 8 + 24
    begins = np.arange(streams, dtype=np.int64) * room
    local = threading.local()

    def work(item: tuple[int, int]) -> tuple[bytes, NDArray[np.int64]]:
        b, begin = item
        if not hasattr(local, "out"):
            local.out = np.empty(streams * room, np.uint8)
        sizes = np.zeros(streams, np.int64)
        write(
            symbols[begin : begin + layout.block],
            layout.stops[b],
            streams,
            local.out,
            begins,
            sizes,
        )
        pieces = [local.out[i : i + n].tobytes() for i, n in zip(begins, sizes, strict=True)]
        return b"".join(pieces), sizes

    done = f.run_all(work, layout.blocks(), threads)
    sizes = [int(n) for _, row in done for n in row]
    indexed = len(done) > 1
    first = code.mode | ((streams.bit_length() - 1) << f.STREAMS_SHIFT)
    first |= (f.INDEXED if indexed else 0) | (code.form << f.ALPHABET_SHIFT)
    head = [bytes([first]), f.varint(count), code.alphabet, code.table]
    if indexed:
        head.append(f.varint(layout.block))
    head.append(b"".join(f.varint(n) for n in sizes[:-1]))
    return b"".join([*head, *(body for body, _ in done)])

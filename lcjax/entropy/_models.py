"""The ways to code symbols: single symbols, words, and runs, each with its exact size.

Encoder only. Kernels do the passes over the symbols; this module holds what is decided once a
stream.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _format as f

# How the parse lookup packs the symbols after a run, by their number: bits kept of each, the mask
# that keeps them in up to three bytes, and the factor that brings them side by side at bit 16, the
# first one highest. For three: 3-bit fields at bits 0, 8, 16 times (1 + 2**11 + 2**22) fall on bits
# 0 8 11 16 19 22 27 30 38: none overlap, and 16, 19, 22 are one of each.
_PACKING = {
    3: (3, 0x070707, 1 + (1 << 11) + (1 << 22)),
    2: (4, 0x0F0F, (1 << 8) + (1 << 20)),
    1: (8, 0xFF, 1 << 16),
}

# A table of all pairs takes about as long to fill as so many symbols to encode.
_PAIRS_FROM = 1 << 18


class Layout(NamedTuple):
    """How the input is cut into blocks and streams."""

    block: int
    streams: int
    stops: NDArray[np.int64]  # of each block relative to its begin, (blocks, streams + 1)

    def blocks(self) -> list[tuple[int, int]]:
        """Pairs (block, its first symbol)."""
        return [(b, b * self.block) for b in range(len(self.stops))]


class Code(NamedTuple):
    """One way to code the input: what goes in front of the index, and how to write a block."""

    mode: int
    form: int
    alphabet: bytes
    table: bytes
    symbols: int  # of the part of the input that was counted
    bits: int  # of the payload for them
    tokens: int  # codes in it
    # Called once it is certain that the code is used; the result writes one block:
    # (symbols of the block, stops, streams, out, begins, sizes) -> total bytes
    writer: Callable[[], Callable[..., int]]
    worst_bits: int  # of one symbol

    def size(self, count: int) -> int:
        """Bytes without mode, count and index, for `count` symbols."""
        payload = (self.bits * count // self.symbols + 7) // 8
        return len(self.alphabet) + len(self.table) + payload


class Tree(NamedTuple):
    """A word tree: node 0 is the root, child c of node x is `first_child[x] + c`."""

    first_child: NDArray[np.int32]  # -1 for a leaf
    leaf: NDArray[np.int32]  # number of a leaf, in preorder
    leaves: int


def _pack_nibbles(nibbles: NDArray[np.uint8]) -> bytes:
    if len(nibbles) % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    return (nibbles[0::2] | (nibbles[1::2] << 4)).astype(np.uint8).tobytes()


def _lengths(counts: NDArray[np.int64], complete: bool) -> NDArray[np.uint8]:
    """Code lengths for counts.

    With `complete` everything gets a code: the counts are those of a part of the input. Else only
    what occurs, but never less than two, as a code needs.
    """
    from ._codes import limited_lengths

    used = np.maximum(counts, 1) if complete else counts.copy()
    if np.count_nonzero(used) < 2:
        used[int(used[0] > 0)] += 1
    lengths = np.zeros(len(counts), np.uint8)
    limited_lengths(used, f.MAX_CODE, lengths)
    return lengths


def _entries(lengths: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Encoder entries: the code with its first bit lowest (16) | its length << 16."""
    from ._codes import assign_codes, turn_codes

    codes = np.zeros(len(lengths), np.uint32)
    assign_codes(lengths, f.MAX_CODE, codes)
    entries = np.zeros(len(lengths), np.uint32)
    turn_codes(lengths, codes, entries)
    return entries


def _alphabet(alphabet: NDArray[np.uint8]) -> tuple[int, bytes]:
    """Form and bytes of an alphabet in ascending order; a range may wrap from 255 to 0."""
    size = len(alphabet)
    gaps = (np.roll(alphabet, -1) - alphabet) & 255
    jumps = np.flatnonzero(gaps != 1)
    if len(jumps) <= 1:
        low = int(alphabet[(int(jumps[0]) + 1) % size]) if len(jumps) else 0
        if low == 0:
            return f.FROM_ZERO, bytes([size - 1])
        return f.RANGE, bytes([low, size - 1])
    if size < 32:
        return f.LIST, bytes([size - 1]) + alphabet.tobytes()
    bitmap = np.zeros(256, np.uint8)
    bitmap[alphabet] = 1
    return f.BITMAP, np.packbits(bitmap, bitorder="little").tobytes()


def _in_order(form: int, data: bytes, alphabet: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The alphabet in the order of its form: a range begins at its first symbol."""
    if form == f.RANGE:
        return np.roll(alphabet, -int(np.flatnonzero(alphabet == data[0])[0]))
    return alphabet


class Single:
    """Plain Huffman, symbol by symbol: a word tree of depth 1."""

    def __init__(self, counts: NDArray[np.int64], alphabet: NDArray[np.uint8]) -> None:
        self.form, self.head = _alphabet(alphabet)
        self.alphabet = _in_order(self.form, self.head, alphabet)
        self.counts = counts[self.alphabet]

    def code(self) -> Code:
        """The code for the counts given, none of which is zero."""
        from . import _encode_kernels as k

        lengths = _lengths(self.counts, False)
        total = int(self.counts.sum())

        def writer() -> Callable[..., int]:
            table = np.zeros(256, np.uint32)
            table[self.alphabet] = _entries(lengths)
            pairs = np.zeros(0, np.uint32)
            if total >= _PAIRS_FROM:
                pairs = np.empty(272 * 256, np.uint32)
                k.build_pair_table(table, pairs)

            def write(
                block: Any, stops: Any, streams: int, out: Any, begins: Any, sizes: Any
            ) -> int:
                return int(k.encode_single(block, stops, streams, table, pairs, out, begins, sizes))

            return write

        bits = int(np.dot(self.counts, lengths.astype(np.int64)))
        table_bytes = _pack_nibbles(lengths)
        return Code(
            f.WORDS, self.form, self.head, table_bytes, total, bits, total, writer, f.MAX_CODE
        )


class Words:
    """Word trees over one alphabet: grow, count, turn into a code."""

    def __init__(self, counts: NDArray[np.int64], alphabet: NDArray[np.uint8]) -> None:
        self.form, self.head = _alphabet(alphabet)
        self.alphabet = _in_order(self.form, self.head, alphabet)
        self.counts = np.ascontiguousarray(counts[self.alphabet])
        self.total = int(self.counts.sum())
        self.run_index = int(np.argmax(self.counts))
        size = len(alphabet)
        self.after_run = 3 if size <= 8 else 2 if size <= 16 else 1
        bits, self.mask, self.factor = _PACKING[self.after_run]
        kept = self.alphabet & ((1 << bits) - 1)
        # The lookup keeps the low bits of a symbol. Where they do not tell the alphabet's symbols
        # apart, blocks are renumbered first.
        self.renumber: NDArray[np.uint8] | None = None
        self.run = int(self.alphabet[self.run_index])
        if len(np.unique(kept)) < size:
            self.renumber = np.zeros(256, np.uint8)
            self.renumber[self.alphabet] = np.arange(size)
            kept = np.arange(size, dtype=np.uint8)
            self.run = self.run_index
        self.child_of = np.full(256, 255, np.uint8)
        self.child_of[kept] = np.arange(size)

    def seen(self, symbols: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The symbols as the kernels take them."""
        return symbols if self.renumber is None else self.renumber[symbols]

    def tree(self, leaves: int) -> Tree:
        """A tree of about so many leaves."""
        from . import _encode_kernels as k

        n = len(self.alphabet)
        nodes = leaves + leaves // (n - 1) + n + 2
        first_child = np.full(nodes, -1, np.int32)
        leaf = np.zeros(nodes, np.int32)
        shape = np.zeros(2, np.int32)
        k.grow_tree(
            self.counts,
            self.run_index,
            self.after_run,
            leaves,
            self.total,
            first_child,
            leaf,
            shape,
        )
        return Tree(first_child[: shape[0]], leaf[: shape[0]], int(shape[1]))

    def parse_table(self, tree: Tree, payload: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The encoder's lookup table, which finds `payload` (of each leaf) and the word's size."""
        from . import _encode_kernels as k

        table = np.zeros(9 * 512, np.uint32)
        k.build_parse_table(
            tree.first_child,
            tree.leaf,
            self.child_of,
            self.run_index,
            self.after_run,
            payload,
            table,
        )
        return table

    def count(
        self, tree: Tree, symbols: NDArray[np.uint8], layout: Layout, threads: int
    ) -> NDArray[np.int64]:
        """How often each leaf is used, shape (leaves,)."""
        from . import _encode_kernels as k

        table = self.parse_table(tree, np.arange(tree.leaves, dtype=np.uint32))
        mask, factor = self.mask, self.factor

        def work(item: tuple[int, int]) -> NDArray[np.int64]:
            b, begin = item
            counts = np.zeros(f.MAX_LEAVES, np.int64)
            part = self.seen(symbols[begin : begin + layout.block])
            stops = layout.stops[b]
            k.count_words(part, stops, layout.streams, self.run, mask, factor, table, counts)
            return counts

        return np.asarray(sum(f.run_all(work, layout.blocks(), threads)))[: tree.leaves]

    def code(
        self, tree: Tree, counts: NDArray[np.int64], symbols: int, complete: bool = False
    ) -> Code:
        """The code of a tree for given uses of its leaves by so many symbols."""
        from . import _encode_kernels as k

        lengths = _lengths(counts, complete)
        nibbles = np.zeros(len(tree.first_child) + 4, np.uint8)
        size = k.write_tree(tree.first_child, tree.leaf, lengths, len(self.alphabet), nibbles)

        def writer() -> Callable[..., int]:
            table = self.parse_table(tree, _entries(lengths))
            run, mask, factor = self.run, self.mask, self.factor

            def write(
                block: Any, stops: Any, streams: int, out: Any, begins: Any, sizes: Any
            ) -> int:
                block = self.seen(block)
                return int(
                    k.encode_words(
                        block, stops, streams, run, mask, factor, table, out, begins, sizes
                    )
                )

            return write

        bits = int(np.dot(counts, lengths.astype(np.int64)))
        packed = _pack_nibbles(nibbles[:size])
        tokens = int(counts.sum())
        return Code(
            f.WORDS, self.form, self.head, packed, symbols, bits, tokens, writer, f.MAX_CODE
        )


class Runs:
    """Runs of the most frequent symbol, each with the value after it."""

    def __init__(self, counts: NDArray[np.int64], alphabet: NDArray[np.uint8]) -> None:
        used = counts[alphabet]
        run = int(alphabet[int(np.argmax(used))])
        # By falling frequency, so that the rare values share classes.
        order = alphabet[np.argsort(-used, kind="stable")]
        rest = order[order != run]
        size = len(alphabet)
        self.form, self.head = f.LIST, b""
        if size <= 9:
            form, head = _alphabet(alphabet)
            ordered = _in_order(form, head, alphabet)
            if form in (f.FROM_ZERO, f.RANGE) and ordered[0] == run:
                self.form, self.head, rest = form, head, ordered[1:]
        if self.form == f.LIST:
            self.head = bytes([size - 1, run]) + rest.tobytes()
        self.run = run
        self.ranks = np.zeros(256, np.uint8)
        self.ranks[rest] = np.arange(size - 1)
        self.classes = f.value_classes(size - 1)

    def count(self, symbols: NDArray[np.uint8], layout: Layout, threads: int) -> NDArray[np.int64]:
        """How often each token is used, shape (512,)."""
        from . import _encode_kernels as k

        def work(item: tuple[int, int]) -> NDArray[np.int64]:
            b, begin = item
            counts = np.zeros(f.RUN_TOKENS, np.int64)
            part = symbols[begin : begin + layout.block]
            k.count_runs(part, layout.stops[b], layout.streams, self.run, self.ranks, counts)
            return counts

        return np.asarray(sum(f.run_all(work, layout.blocks(), threads)))

    def code(self, counts: NDArray[np.int64], symbols: int, complete: bool = False) -> Code:
        """The code for given uses of the tokens by so many symbols."""
        from . import _encode_kernels as k

        used = counts.reshape(32, 16)[:, : self.classes]
        if complete:
            # Runs of up to twice the longest one seen, as a rule; `_encoder` checks the result.
            seen = int(np.flatnonzero(used.any(axis=1)).max()) + 2
            used = np.maximum(used, (np.arange(32) < seen)[:, None])
        padded = np.zeros((32, 16), np.int64)
        padded[:, : self.classes] = used
        lengths = _lengths(padded.reshape(-1), False)
        nibbles = np.zeros(f.RUN_TOKENS + 2, np.uint8)
        size = k.write_tokens(lengths, self.classes, nibbles)
        run, ranks = self.run, self.ranks

        def writer() -> Callable[..., int]:
            table = _entries(lengths)

            def write(
                block: Any, stops: Any, streams: int, out: Any, begins: Any, sizes: Any
            ) -> int:
                return int(
                    k.encode_runs(block, stops, streams, run, ranks, table, out, begins, sizes)
                )

            return write

        token = np.arange(f.RUN_TOKENS)
        extra = (token >> 4) + np.maximum((token & 15) - 7, 0)
        bits = int(np.dot(counts, lengths + extra))
        packed = _pack_nibbles(nibbles[:size])
        tokens = int(counts.sum())
        return Code(f.RUNS, self.form, self.head, packed, symbols, bits, tokens, writer, 19)

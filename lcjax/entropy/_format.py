"""Constants and small pieces of the stream format that encoder and decoder share.

`FORMAT.md` beside this file is the full description.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

RAW, CONSTANT, WORDS, RUNS = 0, 1, 2, 3

MODE_MASK = 7
STREAMS_SHIFT = 3
INDEXED = 1 << 5
ALPHABET_SHIFT = 6

# Forms of an alphabet.
FROM_ZERO, RANGE, LIST, BITMAP = 0, 1, 2, 3

MAX_CODE = 12
MAX_LEAVES = 1 << MAX_CODE
RUN_TOKENS = 32 * 16
# The least keeps a damaged index from needing more memory than the symbols.
MIN_BLOCK = 256
MAX_BLOCK = 1 << 31

# Below this many symbols the default is one thread: starting a pool costs about as much as the
# work it would share.
_PARALLEL_FROM = 1 << 22

_T = TypeVar("_T")
_R = TypeVar("_R")


def varint(value: int) -> bytes:
    """LEB128: seven bits a byte, lowest first; the top bit says that more follow."""
    out = bytearray()
    while value > 127:
        out.append(128 | (value & 127))
        value >>= 7
    out.append(value)
    return bytes(out)


def value_classes(others: int) -> int:
    """Number of classes of the values that may follow a run, for `others` such values."""
    return others if others <= 8 else 7 + (others - 7).bit_length() - 1 + 1


def block_stops(count: int, block: int, streams: int) -> NDArray[np.int64]:
    """Where streams end, in symbols.

    Args:
        count: symbols of the whole input.
        block: symbols of each block but the last.
        streams: streams of each block.

    Returns:
        Shape (blocks, streams + 1): stream j of block b holds the symbols
        `[stops[b, j], stops[b, j + 1])`.
    """
    begin = np.arange(-(-count // block), dtype=np.int64)[:, None] * block
    end = np.minimum(begin + block, count)
    part = -(-(end - begin) // streams)
    return np.minimum(begin + part * np.arange(streams + 1), end)


def thread_count(threads: int | None, symbols: int) -> int:
    """The number of threads to use: as asked, else all for large inputs and one for small.

    Raises:
        ValueError: `threads` is less than 1.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        return threads
    if symbols < _PARALLEL_FROM:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def run_all(work: Callable[[_T], _R], items: Iterable[_T], threads: int) -> list[_R]:
    """`[work(item) for item in items]`, on up to `threads` threads; the first error is raised."""
    items = list(items)
    threads = min(threads, len(items))
    if threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))

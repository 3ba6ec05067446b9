"""Length-limited canonical Huffman codes, as plain functions that can be checked by hand.

Example:
    >>> counts = [5, 2, 2, 1]  # of the symbols 1 3 0 0 0 2 0 2 1 0
    >>> code_lengths(counts, 12).tolist()
    [1, 2, 3, 3]
    >>> [format(c, f"0{n}b") for c, n in zip(canonical_codes([1, 2, 3, 3]).tolist(), [1, 2, 3, 3])]
    ['0', '10', '110', '111']
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Longest code of any stream: a table of 4096 entries of 8 + 4 bytes stays in the first-level
# cache, and four codes fit a 64-bit word beside the bits left over from a byte.
MAX_LENGTH = 12


def code_lengths(counts: ArrayLike, max_length: int = MAX_LENGTH) -> NDArray[np.uint8]:
    """Lengths of an optimal prefix code of which no code is longer than `max_length`.

    On equal counts the higher symbol is merged first, so that lower symbols get the shorter
    codes. The result depends on integers only: every machine finds the same.

    Args:
        counts: how often each symbol occurs, shape (n,), integers >= 0.
        max_length: the limit in bits, 1 to 32.

    Returns:
        Lengths, uint8, shape (n,); 0 for symbols that do not occur. A single symbol gets 1.

    Raises:
        ValueError: a count is negative, their sum does not fit int64, or more than
            `2**max_length` symbols occur.
    """
    given = np.asarray(counts)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"counts must be a 1-D array of integers, got {given.dtype}{given.shape}")
    if not 1 <= max_length <= 32:
        raise ValueError(f"max_length must be 1 to 32, got {max_length}")
    if given.size and int(given.min()) < 0:
        raise ValueError(f"counts must not be negative, got {int(given.min())}")
    total = sum(int(c) for c in given.tolist())
    # Package-merge adds at most every count once per row.
    if total * max_length >= 2**63:
        raise ValueError(f"the sum of counts must stay below 2**63 / max_length, got {total}")
    if np.count_nonzero(given) > 2**max_length:
        raise ValueError(
            f"{np.count_nonzero(given)} symbols do not fit codes of at most {max_length} bits"
        )
    from ._codes import limited_lengths

    lengths = np.zeros(given.shape, np.uint8)
    limited_lengths(np.ascontiguousarray(given, dtype=np.int64), max_length, lengths)
    return lengths


def canonical_codes(lengths: ArrayLike) -> NDArray[np.uint32]:
    """The canonical code of given lengths: by length, then by symbol, counting upwards.

    Args:
        lengths: code lengths, shape (n,), 0 to 32; 0 means no code.

    Returns:
        Codes, uint32, shape (n,), right-aligned: the first bit of the code of symbol s has the
        value `1 << (lengths[s] - 1)`.

    Raises:
        ValueError: the lengths are over 32 or need more codes than there are (Kraft sum > 1).
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"lengths must be a 1-D array of integers, got {given.dtype}")
    if given.size and (int(given.min()) < 0 or int(given.max()) > 32):
        raise ValueError("code lengths must be 0 to 32")
    from ._codes import assign_codes

    codes = np.zeros(given.shape, np.uint32)
    kraft = assign_codes(np.ascontiguousarray(given, dtype=np.uint8), 32, codes)
    if kraft > 2**32:
        raise ValueError("the lengths are over-subscribed: their Kraft sum is more than 1")
    return codes

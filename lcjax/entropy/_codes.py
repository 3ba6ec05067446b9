# mypy: allow-untyped-defs, no-check-untyped-defs
"""Kernels on code lengths: the optimal length-limited code and its canonical code words."""

import numpy as np

from ._jit import BYTES, I64, U8, U32, i64, kernel


@kernel(i64(I64, i64, U8))
def limited_lengths(counts, max_length, lengths):
    """Optimal code lengths under a limit, by package-merge; 0 for a count of 0.

    Returns the number of symbols that have a code. The caller has checked that they fit
    (`used <= 2**max_length`). One used symbol gets length 1.
    """
    n = counts.shape[0]
    lengths[:] = 0
    used = 0
    for s in range(n):
        if counts[s] > 0:
            used += 1
    if used == 0:
        return 0
    symbol = np.empty(used, np.int64)
    weight = np.empty(used, np.int64)
    k = 0
    # The rarest first; on equal counts the higher symbol counts as the rarer. `mergesort` is
    # stable, so filling in descending order of symbols makes the tie rule.
    for s in range(n - 1, -1, -1):
        if counts[s] > 0:
            symbol[k] = s
            weight[k] = counts[s]
            k += 1
    order = np.argsort(weight, kind="mergesort")
    symbol = symbol[order]
    weight = weight[order]
    if used == 1:
        lengths[symbol[0]] = 1
        return 1
    # Row `d` lists the coins of width 2**-(max_length - d) by weight: leaves, and pairs of the
    # row before. Only whether an entry is a leaf must be remembered to walk back.
    is_leaf = np.zeros((max_length, 2 * used), np.bool_)
    row = np.empty(2 * used, np.int64)
    before = np.empty(2 * used, np.int64)
    size = 0
    for d in range(max_length):
        pairs = size // 2
        before, row = row, before
        a = 0
        b = 0
        size = used + pairs
        for k in range(size):
            if a < used and (b >= pairs or weight[a] <= before[2 * b] + before[2 * b + 1]):
                row[k] = weight[a]
                is_leaf[d, k] = True
                a += 1
            else:
                row[k] = before[2 * b] + before[2 * b + 1]
                b += 1
    # 2*used - 2 coins of the last row pay for the code. A leaf's length is the number of times
    # that it is among the coins taken.
    take = 2 * used - 2
    for d in range(max_length - 1, -1, -1):
        leaves = 0
        for k in range(take):
            if is_leaf[d, k]:
                lengths[symbol[leaves]] += 1
                leaves += 1
        take = 2 * (take - leaves)
    return used


@kernel(i64(BYTES, i64, U32))
def assign_codes(lengths, max_length, codes):
    """Canonical codes (first bit highest): by length, then by index.

    Returns the Kraft sum in units of 2**-max_length; the code is complete when it is
    2**max_length. The caller has checked that no length is over the limit.
    """
    n = lengths.shape[0]
    kraft = 0
    next_code = np.zeros(max_length + 2, np.int64)
    tally = np.zeros(max_length + 2, np.int64)
    for s in range(n):
        length = np.int64(lengths[s])
        if length > 0:
            tally[length] += 1
            kraft += 1 << (max_length - length)
    code = 0
    for length in range(1, max_length + 1):
        code = (code + tally[length - 1]) << 1
        next_code[length] = code
    for s in range(n):
        length = np.int64(lengths[s])
        codes[s] = 0
        if length > 0:
            codes[s] = next_code[length]
            next_code[length] += 1
    return kraft


@kernel(i64(BYTES, U32, U32))
def turn_codes(lengths, codes, entries):
    """Encoder entries: the code with its first bit lowest (16) | its length << 16."""
    for s in range(lengths.shape[0]):
        length = np.int64(lengths[s])
        code = np.int64(codes[s])
        turned = np.int64(0)
        for _ in range(length):
            turned = (turned << 1) | (code & 1)
            code >>= 1
        entries[s] = turned | (length << 16)
    return np.int64(0)

"""Cutting symbols into classes by a key that a reader has too, each class a stream of its own."""

import numpy as np

from lcjax._numba import kernel


@kernel()
def stream_bits_of(counts, stream_bits, symbol_bits):
    """Size of symbols, given how often each occurs, as a stream of their own."""
    total, used, sum_ = 0.0, 0, np.int64(0)
    for n in counts:
        if n > 0:
            used += 1
            sum_ += n
            total -= n * np.log2(np.float64(n))
    if sum_ > 0:
        total += sum_ * np.log2(np.float64(sum_))
    return total + stream_bits + symbol_bits * used


@kernel()
def merge_classes(counts, stream_bits, symbol_bits, most, begins):
    """Joins neighbouring classes while that makes all of them together smaller.

    Args:
      counts: int64 ``(classes, 256)``, changed.
      stream_bits: what each stream costs beside its symbols' entropy.
      symbol_bits: what each symbol in use adds to that.
      most: classes that may be left.
      begins: int64 ``(classes,)``; gets the first old class of each new one.

    Returns:
      How many are left, and the size of all together, in bits.
    """
    left = counts.shape[0]
    sizes = np.empty(left)
    joined = np.empty(left)  # of each with its successor
    for k in range(left):
        begins[k] = k
        sizes[k] = stream_bits_of(counts[k], stream_bits, symbol_bits)
    for k in range(left - 1):
        joined[k] = stream_bits_of(counts[k] + counts[k + 1], stream_bits, symbol_bits)
    while left > 1:
        best, gain = 0, -np.inf
        for k in range(left - 1):
            mine = sizes[k] + sizes[k + 1] - joined[k]
            if mine > gain:
                best, gain = k, mine
        if gain < 0 and left <= most:
            break
        counts[best] += counts[best + 1]
        sizes[best] = joined[best]
        for k in range(best + 1, left - 1):
            counts[k] = counts[k + 1]
            sizes[k] = sizes[k + 1]
            begins[k] = begins[k + 1]
            joined[k] = joined[k + 1]
        left -= 1
        if best > 0:
            joined[best - 1] = stream_bits_of(
                counts[best - 1] + counts[best], stream_bits, symbol_bits
            )
        if best < left - 1:
            joined[best] = stream_bits_of(counts[best] + counts[best + 1], stream_bits, symbol_bits)
    return left, sizes[:left].sum()

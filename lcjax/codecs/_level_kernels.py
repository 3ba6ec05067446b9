"""Numba side of the level codec: logarithms as integers taken from the floats' own bits."""

import numpy as np

from lcjax._numba import kernel

_ODD = 255
_MOST = 127


@kernel()
def drift(u, c, drop, infinity, out):
    """Sum of ``level(u) - level(c)`` over elements positive in both, and their number."""
    total, count = np.int64(0), np.int64(0)
    for k in range(u.size):
        a, b = np.int64(u[k]), np.int64(c[k])
        if 0 < a < infinity and 0 < b < infinity:
            total += (a >> drop) - (b >> drop)
            count += 1
    out[0], out[1] = total, count


@kernel()
def lowest(u, c, drop, infinity, least, most):
    """Least level among positive elements of ``u`` whose reference is not positive."""
    low = np.int64(most)
    half = (np.int64(1) << drop) >> 1
    for k in range(u.size):
        a, b = np.int64(u[k]), np.int64(c[k])
        if 0 < a < infinity and not 0 < b < infinity:
            level = min(max((a + half) >> drop, least), most)
            low = min(low, level)
    return low


@kernel()
def quantize(u, c, drop, infinity, shift, stride, dead, low, least, most, symbols):
    """One symbol per element: a delta's code where ``c`` is positive, else a level's number.

    Returns how many elements have no symbol; they are marked 255.
    """
    half = (np.int64(1) << drop) >> 1
    odd = 0
    for k in range(u.size):
        a, b = np.int64(u[k]), np.int64(c[k])
        symbol = _ODD
        if 0 < a < infinity:
            level = min(max((a + half) >> drop, least), most)
            if 0 < b < infinity:
                d = level - (b >> drop) - shift
                m = abs(d)
                if m <= dead:
                    symbol = 0
                else:
                    q = (m - dead - 1) // stride + 1
                    if q <= _MOST:
                        symbol = 2 * q - (1 if d > 0 else 0)
            else:
                n = (level - low + stride // 2) // stride + 1
                if 0 < n < _ODD:
                    symbol = n
        elif a == b and not 0 < b < infinity:
            symbol = 0
        if symbol == _ODD:
            odd += 1
        symbols[k] = symbol
    return odd


@kernel()
def classify(c, drop, infinity, classes, out, counts):
    """Class of each element: 0 where it is not positive and finite, else by its level.

    ``classes`` has a class, 1 or more, for each level; ``counts`` gets the sizes of all.
    """
    counts[:] = 0
    for k in range(c.size):
        b = np.int64(c[k])
        key = classes[b >> drop] if 0 < b < infinity else np.uint8(0)
        out[k] = key
        counts[key] += 1


@kernel()
def split(symbols, keys, ends, out):
    """Sorts symbols by class, each class in order; ``ends`` has the classes' begins."""
    for k in range(symbols.size):
        key = keys[k]
        out[ends[key]] = symbols[k]
        ends[key] += 1


@kernel()
def join(sorted_symbols, keys, ends, symbols):
    """Inverse of ``split``."""
    for k in range(symbols.size):
        key = keys[k]
        symbols[k] = sorted_symbols[ends[key]]
        ends[key] += 1


@kernel()
def level_counts(c, drop, infinity, fold, out):
    """How many positive elements have each level, levels taken ``2^fold`` together."""
    for k in range(c.size):
        b = np.int64(c[k])
        if 0 < b < infinity:
            out[b >> (drop + fold)] += 1


@kernel()
def joint_counts(symbols, keys, out):
    """How often each symbol occurs in each class."""
    for k in range(symbols.size):
        out[keys[k], symbols[k]] += 1


@kernel()
def apply(c, drop, infinity, shift, stride, extra, low, least, most, symbols):
    """Moves a reference, given as its bits, in place."""
    for k in range(c.size):
        b, symbol = np.int64(c[k]), np.int64(symbols[k])
        if 0 < b < infinity:
            t = np.int64(shift)
            if symbol != 0:
                size = ((symbol + 1) >> 1) * stride + extra
                t += size if symbol & 1 else -size
            if t != 0:
                c[k] = min(max((b >> drop) + t, least), most) << drop
        elif symbol != 0:
            c[k] = min(max(low + (symbol - 1) * stride, least), most) << drop


@kernel()
def losses(u, c, drop, infinity, values, kept, out):
    """Squares of ``values``, of ``values - kept``, its maximum; largest distance in levels.

    ``values`` and ``kept`` are the floats whose bits are ``u`` and ``c``.
    """
    state, error, top, octaves = 0.0, 0.0, 0.0, 0
    for k in range(u.size):
        a, b = np.int64(u[k]), np.int64(c[k])
        if 0 < a < infinity and 0 < b < infinity:
            x = np.float64(values[k])
            e = abs(x - np.float64(kept[k]))
            state += x * x
            error += e * e
            top = max(top, e)
            octaves = max(octaves, abs((a >> drop) - (b >> drop)))
    out[0], out[1], out[2], out[3] = state, error, top, octaves

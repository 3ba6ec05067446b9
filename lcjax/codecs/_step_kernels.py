"""Numba side of the step codec: measuring a delta, quantizing it, and integer key frames."""

import numpy as np

from lcjax._numba import kernel

_LARGEST = np.float32(3.4028235e38)
_ODD = np.uint8(255)
_MOST = np.float32(127.0)


@kernel()
def measure(u, c, out):
    """Sums over finite deltas: ``(u - c)^2``, ``u^2``; their count; ``max |u|``."""
    delta, state, count = 0.0, 0.0, 0
    top = np.float32(0.0)
    for k in range(u.size):
        d = np.float32(u[k] - c[k])
        if abs(d) <= _LARGEST:
            delta += np.float64(d) * np.float64(d)
            state += np.float64(u[k]) * np.float64(u[k])
            count += 1
            a = abs(u[k])
            top = a if a > top else top
    out[0], out[1], out[2], out[3] = delta, state, count, top


@kernel()
def measure_alone(u, out):
    """The same with ``c = 0``."""
    state, count = 0.0, 0
    top = np.float32(0.0)
    for k in range(u.size):
        a = abs(u[k])
        if a <= _LARGEST:
            state += np.float64(a) * np.float64(a)
            count += 1
            top = a if a > top else top
    out[0], out[1], out[2], out[3] = state, state, count, top


@kernel()
def quantize(d, threshold, step, codes, counts):
    """Codes of a delta: 0 up to the threshold, then ``2 q - 1`` (positive) or ``2 q``.

    255 marks what has no code: not finite, or ``q > 127``. ``counts`` counts each code.
    """
    inverse = np.float32(1.0) / step
    odd = 0
    for k in range(d.size):
        a = abs(d[k])
        if a <= threshold:
            codes[k] = 0
            continue
        q = (a - threshold) * inverse
        if q < _MOST:
            code = 2 * np.int64(q) + 1 + (d[k] < 0)
            codes[k] = code
            counts[code] += 1
        else:
            codes[k] = _ODD
            odd += 1
    return odd


@kernel()
def losses(u, c, out):
    """Sum of squares of ``u - c`` and its largest value, over finite ones; kept elements."""
    error, top = 0.0, np.float32(0.0)
    for k in range(u.size):
        a = abs(np.float32(u[k] - c[k]))
        if a <= _LARGEST:
            error += np.float64(a) * np.float64(a)
            top = a if a > top else top
    out[0], out[1] = error, top


@kernel()
def to_grid(u, inverse, words):
    """Zigzag of ``round(u * inverse)`` (to even), 0 where that does not fit 24 bits.

    Returns the largest word, and how many elements did not fit.
    """
    top, odd = np.uint32(0), 0
    limit = np.float32(16777216.0)
    for k in range(u.size):
        x = np.float32(np.rint(u[k] * inverse))
        if abs(x) <= limit:
            n = np.int64(x)
            z = np.uint32(2 * n) if n >= 0 else np.uint32(-2 * n - 1)
            words[k] = z
            top = z if z > top else top
        else:
            words[k] = 0
            odd += 1
    return top, odd


@kernel()
def from_grid(words, unit, out):
    """Inverse of ``to_grid``: ``n * unit``, exact for a power of two."""
    for k in range(words.size):
        z = np.int64(words[k])
        n = -((z + 1) >> 1) if z & 1 else z >> 1
        out[k] = np.float32(n) * unit

"""Numba side of the moment codec: prediction from a parameter's delta, and its remainder."""

import numpy as np

from lcjax._numba import kernel

_LARGEST = np.float32(3.4028235e38)
_TINY = np.uint32(0x7F800000)


@kernel()
def fit(m, delta, root, out):
    """Sums for a least-squares gain, with ``y = m / root``: ``y delta``, ``delta^2``, ``y^2``, n.

    Elements count where everything is finite and ``root`` is positive.
    """
    cross, square, own, count = 0.0, 0.0, 0.0, 0
    for k in range(m.size):
        if root[k] > 0 and abs(m[k]) <= _LARGEST and abs(delta[k]) <= _LARGEST:
            y = np.float64(m[k]) / np.float64(root[k])
            d = np.float64(delta[k])
            cross += y * d
            square += d * d
            own += y * y
            count += 1
    out[0], out[1], out[2], out[3] = cross, square, own, count


@kernel()
def remainder(m, delta, root, gain, out):
    """``m / root - gain * delta``, NaN where ``m`` is not finite, 0 where there is no root."""
    for k in range(m.size):
        if abs(m[k]) <= _LARGEST:
            if root[k] > 0 and abs(delta[k]) <= _LARGEST:
                out[k] = np.float32(m[k] / root[k] - gain * delta[k])
            else:
                out[k] = np.float32(0.0)
        else:
            out[k] = np.float32(np.nan)


@kernel()
def rebuild(delta, root, gain, codes, table, out, bits):
    """``root * (gain * delta + table[code])``, each operation rounded to float32.

    ``out`` and ``bits`` are two views of one array; subnormal results become zeros.
    """
    for k in range(codes.size):
        x = np.float32(table[codes[k]])
        if abs(delta[k]) <= _LARGEST:
            x = np.float32(np.float32(gain * delta[k]) + x)
        x = np.float32(root[k] * x)
        if not abs(x) <= _LARGEST:
            x = np.float32(0.0)
        out[k] = x
        if bits[k] & _TINY == 0:
            bits[k] = 0

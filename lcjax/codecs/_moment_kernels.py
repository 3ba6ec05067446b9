"""Numba side of the moment codec: prediction from a parameter's trail, and its remainder."""

import numpy as np

from lcjax._numba import kernel

_LARGEST = np.float32(3.4028235e38)
_TINY = np.uint32(0x7F800000)


@kernel()
def extend(new, old, memory, trail):
    """``trail = memory * trail + (new - old)``, in place, each operation rounded to float32."""
    for k in range(new.size):
        d = np.float32(new[k] - old[k])
        if not abs(d) <= _LARGEST:
            d = np.float32(0.0)
        x = np.float32(np.float32(memory * trail[k]) + d)
        if not abs(x) <= _LARGEST:
            x = np.float32(0.0)
        trail[k] = x


@kernel()
def fit(m, trail, root, out):
    """Sums as ``moments.Fit`` has them.

    Elements count where everything is finite and ``root`` is positive.
    """
    cross, predicted, own, scaled_cross, square, scaled = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    count = 0
    for k in range(m.size):
        if root[k] > 0 and abs(m[k]) <= _LARGEST:
            x, r, d = np.float64(m[k]), np.float64(root[k]), np.float64(trail[k])
            y, p = x / r, r * d
            cross += x * p
            predicted += p * p
            own += x * x
            scaled_cross += y * d
            square += d * d
            scaled += y * y
            count += 1
    out[0], out[1], out[2], out[3] = cross, predicted, own, scaled_cross
    out[4], out[5], out[6] = square, scaled, count


@kernel()
def remainder(m, trail, root, gain, out):
    """``m / root - gain * trail``, NaN where ``m`` is not finite, 0 where there is no root."""
    for k in range(m.size):
        if abs(m[k]) <= _LARGEST:
            if root[k] > 0 and abs(trail[k]) <= _LARGEST:
                out[k] = np.float32(m[k] / root[k] - gain * trail[k])
            else:
                out[k] = np.float32(0.0)
        else:
            out[k] = np.float32(np.nan)


@kernel()
def rebuild(trail, root, gain, codes, table, out, bits):
    """``root * (gain * trail + table[code])``, each operation rounded to float32.

    ``out`` and ``bits`` are two views of one array; subnormal results become zeros.
    """
    for k in range(codes.size):
        x = np.float32(table[codes[k]])
        if abs(trail[k]) <= _LARGEST:
            x = np.float32(np.float32(gain * trail[k]) + x)
        x = np.float32(root[k] * x)
        if not abs(x) <= _LARGEST:
            x = np.float32(0.0)
        out[k] = x
        if bits[k] & _TINY == 0:
            bits[k] = 0

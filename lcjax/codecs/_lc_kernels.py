"""Numba side of LC-Checkpoint: moving a reference by a delta on the host."""

import numpy as np

from lcjax._numba import kernel

_EXP32 = np.uint32(0x7F800000)
_SIGN32 = np.uint32(0x80000000)
_EXP16 = np.uint16(0x7F80)
_SIGN16 = np.uint16(0x8000)


@kernel()
def apply_float32(values, bits, codes, table):
    """``values`` and ``bits`` are two views of one array; see ``lc.apply``."""
    # Most codes are 0, so a branch that the processor predicts beats arithmetic on all.
    for k in range(codes.size):
        code = codes[k]
        if code != 0:
            b = bits[k]
            if b & _EXP32 == 0:
                bits[k] = b & _SIGN32
            values[k] = np.float32(values[k] + table[code])
            b = bits[k]
            if b & _EXP32 == 0:
                bits[k] = b & _SIGN32


@kernel()
def apply_bfloat16(bits, codes, table):
    """The same for bfloat16, given as its 16 bits; the sum is taken in float32."""
    value = np.zeros(1, np.float32)
    word = value.view(np.uint32)
    for k in range(codes.size):
        code = codes[k]
        if code != 0:
            b = bits[k]
            if b & _EXP16 == 0:
                b = b & _SIGN16
            word[0] = np.uint32(b) << np.uint32(16)
            value[0] = np.float32(value[0] + table[code])
            w = word[0]
            if w & _EXP32 == 0:
                w = w & _SIGN32
            # Round to nearest, ties to even; sums of finite numbers are never NaN.
            half = np.uint32(0x7FFF) + ((w >> np.uint32(16)) & np.uint32(1))
            b = np.uint16((w + half) >> np.uint32(16))
            if b & _EXP16 == 0:
                b = b & _SIGN16
            bits[k] = b

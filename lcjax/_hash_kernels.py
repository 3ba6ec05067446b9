"""Numba side of ``lcjax.hashing.value_hash``."""

import numpy as np

from lcjax._hash_constants import LANE, MUL1, MUL2, START, WEYL
from lcjax._numba import kernel

_WEYL32 = np.uint32(WEYL)
_START32 = np.uint32(START)
_LANE32 = np.uint32(LANE)
_M1 = np.uint32(MUL1)
_M2 = np.uint32(MUL2)
_16 = np.uint32(16)
_15 = np.uint32(15)


@kernel()
def hash_words(flat, start):
    """Both lanes of the value hash of ``flat``, whose first word has index ``start``."""
    # Everything stays uint32 and branch-free so that LLVM turns the loop into vector code.
    low = np.uint32(0)
    high = np.uint32(0)
    for k in range(flat.size):
        i = np.uint32(start + np.uint32(k))
        t = np.uint32(flat[k]) ^ np.uint32(i * _WEYL32 + _START32)
        t = np.uint32((t ^ (t >> _16)) * _M1)
        t = np.uint32((t ^ (t >> _15)) * _M2)
        t = t ^ (t >> _16)
        low = np.uint32(low + t)
        t = np.uint32(t + _LANE32)
        t = np.uint32((t ^ (t >> _16)) * _M1)
        t = np.uint32((t ^ (t >> _15)) * _M2)
        high = np.uint32(high + (t ^ (t >> _16)))
    return (np.uint64(high) << np.uint64(32)) | np.uint64(low)


@kernel()
def hash_runs(flat, starts, run):
    """The same of runs of ``run`` words that begin at the word indices ``starts``."""
    low = np.uint32(0)
    high = np.uint32(0)
    for k in range(starts.size):
        lanes = hash_words(flat[k * run : (k + 1) * run], starts[k])
        low = np.uint32(low + np.uint32(lanes & np.uint64(0xFFFFFFFF)))
        high = np.uint32(high + np.uint32(lanes >> np.uint64(32)))
    return (np.uint64(high) << np.uint64(32)) | np.uint64(low)

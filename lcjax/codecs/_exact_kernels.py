"""Numba side of the exact codec: integer maps and byte planes."""

import numpy as np

from lcjax._numba import kernel


@kernel()
def rotate(bits, out):
    """Rotates each word left by one bit."""
    top = bits.itemsize * 8 - 1
    for k in range(bits.size):
        b = np.uint64(bits[k])
        out[k] = (b << np.uint64(1)) | (b >> np.uint64(top))


@kernel()
def unrotate(bits):
    """Undoes ``rotate`` in place."""
    top = np.uint64(bits.itemsize * 8 - 1)
    for k in range(bits.size):
        b = np.uint64(bits[k])
        bits[k] = (b >> np.uint64(1)) | ((b & np.uint64(1)) << top)


@kernel()
def difference(bits, base, out, is_float):
    """Zigzag of ``ordered(bits) - ordered(base)`` modulo 2^width."""
    width = np.uint64(bits.itemsize * 8)
    sign = np.uint64(1) << (width - np.uint64(1))
    mask = sign | (sign - np.uint64(1))
    for k in range(bits.size):
        a = np.uint64(bits[k])
        b = np.uint64(base[k])
        if is_float:
            # Flipping all bits of negatives and the sign of positives orders the floats.
            a = (a ^ mask) if a & sign else (a | sign)
            b = (b ^ mask) if b & sign else (b | sign)
        d = (a - b) & mask
        negative = (d & sign) != np.uint64(0)
        d = (d << np.uint64(1)) & mask
        out[k] = (d ^ mask) if negative else d


@kernel()
def undo_difference(bits, base, is_float):
    """Inverse of ``difference``, in place."""
    width = np.uint64(bits.itemsize * 8)
    sign = np.uint64(1) << (width - np.uint64(1))
    mask = sign | (sign - np.uint64(1))
    for k in range(bits.size):
        d = np.uint64(bits[k])
        b = np.uint64(base[k])
        if is_float:
            b = (b ^ mask) if b & sign else (b | sign)
        d = (d ^ mask) >> np.uint64(1) | sign if d & np.uint64(1) else d >> np.uint64(1)
        a = (b + d) & mask
        if is_float:
            a = (a ^ sign) if a & sign else (a ^ mask)
        bits[k] = a


@kernel()
def split_planes(words, planes):
    """Byte ``p`` of word ``k`` goes to ``planes[p, k]``."""
    # Plane by plane in blocks: the words of a block stay in cache while every plane of it
    # is written as one run, which the compiler vectorizes.
    block = 4096
    for start in range(0, words.size, block):
        stop = min(start + block, words.size)
        for p in range(planes.shape[0]):
            shift = np.uint64(8 * p)
            for k in range(start, stop):
                planes[p, k] = np.uint8((np.uint64(words[k]) >> shift) & np.uint64(0xFF))


@kernel()
def join_planes(planes, words):
    """Inverse of ``split_planes``."""
    block = 4096
    for start in range(0, words.size, block):
        stop = min(start + block, words.size)
        for k in range(start, stop):
            words[k] = planes[0, k]
        for p in range(1, planes.shape[0]):
            shift = np.uint64(8 * p)
            for k in range(start, stop):
                words[k] = np.uint64(words[k]) | (np.uint64(planes[p, k]) << shift)

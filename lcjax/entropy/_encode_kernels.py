# mypy: allow-untyped-defs, no-check-untyped-defs
"""Kernels that encode: histograms, word trees, token counts, and the bits of one block.

The shape of each hot loop follows `_decode_kernels`: independent streams side by side, eight-byte
loads and stores, and no test that can be moved out of the loop.
"""

import numpy as np
from numba import types

from ._jit import (
    BYTES,
    I32,
    I64,
    U8,
    U32,
    at,
    floor_log2,
    i64,
    inline,
    kernel,
    load64,
    store64,
    trailing_zeros,
    u64,
)

_1 = np.uint64(1)
_4 = np.uint64(4)
_8 = np.uint64(8)
_15 = np.uint64(15)
_16 = np.uint64(16)
_24 = np.uint64(24)
_255 = np.uint64(255)
_LEAF = np.uint64(4095)
_65535 = np.uint64(65535)
_CODES = np.uint64(0xFFFFFF)
_SPLAT = np.uint64(0x0101010101010101)
_LOW7 = np.uint64(0x7F7F7F7F7F7F7F7F)
_GATHER = np.uint64(0x0102040810204080)


@kernel(i64(BYTES, I64))
def histogram(symbols, counts):
    """Add the number of occurrences of each byte to `counts`, shape (256,)."""
    n = np.int64(symbols.shape[0])
    # Four tables: consecutive equal symbols would wait for the store of the count before.
    part = np.zeros((4, 256), np.int64)
    wide = n - 8
    i = np.int64(0)
    while i <= wide:
        w = load64(symbols, i)
        if w == (w >> _8) | (w << np.uint64(56)):
            # Eight equal symbols: the common case of nearly constant data.
            part[0, np.uint8(w & _255)] += 8
        else:
            for _half in range(2):
                part[0, np.uint8(w & _255)] += 1
                part[1, np.uint8((w >> _8) & _255)] += 1
                part[2, np.uint8((w >> np.uint64(16)) & _255)] += 1
                part[3, np.uint8((w >> np.uint64(24)) & _255)] += 1
                w >>= np.uint64(32)
        i += 8
    while i < n:
        counts[symbols[i]] += 1
        i += 1
    for s in range(256):
        counts[s] += part[0, s] + part[1, s] + part[2, s] + part[3, s]
    return n


@kernel(i64(BYTES, types.uint8, I64))
def value_range(symbols, offset, found):
    """Smallest and largest of `symbols - offset` (mod 256), into `found[0:2]`."""
    # Plain 8-bit minima and maxima: LLVM turns the loop into vector code at memory speed.
    low = np.uint8(255)
    high = np.uint8(0)
    for i in range(symbols.shape[0]):
        value = np.uint8(symbols[i] - offset)
        low = min(low, value)
        high = max(high, value)
    found[0] = low
    found[1] = high
    return np.int64(0)


@kernel(i64(I64, I64, u64))
def entropy_bits_of(counts, present, total):
    """Order-0 entropy of a stream with these counts, in whole bits; integers only.

    Integers make the choices that depend on it the same on every machine.
    """
    # log2 by repeated squaring of a 32-bit mantissa, 16 binary digits.
    result = np.int64(0)
    for s in range(present.shape[0] + 1):
        value = total if s == present.shape[0] else np.uint64(counts[present[s]])
        whole = floor_log2(value)
        mantissa = (value << np.uint64(63 - whole)) >> np.uint64(32)
        digits = whole
        for _ in range(16):
            mantissa = (mantissa * mantissa) >> np.uint64(31)
            digits <<= 1
            if mantissa >> np.uint64(32):
                digits |= 1
                mantissa >>= _1
        # Whole bits and fraction apart, so that large counts do not overflow.
        if s == present.shape[0]:
            result += np.int64(total >> np.uint64(16)) * digits + (
                (np.int64(total & np.uint64(65535)) * digits) >> 16
            )
        else:
            result -= np.int64(value >> np.uint64(16)) * digits + (
                (np.int64(value & np.uint64(65535)) * digits) >> 16
            )
    return result


@kernel(i64(I64, i64, i64, i64, i64, I32, I32, I32))
def grow_tree(counts, run, after_run, target, total, first_child, leaf, shape):
    """Grow a word tree towards `target` leaves by splitting the most probable leaf.

    Only words of the form "run symbol z times, then at most `after_run` symbols" are made, so that
    the encoder finds a word with one lookup by z and the symbols after it.

    `counts` are those of the alphabet's symbols, `run` the index of the run symbol. Fills
    `first_child` (-1 for a leaf; child c of node x is `first_child[x] + c`), `leaf` (the leaf's
    number in preorder), and `shape[0:2]` (nodes, leaves). Returns the number of leaves.
    """
    n = np.int64(counts.shape[0])
    size = first_child.shape[0]
    chance = np.zeros(n, np.uint64)
    for c in range(n):
        # 31-bit fixed point; a symbol that occurs never has chance zero.
        scaled = np.uint64(counts[c])
        whole = np.uint64(total)
        while whole >> np.uint64(32):
            whole >>= _1
            scaled >>= _1
        chance[c] = max((scaled << np.uint64(31)) // whole, _1)
    weight = np.zeros(size, np.uint64)
    depth = np.zeros(size, np.int64)
    after = np.zeros(size, np.int64)
    first_child[0] = -1
    weight[0] = _1 << np.uint64(31)
    nodes = 1
    leaves = 1
    while leaves == 1 or (leaves + n - 1 <= target and nodes + n <= size):
        best = -1
        for x in range(nodes):
            if (
                first_child[x] < 0
                and depth[x] < 8
                and after[x] < after_run
                and (best < 0 or weight[x] > weight[best])
            ):
                best = x
        if best < 0:
            break
        first_child[best] = nodes
        for c in range(n):
            first_child[nodes] = -1
            weight[nodes] = (weight[best] * chance[c]) >> np.uint64(31)
            depth[nodes] = depth[best] + 1
            after[nodes] = 0 if c == run and after[best] == 0 else after[best] + 1
            nodes += 1
        leaves += n - 1
    # Number the leaves in preorder.
    stack = np.zeros(9, np.int64)
    child = np.zeros(9, np.int64)
    level = 0
    number = 0
    while level >= 0:
        if child[level] == n:
            level -= 1
            continue
        x = first_child[stack[level]] + child[level]
        child[level] += 1
        if first_child[x] < 0:
            leaf[x] = number
            number += 1
        else:
            level += 1
            stack[level] = x
            child[level] = 0
    shape[0] = nodes
    shape[1] = leaves
    return np.int64(leaves)


@kernel(i64(I32, I32, U8, i64, U8))
def write_tree(first_child, leaf, lengths, n, nibbles):
    """The nibbles of a tree in preorder; returns their number (at most one a node, plus one)."""
    stack = np.zeros(9, np.int64)
    child = np.zeros(9, np.int64)
    level = 0
    k = 0
    unused = 0
    while True:
        length = np.int64(-1)
        internal = False
        if child[level] < n:
            x = first_child[stack[level]] + child[level]
            child[level] += 1
            if first_child[x] < 0:
                length = np.int64(lengths[leaf[x]])
            else:
                internal = True
                level += 1
                stack[level] = x
                child[level] = 0
        elif level > 0:
            level -= 1
            continue
        if length == 0 and unused < 18:
            unused += 1
            continue
        if unused >= 3:
            nibbles[k] = 14
            nibbles[k + 1] = unused - 3
            k += 2
        else:
            for _ in range(unused):
                nibbles[k] = 0
                k += 1
        unused = 1 if length == 0 else 0
        if length > 0:
            nibbles[k] = length
            k += 1
        elif internal:
            nibbles[k] = 15
            k += 1
        elif length < 0:
            return np.int64(k)


@kernel(i64(U8, i64, U8))
def write_tokens(lengths, value_classes, nibbles):
    """The nibbles of the run tokens' lengths, up to the last one used; returns their number."""
    k = 0
    unused = 0
    for run_class in range(32):
        for value_class in range(value_classes):
            length = lengths[16 * run_class + value_class]
            if length == 0:
                unused += 1
                continue
            while unused > 0:
                if unused >= 3:
                    nibbles[k] = 14
                    nibbles[k + 1] = min(unused, 18) - 3
                    k += 2
                    unused -= min(unused, 18)
                else:
                    nibbles[k] = 0
                    k += 1
                    unused -= 1
            nibbles[k] = length
            k += 1
    return np.int64(k)


@kernel(i64(I32, I32, U8, i64, i64, U32, U32))
def build_parse_table(first_child, leaf, child_of, run, after_run, payload, table):
    """The encoder's table: from (run length z, packed symbols after it) to a word.

    `child_of[v]` is the alphabet index of the symbol whose kept low bits are v, or 255. Entry:
    `payload` of the leaf (24 bits) | symbols of the word << 24.
    """
    bits = 8 if after_run == 1 else (4 if after_run == 2 else 3)
    low = (1 << bits) - 1
    for z in range(9):
        for packed in range(512):
            x = np.int64(0)
            size = 0
            good = True
            while first_child[x] >= 0:
                if size < z:
                    c = run
                else:
                    # The first symbol after the run is packed highest.
                    k = after_run - 1 - (size - z)
                    c = np.int64(child_of[(packed >> (bits * k)) & low]) if k >= 0 else 255
                    if c == 255:
                        good = False
                        break
                x = first_child[x] + c
                size += 1
            if good:
                table[512 * z + packed] = np.int64(payload[leaf[x]]) | (size << 24)
            else:
                # Not reached by symbols of the alphabet; one symbol long, to be safe.
                table[512 * z + packed] = 1 << 24
    return np.int64(0)


@inline
def _window(symbols, o, stop, splat):
    """Eight symbols from `o`; those from `stop` on are the run symbol."""
    if o + 8 <= stop:
        return load64(symbols, o)
    value = splat
    for k in range(stop - o):
        shift = np.uint64(8 * k)
        value = (value & ~(_255 << shift)) | (np.uint64(symbols[o + k]) << shift)
    return value


@inline
def _word_at(w, splat, mask, factor, table):
    """The parse table's entry of the word that the eight symbols `w` begin with."""
    # Trailing zero bytes of the XOR are the run. For a run of 8 the shift count wraps to 0 and the
    # packed symbols are arbitrary: all entries of z = 8 are the same.
    zeros = np.uint64(trailing_zeros(w ^ splat)) & np.uint64(0x78)
    y = w >> (zeros & np.uint64(63))
    # The product brings the kept bits of up to three bytes side by side at bit 16: see
    # `_encoder._PACKING`.
    packed = (((y & mask) * factor) >> np.uint64(16)) & np.uint64(511)
    return np.uint64(at(table, (zeros << np.uint64(6)) | packed))


@kernel(i64(BYTES, I64, i64, i64, u64, u64, U32, I64))
def count_words(symbols, stops, streams, run, mask, factor, table, counts):
    """Add the number of uses of each leaf to `counts`, shape (4096,)."""
    splat = np.uint64(run) * _SPLAT
    # Neighbouring words are often equal: streams add to two tables in turn.
    part = np.zeros((2, 4096), np.uint32)
    q = stops[:streams].copy()
    if streams == 8:
        # As in `encode_words`.
        while True:
            rounds = stops[1] - q[0]
            for s in range(8):
                rounds = min(rounds, stops[s + 1] - q[s])
            rounds >>= 3
            if rounds <= 0:
                break
            a, b, c, d = q[0], q[1], q[2], q[3]
            i, j, k, n = q[4], q[5], q[6], q[7]
            for _ in range(rounds):
                e = _word_at(load64(symbols, a), splat, mask, factor, table)
                a += np.int64(e >> _24)
                part[0, e & _LEAF] += np.uint32(1)
                e = _word_at(load64(symbols, b), splat, mask, factor, table)
                b += np.int64(e >> _24)
                part[1, e & _LEAF] += np.uint32(1)
                e = _word_at(load64(symbols, c), splat, mask, factor, table)
                c += np.int64(e >> _24)
                part[0, e & _LEAF] += np.uint32(1)
                e = _word_at(load64(symbols, d), splat, mask, factor, table)
                d += np.int64(e >> _24)
                part[1, e & _LEAF] += np.uint32(1)
                e = _word_at(load64(symbols, i), splat, mask, factor, table)
                i += np.int64(e >> _24)
                part[0, e & _LEAF] += np.uint32(1)
                e = _word_at(load64(symbols, j), splat, mask, factor, table)
                j += np.int64(e >> _24)
                part[1, e & _LEAF] += np.uint32(1)
                e = _word_at(load64(symbols, k), splat, mask, factor, table)
                k += np.int64(e >> _24)
                part[0, e & _LEAF] += np.uint32(1)
                e = _word_at(load64(symbols, n), splat, mask, factor, table)
                n += np.int64(e >> _24)
                part[1, e & _LEAF] += np.uint32(1)
            q[0], q[1], q[2], q[3] = a, b, c, d
            q[4], q[5], q[6], q[7] = i, j, k, n
    for s in range(streams):
        o = q[s]
        while o < stops[s + 1]:
            w = _window(symbols, o, stops[s + 1], splat)
            e = _word_at(w, splat, mask, factor, table)
            part[0, e & _LEAF] += np.uint32(1)
            o += np.int64(e >> _24)
    for s in range(4096):
        counts[s] += np.int64(part[0, s]) + np.int64(part[1, s])
    return np.int64(0)


@inline
def _pack(entries, first, count, out, a, buffer, held):
    """Append the codes of `entries[first : first + count]`; returns the new end and bit buffer.

    An entry holds a code (16) | its length (8) | anything. `held` is at most 7.
    """
    wide = count & ~3
    k = np.int64(0)
    while k < wide:
        # Four codes of at most 12 bits and 7 bits left over fit 64. Joining them in pairs first
        # shortens the chain through the bit buffer.
        e = np.uint64(at(entries, np.uint64(first + k)))
        f = np.uint64(at(entries, np.uint64(first + k + 1)))
        g = np.uint64(at(entries, np.uint64(first + k + 2)))
        h = np.uint64(at(entries, np.uint64(first + k + 3)))
        le = (e >> _16) & _255
        lg = (g >> _16) & _255
        low = (e & _65535) | ((f & _65535) << le)
        high = (g & _65535) | ((h & _65535) << lg)
        le += (f >> _16) & _255
        lg += (h >> _16) & _255
        buffer |= (low | (high << le)) << held
        held += le + lg
        store64(out, a, buffer)
        a += np.int64(held >> np.uint64(3))
        buffer >>= held & np.uint64(0x38)
        held &= np.uint64(7)
        k += 4
    while k < count:
        e = np.uint64(at(entries, np.uint64(first + k)))
        buffer |= (e & _65535) << held
        held += (e >> _16) & _255
        store64(out, a, buffer)
        a += np.int64(held >> np.uint64(3))
        buffer >>= held & np.uint64(0x38)
        held &= np.uint64(7)
        k += 1
    return a, buffer, held


@kernel(i64(BYTES, I64, i64, i64, u64, u64, U32, U8, I64, I64))
def encode_words(symbols, stops, streams, run, mask, factor, table, out, begins, sizes):
    """Encode one block of words.

    Stream j takes `symbols[stops[j]:stops[j + 1]]` and is written from `out[begins[j]]`, where the
    caller has left 12 bits a symbol and 16 bytes; `sizes[j]` gets its bytes.
    """
    splat = np.uint64(run) * _SPLAT
    q = stops[:streams].copy()
    p = begins[:streams].copy()
    buffers = np.zeros(8, np.uint64)
    held = np.zeros(8, np.uint64)
    if streams == 8:
        # Each word's position depends on the one before, a chain of about 25 cycles: eight streams
        # are parsed side by side, and into a buffer in the first-level cache, for parsing and bit
        # packing together need more registers than there are. As in the decoder, the number of
        # rounds that stay inside needs no test in the loop: a round is one word, at most 8 symbols.
        buffer = np.empty(8 * 256, np.uint32)
        while True:
            rounds = np.int64(256)
            for s in range(8):
                rounds = min(rounds, (stops[s + 1] - q[s]) >> 3)
            if rounds <= 0:
                break
            a, b, c, d = q[0], q[1], q[2], q[3]
            i, j, k, n = q[4], q[5], q[6], q[7]
            for r in range(rounds):
                e = _word_at(load64(symbols, a), splat, mask, factor, table)
                a += np.int64(e >> _24)
                buffer[r] = e
                e = _word_at(load64(symbols, b), splat, mask, factor, table)
                b += np.int64(e >> _24)
                buffer[256 + r] = e
                e = _word_at(load64(symbols, c), splat, mask, factor, table)
                c += np.int64(e >> _24)
                buffer[512 + r] = e
                e = _word_at(load64(symbols, d), splat, mask, factor, table)
                d += np.int64(e >> _24)
                buffer[768 + r] = e
                e = _word_at(load64(symbols, i), splat, mask, factor, table)
                i += np.int64(e >> _24)
                buffer[1024 + r] = e
                e = _word_at(load64(symbols, j), splat, mask, factor, table)
                j += np.int64(e >> _24)
                buffer[1280 + r] = e
                e = _word_at(load64(symbols, k), splat, mask, factor, table)
                k += np.int64(e >> _24)
                buffer[1536 + r] = e
                e = _word_at(load64(symbols, n), splat, mask, factor, table)
                n += np.int64(e >> _24)
                buffer[1792 + r] = e
            q[0], q[1], q[2], q[3] = a, b, c, d
            q[4], q[5], q[6], q[7] = i, j, k, n
            for s in range(8):
                p[s], buffers[s], held[s] = _pack(
                    buffer, 256 * s, rounds, out, p[s], buffers[s], held[s]
                )
    total = np.int64(0)
    for s in range(streams):
        o = q[s]
        a = p[s]
        A = buffers[s]
        ha = held[s]
        while o < stops[s + 1]:
            w = _window(symbols, o, stops[s + 1], splat)
            e = _word_at(w, splat, mask, factor, table)
            A |= (e & _65535) << ha
            ha += (e >> _16) & _255
            o += np.int64(e >> _24)
            store64(out, a, A)
            a += np.int64(ha >> np.uint64(3))
            A >>= ha & np.uint64(0x38)
            ha &= np.uint64(7)
        sizes[s] = a - begins[s] + np.int64((ha + np.uint64(7)) >> np.uint64(3))
        total += sizes[s]
    return total


@inline
def _pair(w):
    """Index of the pair of symbols `w` (16 bits) in the table of pairs."""
    # Rows of 272 instead of 256: with a power of two the rows of neighbouring symbols would compete
    # for the same few sets of the cache.
    return w + ((w >> _8) << _4)


@kernel(i64(U32, U32))
def build_pair_table(single, pairs):
    """From two symbols (the first one low) to both codes: code (24) | bits << 24."""
    for second in range(256):
        f = np.uint64(single[second])
        for first in range(256):
            e = np.uint64(single[first])
            length = e >> _16
            code = (e & _65535) | ((f & _65535) << length)
            pairs[272 * second + first] = code | ((length + (f >> _16)) << _24)
    return np.int64(0)


@kernel(i64(BYTES, I64, i64, U32, U32, U8, I64, I64))
def encode_single(symbols, stops, streams, table, pairs, out, begins, sizes):
    """Encode one block symbol by symbol; as `encode_words`, for trees of depth 1.

    `table` has an entry a symbol: code, first bit lowest (16) | code length << 16. `pairs` is
    empty, or what `build_pair_table` makes of it.
    """
    total = np.int64(0)
    for s in range(streams):
        o = stops[s]
        # Loads do not depend on each other here, so one stream at a time is enough. Two symbols a
        # lookup: of the table of all pairs only the frequent ones are touched.
        wide = stops[s + 1] - 8 if pairs.shape[0] == 272 * 256 else np.int64(-1)
        a = begins[s]
        A = np.uint64(0)
        ha = np.uint64(0)
        while o <= wide:
            w = load64(symbols, o)
            e = np.uint64(at(pairs, _pair(w & _65535)))
            f = np.uint64(at(pairs, _pair((w >> _16) & _65535)))
            g = np.uint64(at(pairs, _pair((w >> np.uint64(32)) & _65535)))
            h = np.uint64(at(pairs, _pair(w >> np.uint64(48))))
            le = e >> _24
            lg = g >> _24
            first = (e & _CODES) | ((f & _CODES) << le)
            second = (g & _CODES) | ((h & _CODES) << lg)
            le += f >> _24
            lg += h >> _24
            A |= first << ha
            ha += le
            store64(out, a, A)
            a += np.int64(ha >> np.uint64(3))
            A >>= ha & np.uint64(0x38)
            ha &= np.uint64(7)
            A |= second << ha
            ha += lg
            store64(out, a, A)
            a += np.int64(ha >> np.uint64(3))
            A >>= ha & np.uint64(0x38)
            ha &= np.uint64(7)
            o += 8
        while o < stops[s + 1]:
            e = np.uint64(table[symbols[o]])
            A |= (e & _65535) << ha
            ha += e >> _16
            store64(out, a, A)
            a += np.int64(ha >> np.uint64(3))
            A >>= ha & np.uint64(0x38)
            ha &= np.uint64(7)
            o += 1
        sizes[s] = a - begins[s] + np.int64((ha + np.uint64(7)) >> np.uint64(3))
        total += sizes[s]
    return total


@inline
def _others(symbols, o, stop, splat, events):
    """Where `symbols[o:stop]` differ from the run symbol, relative to o; returns their number.

    At most 4096 symbols; `events` has 4096 + 8 entries.
    """
    found = np.int64(0)
    base = o
    while o + 64 <= stop:
        a = load64(symbols, o) ^ splat
        b = load64(symbols, o + 8) ^ splat
        c = load64(symbols, o + 16) ^ splat
        d = load64(symbols, o + 24) ^ splat
        e = load64(symbols, o + 32) ^ splat
        f = load64(symbols, o + 40) ^ splat
        g = load64(symbols, o + 48) ^ splat
        h = load64(symbols, o + 56) ^ splat
        if (a | b | c | d) | (e | f | g | h):
            # One bit a byte. Four positions are stored whether they exist or not: their number is
            # hard to predict, and a wrong guess costs more than four stores.
            left = (
                _nonzero(a)
                | (_nonzero(b) << _8)
                | (_nonzero(c) << _16)
                | (_nonzero(d) << _24)
                | (_nonzero(e) << np.uint64(32))
                | (_nonzero(f) << np.uint64(40))
                | (_nonzero(g) << np.uint64(48))
                | (_nonzero(h) << np.uint64(56))
            )
            at_most = found
            for k in range(4):
                events[at_most + k] = o - base + trailing_zeros(left)
                found += np.int64(left != 0)
                left &= left - _1
            at_most += 4
            while left:
                events[at_most] = o - base + trailing_zeros(left)
                at_most += 1
                found += 1
                left &= left - _1
        o += 64
    while o < stop:
        if np.uint64(symbols[o]) != splat & _255:
            events[found] = o - base
            found += 1
        o += 1
    return found


@inline
def _nonzero(w):
    """Bit k of the result says whether byte k of w is not zero."""
    # Adding 127 to seven bits carries into the eighth unless they are zero; the product collects
    # the eight flags in the top byte.
    flags = (((w & _LOW7) + _LOW7) | w) & ~_LOW7
    return ((flags >> np.uint64(7)) * _GATHER) >> np.uint64(56)


@kernel(i64(BYTES, I64, i64, i64, U8, I64))
def count_runs(symbols, stops, streams, run, ranks, counts):
    """Add the number of uses of each run token to `counts`, shape (512,)."""
    splat = np.uint64(run) * _SPLAT
    events = np.empty(4096 + 8, np.uint32)
    token_of = np.zeros(256, np.int64)
    for v in range(256):
        r = np.int64(ranks[v])
        token_of[v] = r if r < 8 else 7 + floor_log2(np.uint64(r - 6))
    for s in range(streams):
        o = stops[s]
        stop = stops[s + 1]
        begin = o  # of the run
        while o < stop:
            found = _others(symbols, o, min(o + 4096, stop), splat, events)
            for x in range(found):
                end = o + np.int64(events[x])
                run_class = floor_log2(np.uint64(end - begin + 1))
                counts[16 * run_class + token_of[symbols[end]]] += 1
                begin = end + 1
            o += 4096
        if begin < stop:
            counts[16 * floor_log2(np.uint64(stop - begin + 1))] += 1
    return np.int64(0)


@kernel(i64(BYTES, I64, i64, i64, U8, U32, U8, I64, I64))
def encode_runs(symbols, stops, streams, run, ranks, table, out, begins, sizes):
    """Encode one block of run tokens; as `encode_words`.

    `table` has an entry a token, as in `encode_single`. The caller has left 19 bits a symbol and
    16 bytes a stream.
    """
    splat = np.uint64(run) * _SPLAT
    events = np.empty(4096 + 8, np.uint32)
    # Per symbol: value class (8) | extra bits (8) | their value (8).
    value_of = np.zeros(256, np.uint64)
    for v in range(256):
        r = np.int64(ranks[v])
        if r < 8:
            value_of[v] = r
        else:
            extra = floor_log2(np.uint64(r - 6))
            value_of[v] = (7 + extra) | (extra << 8) | ((r - 6 - (1 << extra)) << 16)
    total = np.int64(0)
    for s in range(streams):
        o = stops[s]
        stop = stops[s + 1]
        begin = o  # of the run
        a = begins[s]
        A = np.uint64(0)
        ha = np.uint64(0)
        while begin < stop:
            found = np.int64(0)
            if o < stop:
                found = _others(symbols, o, min(o + 4096, stop), splat, events)
            else:
                # A run ends the stream: as if the value of rank 0 came after it.
                events[0] = stop - o
                found = 1
            for x in range(found):
                end = o + np.int64(events[x])
                value = value_of[symbols[end]] if end < stop else np.uint64(0)
                length = np.uint64(end - begin + 1)
                run_class = np.uint64(floor_log2(length))
                e = np.uint64(at(table, (run_class << _4) | (value & _15)))
                # Code, run and value together are at most 50 bits, beside 7 left over.
                A |= (e & _65535) << ha
                ha += e >> _16
                A |= (length ^ (_1 << run_class)) << ha
                ha += run_class
                A |= (value >> _16) << ha
                ha += (value >> _8) & _255
                store64(out, a, A)
                a += np.int64(ha >> np.uint64(3))
                A >>= ha & np.uint64(0x38)
                ha &= np.uint64(7)
                begin = end + 1
            o = min(o + 4096, stop)
        sizes[s] = a - begins[s] + np.int64((ha + np.uint64(7)) >> np.uint64(3))
        total += sizes[s]
    return total

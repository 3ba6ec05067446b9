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
    part = np.zeros((4, 4096), np.uint32)
    q = stops[:5].copy()
    if streams == 4:
        i, j, k, n = q[0], q[1], q[2], q[3]
        while True:
            rounds = min(min(stops[1] - i, stops[2] - j), min(stops[3] - k, stops[4] - n)) >> 3
            if rounds <= 0:
                break
            for _ in range(rounds):
                e = _word_at(load64(symbols, i), splat, mask, factor, table)
                f = _word_at(load64(symbols, j), splat, mask, factor, table)
                g = _word_at(load64(symbols, k), splat, mask, factor, table)
                h = _word_at(load64(symbols, n), splat, mask, factor, table)
                part[0, e & _LEAF] += np.uint32(1)
                part[1, f & _LEAF] += np.uint32(1)
                part[2, g & _LEAF] += np.uint32(1)
                part[3, h & _LEAF] += np.uint32(1)
                i += np.int64(e >> _24)
                j += np.int64(f >> _24)
                k += np.int64(g >> _24)
                n += np.int64(h >> _24)
        q[0], q[1], q[2], q[3] = i, j, k, n
    for s in range(streams):
        o = q[s]
        while o < stops[s + 1]:
            w = _window(symbols, o, stops[s + 1], splat)
            e = _word_at(w, splat, mask, factor, table)
            part[0, e & _LEAF] += np.uint32(1)
            o += np.int64(e >> _24)
    for s in range(4096):
        total = np.int64(0)
        for p in range(4):
            total += np.int64(part[p, s])
        counts[s] += total
    return np.int64(0)


@kernel(i64(BYTES, I64, i64, i64, u64, u64, U32, U8, I64, I64))
def encode_words(symbols, stops, streams, run, mask, factor, table, out, begins, sizes):
    """Encode one block of words.

    Stream j takes `symbols[stops[j]:stops[j + 1]]` and is written from `out[begins[j]]`, where the
    caller has left 12 bits a symbol and 16 bytes; `sizes[j]` gets its bytes.
    """
    splat = np.uint64(run) * _SPLAT
    q = stops[:5].copy()
    p = begins[:4].copy()
    buffers = np.zeros(4, np.uint64)
    held = np.zeros(4, np.uint64)
    if streams == 4:
        i, j, k, n = q[0], q[1], q[2], q[3]
        a, b, c, d = p[0], p[1], p[2], p[3]
        A = B = C = D = np.uint64(0)
        ha = hb = hc = hd = np.uint64(0)
        # As in the decoder: four codes of at most 12 bits and 7 bits left over fit 64, and rounds
        # of four words, at most 32 symbols, need no test of the bounds.
        while True:
            rounds = min(min(stops[1] - i, stops[2] - j), min(stops[3] - k, stops[4] - n)) >> 5
            if rounds <= 0:
                break
            for _ in range(rounds):
                for _step in range(4):
                    e = _word_at(load64(symbols, i), splat, mask, factor, table)
                    A |= (e & _65535) << ha
                    ha += (e >> _16) & _255
                    i += np.int64(e >> _24)
                    e = _word_at(load64(symbols, j), splat, mask, factor, table)
                    B |= (e & _65535) << hb
                    hb += (e >> _16) & _255
                    j += np.int64(e >> _24)
                    e = _word_at(load64(symbols, k), splat, mask, factor, table)
                    C |= (e & _65535) << hc
                    hc += (e >> _16) & _255
                    k += np.int64(e >> _24)
                    e = _word_at(load64(symbols, n), splat, mask, factor, table)
                    D |= (e & _65535) << hd
                    hd += (e >> _16) & _255
                    n += np.int64(e >> _24)
                store64(out, a, A)
                store64(out, b, B)
                store64(out, c, C)
                store64(out, d, D)
                a += np.int64(ha >> np.uint64(3))
                b += np.int64(hb >> np.uint64(3))
                c += np.int64(hc >> np.uint64(3))
                d += np.int64(hd >> np.uint64(3))
                A >>= ha & np.uint64(0x38)
                B >>= hb & np.uint64(0x38)
                C >>= hc & np.uint64(0x38)
                D >>= hd & np.uint64(0x38)
                ha &= np.uint64(7)
                hb &= np.uint64(7)
                hc &= np.uint64(7)
                hd &= np.uint64(7)
        q[0], q[1], q[2], q[3] = i, j, k, n
        p[0], p[1], p[2], p[3] = a, b, c, d
        buffers[0], buffers[1], buffers[2], buffers[3] = A, B, C, D
        held[0], held[1], held[2], held[3] = ha, hb, hc, hd
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


@kernel(i64(U32, U32))
def build_pair_table(single, pairs):
    """From two symbols (the first one low) to both codes: code (24) | bits << 24."""
    for second in range(256):
        f = np.uint64(single[second])
        for first in range(256):
            e = np.uint64(single[first])
            length = e >> _16
            code = (e & _65535) | ((f & _65535) << length)
            pairs[256 * second + first] = code | ((length + (f >> _16)) << _24)
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
        # lookup: of the table of 65536 pairs only the frequent ones are touched.
        wide = stops[s + 1] - 8 if pairs.shape[0] == 65536 else np.int64(-1)
        a = begins[s]
        A = np.uint64(0)
        ha = np.uint64(0)
        while o <= wide:
            w = load64(symbols, o)
            e = np.uint64(at(pairs, w & _65535))
            f = np.uint64(at(pairs, (w >> _16) & _65535))
            g = np.uint64(at(pairs, (w >> np.uint64(32)) & _65535))
            h = np.uint64(at(pairs, w >> np.uint64(48)))
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
def _run_end(symbols, o, stop, splat):
    """The first position from `o` whose symbol is not the run symbol, or `stop`."""
    # Long runs: 32 bytes a step, one test for four words.
    while o + 32 <= stop:
        a = load64(symbols, o) ^ splat
        b = load64(symbols, o + 8) ^ splat
        c = load64(symbols, o + 16) ^ splat
        d = load64(symbols, o + 24) ^ splat
        if a:
            return o + (trailing_zeros(a) >> 3)
        if b | c | d:
            break
        o += 32
    while o + 8 <= stop:
        a = load64(symbols, o) ^ splat
        if a:
            return o + (trailing_zeros(a) >> 3)
        o += 8
    while o < stop and np.uint64(symbols[o]) == splat & _255:
        o += 1
    return o


@kernel(i64(BYTES, I64, i64, i64, U8, I64))
def count_runs(symbols, stops, streams, run, ranks, counts):
    """Add the number of uses of each run token to `counts`, shape (512,)."""
    splat = np.uint64(run) * _SPLAT
    token_of = np.zeros(256, np.int64)
    for v in range(256):
        r = np.int64(ranks[v])
        token_of[v] = r if r < 8 else 7 + floor_log2(np.uint64(r - 6))
    for s in range(streams):
        o = stops[s]
        stop = stops[s + 1]
        while o < stop:
            end = _run_end(symbols, o, stop, splat)
            run_class = floor_log2(np.uint64(end - o + 1))
            value_class = token_of[symbols[end]] if end < stop else 0
            counts[16 * run_class + value_class] += 1
            o = end + 1
    return np.int64(0)


@kernel(i64(BYTES, I64, i64, i64, U8, U32, U8, I64, I64))
def encode_runs(symbols, stops, streams, run, ranks, table, out, begins, sizes):
    """Encode one block of run tokens; as `encode_words`.

    `table` has an entry a token, as in `encode_single`. The caller has left 19 bits a symbol and
    16 bytes a stream.
    """
    splat = np.uint64(run) * _SPLAT
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
        a = begins[s]
        A = np.uint64(0)
        ha = np.uint64(0)
        while o < stop:
            end = _run_end(symbols, o, stop, splat)
            length = np.uint64(end - o + 1)
            run_class = np.uint64(floor_log2(length))
            value = value_of[symbols[end]] if end < stop else np.uint64(0)
            e = np.uint64(at(table, (run_class << _4) | (value & _15)))
            # Code, run and value together are at most 50 bits, beside 7 left over.
            A |= (e & _65535) << ha
            ha += e >> _16
            A |= (length ^ (_1 << run_class)) << ha
            ha += run_class
            A |= (value >> np.uint64(16)) << ha
            ha += (value >> _8) & _255
            store64(out, a, A)
            a += np.int64(ha >> np.uint64(3))
            A >>= ha & np.uint64(0x38)
            ha &= np.uint64(7)
            o = end + 1
        sizes[s] = a - begins[s] + np.int64((ha + np.uint64(7)) >> np.uint64(3))
        total += sizes[s]
    return total

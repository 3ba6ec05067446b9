# mypy: allow-untyped-defs, no-check-untyped-defs
"""Kernels that decode: parse code tables, build lookup tables, decode one block.

The input is hostile. Kernels return a negative `status` (see `_decoder.STATUS`) instead of raising,
and stay inside their arrays whatever the bits are:

* reads of the input are eight bytes at `position <= len(data) - 8`, or byte by byte;
* a lookup index is masked below the table's fixed size, and a complete code (Kraft sum exactly 1)
  fills every entry up to the mask;
* writes go to the stream's own range of the output only.

A damaged stream may read the bits of its neighbours; it is found out at its end, which must be
reached exactly.
"""

import numpy as np

from ._jit import BYTES, I64, U8, U32, U64, at, fill, i64, inline, kernel, load64, store64

_1 = np.uint64(1)
_7 = np.uint64(7)
_255 = np.uint64(255)

# Negative results; the texts are in `_decoder.STATUS`.
TRUNCATED = -1
RESERVED = -2
TOO_DEEP = -3
TOO_LARGE = -4
KRAFT = -5
BAD_END = -6
BAD_RUN = -7
BAD_VALUE = -8
BAD_PADDING = -9
BAD_VARINT = -10


@inline
def _nibble(data, position, k):
    """Nibble `k` after byte `position` (low half first), -1 past the end."""
    byte = position + (k >> 1)
    if byte >= data.shape[0]:
        return np.int64(-1)
    return (np.int64(data[byte]) >> (4 * (k & 1))) & 15


@inline
def _nibbles_end(data, position, k):
    """The byte after `k` nibbles; an odd number must be padded with a zero."""
    if k & 1 and _nibble(data, position, k) != 0:
        return np.int64(BAD_PADDING)
    return position + ((k + 1) >> 1)


@kernel(i64(BYTES, i64, BYTES, U64, U8, U8, I64))
def parse_tree(data, position, alphabet, words, word_sizes, lengths, found):
    """Read a word tree in preorder; returns the position after it or a status.

    `words`, `word_sizes` and `lengths` have 4096 entries: more used leaves would exceed the Kraft
    sum, which is checked at each leaf before the leaf is stored. `found[0]` gets their number.
    """
    n = alphabet.shape[0]
    child = np.zeros(9, np.int64)
    prefix = np.zeros(9, np.uint64)
    depth = 0
    k = 0
    unused = 0
    leaves = 0
    kraft = 0
    nodes = 0
    while True:
        if child[depth] == n:
            if depth == 0:
                break
            depth -= 1
            child[depth] += 1
            continue
        nodes += 1
        if nodes > 65536:
            return np.int64(TOO_LARGE)
        if unused > 0:
            unused -= 1
            child[depth] += 1
            continue
        value = _nibble(data, position, k)
        k += 1
        if value < 0:
            return np.int64(TRUNCATED)
        if value == 14:
            # The next 3 + x nodes are unused leaves; this one is the first of them.
            x = _nibble(data, position, k)
            k += 1
            if x < 0:
                return np.int64(TRUNCATED)
            unused = x + 2
            child[depth] += 1
        elif value == 13:
            return np.int64(RESERVED)
        else:
            symbol = np.uint64(alphabet[child[depth]])
            word = prefix[depth] | (symbol << np.uint64(8 * depth))
            if value == 15:
                if depth == 7:
                    return np.int64(TOO_DEEP)
                depth += 1
                prefix[depth] = word
                child[depth] = 0
            else:
                if value > 0:
                    kraft += 1 << (12 - value)
                    if kraft > 4096:
                        return np.int64(KRAFT)
                    words[leaves] = word
                    word_sizes[leaves] = depth + 1
                    lengths[leaves] = value
                    leaves += 1
                child[depth] += 1
    if kraft != 4096 or unused > 0:
        return np.int64(KRAFT)
    found[0] = leaves
    return _nibbles_end(data, position, k)


@kernel(i64(BYTES, i64, i64, U8, I64))
def parse_tokens(data, position, value_classes, lengths, found):
    """Read the code lengths of run tokens until their Kraft sum is 1.

    `lengths` has 32 * 16 entries, token `16 * run class + value class`. Returns the position after
    the table or a status; `found[0]` gets the number of tokens with a code.
    """
    k = 0
    unused = 0
    kraft = 0
    used = 0
    for run_class in range(32):
        for value_class in range(value_classes):
            if kraft == 4096:
                break
            if unused > 0:
                unused -= 1
                continue
            value = _nibble(data, position, k)
            k += 1
            if value < 0:
                return np.int64(TRUNCATED)
            if value == 14:
                x = _nibble(data, position, k)
                k += 1
                if x < 0:
                    return np.int64(TRUNCATED)
                unused = x + 2
            elif value > 12:
                return np.int64(RESERVED)
            elif value > 0:
                kraft += 1 << (12 - value)
                if kraft > 4096:
                    return np.int64(KRAFT)
                lengths[16 * run_class + value_class] = value
                used += 1
    if kraft != 4096:
        return np.int64(KRAFT)
    found[0] = used
    return _nibbles_end(data, position, k)


@kernel(i64(BYTES, i64, I64))
def parse_varints(data, position, values):
    """Read as many varints as `values` holds; returns the position after them or a status."""
    for k in range(values.shape[0]):
        value = np.int64(0)
        shift = 0
        while True:
            if position >= data.shape[0]:
                return np.int64(TRUNCATED)
            byte = np.int64(data[position])
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                # One number has one spelling; nine bytes stay below 2**63.
                if byte == 0 and shift > 7:
                    return np.int64(BAD_VARINT)
                break
            if shift == 63:
                return np.int64(BAD_VARINT)
        values[k] = value
    return position


@inline
def _fill_codes(lengths, size, entries):
    """Write 1 + symbol to each table entry whose low bits are its code; returns the table's bits.

    The caller has checked that the code is complete, so every entry below `1 << bits` is written.
    """
    tally = np.zeros(14, np.int64)
    bits = 0
    for s in range(size):
        length = np.int64(lengths[s])
        if length > 0:
            tally[length] += 1
            bits = max(bits, length)
    next_code = np.zeros(14, np.int64)
    code = 0
    for length in range(2, 13):
        code = (code + tally[length - 1]) << 1
        next_code[length] = code
    for s in range(size):
        length = np.int64(lengths[s])
        if length > 0:
            code = next_code[length]
            next_code[length] += 1
            entry = 0
            for b in range(length):
                entry |= ((code >> b) & 1) << (length - 1 - b)
            while entry < (1 << bits):
                entries[entry] = s
                entry += 1 << length
    return bits


@kernel(i64(U64, U8, U8, i64, i64, U64, U32))
def build_word_table(words, word_sizes, lengths, leaves, several, table, meta):
    """Lookup tables for `decode_words`; returns the number of index bits.

    For each 12-bit (or shorter) window: `table` holds up to 8 symbols, `meta` their number and the
    bits of all codes that end within the window (`several`), and the same for the first code.
    Layout of meta: bits | symbols << 8 | first bits << 16 | first symbols << 24.
    """
    leaf = np.empty(4096, np.int32)
    bits = _fill_codes(lengths, leaves, leaf)
    for index in range(1 << bits):
        first = leaf[index]
        word = words[first]
        size = np.int64(word_sizes[first])
        used = np.int64(lengths[first])
        if several:
            while used < bits:
                # The bits above the window read as zero: a code found there is the right one
                # only if it ends within the window.
                following = leaf[index >> used]
                if used + lengths[following] > bits or size + word_sizes[following] > 8:
                    break
                word |= words[following] << np.uint64(8 * size)
                size += np.int64(word_sizes[following])
                used += np.int64(lengths[following])
        table[index] = word
        meta[index] = (
            used
            | (size << 8)
            | (np.int64(lengths[first]) << 16)
            | (np.int64(word_sizes[first]) << 24)
        )
    return bits


@inline
def _bits_at(data, bit, end):
    """At least 57 bits from position `bit`; bytes from `end` on read as zero."""
    byte = bit >> 3
    if byte + 8 <= end:
        value = load64(data, byte)
    else:
        value = np.uint64(0)
        for k in range(max(end - byte, 0)):
            value |= np.uint64(data[byte + k]) << np.uint64(8 * k)
    return value >> np.uint64(bit & 7)


@inline
def _ends_well(data, bit, end):
    """Whether a stream that used the bits below `bit` ends at byte `end`, with zero padding."""
    if (bit + 7) >> 3 != end:
        return False
    return (bit & 7) == 0 or (np.int64(data[end - 1]) >> (bit & 7)) == 0


@inline
def _word_stream(data, bit, end, out, o, stop, table, meta, mask):
    """Decode one stream from bit `bit` to `out[o:stop]`; returns a status."""
    last = np.int64(data.shape[0]) - 8
    while True:
        # As in `decode_words`: rounds that cannot leave input or output.
        rounds = min((stop - o) >> 5, (last - (bit >> 3)) // 6 + 1)
        if rounds <= 0:
            break
        for _ in range(rounds):
            w = load64(data, bit >> 3) >> np.uint64(bit & 7)
            for _step in range(4):
                m = np.int64(at(meta, w & mask))
                store64(out, o, at(table, w & mask))
                w >>= np.uint64(m & 255)
                bit += m & 255
                o += (m >> 8) & 255
    while o < stop:
        if bit > 8 * end:
            return np.int64(BAD_END)
        index = _bits_at(data, bit, end) & mask
        m = np.int64(at(meta, index))
        word = at(table, index)
        bit += (m >> 16) & 255
        # The last word of a stream may reach past its end.
        for _ in range(min(m >> 24, stop - o)):
            out[o] = np.uint8(word & _255)
            word >>= np.uint64(8)
            o += 1
    if not _ends_well(data, bit, end):
        return np.int64(BAD_END)
    return np.int64(0)


@kernel(i64(BYTES, I64, U8, I64, i64, U64, U32, i64))
def decode_words(data, starts, out, stops, streams, table, meta, table_bits):
    """Decode one block of the mode `words`; returns 0 or a status.

    Stream j reads `data[starts[j]:starts[j + 1]]` and fills `out[stops[j]:stops[j + 1]]`; the
    caller has checked that these ranges lie inside the arrays and do not decrease.
    """
    mask = (_1 << np.uint64(table_bits)) - _1
    for g in range(0, streams & ~3, 4):
        # Four streams at a time.
        a = starts[g] * 8
        i = stops[g]
        # A lookup waits for the shift by the previous one, about ten cycles; four independent
        # streams fill them. A 64-bit load holds at least 57 bits of the stream, enough for four
        # lookups of 12 bits. Each round uses at most 6 bytes and stores at most 32 symbols a
        # stream, so the number of rounds that stay within bounds is known before the loop, which
        # then needs no test at all.
        b = starts[g + 1] * 8
        c = starts[g + 2] * 8
        d = starts[g + 3] * 8
        j = stops[g + 1]
        k = stops[g + 2]
        n = stops[g + 3]
        last = np.int64(data.shape[0]) - 8
        while True:
            space = (
                min(
                    min(stops[g + 1] - i, stops[g + 2] - j), min(stops[g + 3] - k, stops[g + 4] - n)
                )
                >> 5
            )
            rounds = min(space, (last - (max(max(a, b), max(c, d)) >> 3)) // 6 + 1)
            if rounds <= 0:
                break
            for _ in range(rounds):
                v = load64(data, a >> 3) >> np.uint64(a & 7)
                w = load64(data, b >> 3) >> np.uint64(b & 7)
                x = load64(data, c >> 3) >> np.uint64(c & 7)
                y = load64(data, d >> 3) >> np.uint64(d & 7)
                for _step in range(4):
                    m = np.int64(at(meta, v & mask))
                    store64(out, i, at(table, v & mask))
                    v >>= np.uint64(m & 255)
                    a += m & 255
                    i += (m >> 8) & 255
                    m = np.int64(at(meta, w & mask))
                    store64(out, j, at(table, w & mask))
                    w >>= np.uint64(m & 255)
                    b += m & 255
                    j += (m >> 8) & 255
                    m = np.int64(at(meta, x & mask))
                    store64(out, k, at(table, x & mask))
                    x >>= np.uint64(m & 255)
                    c += m & 255
                    k += (m >> 8) & 255
                    m = np.int64(at(meta, y & mask))
                    store64(out, n, at(table, y & mask))
                    y >>= np.uint64(m & 255)
                    d += m & 255
                    n += (m >> 8) & 255
        for s in range(4):
            bit = a if s == 0 else (b if s == 1 else (c if s == 2 else d))
            o = i if s == 0 else (j if s == 1 else (k if s == 2 else n))
            end = starts[g + s + 1]
            stop = stops[g + s + 1]
            status = _word_stream(data, bit, end, out, o, stop, table, meta, mask)
            if status < 0:
                return status
    for s in range(streams & ~3, streams):
        status = _word_stream(
            data, starts[s] * 8, starts[s + 1], out, stops[s], stops[s + 1], table, meta, mask
        )
        if status < 0:
            return status
    return np.int64(0)


@kernel(i64(U8, U64))
def build_run_table(lengths, table):
    """Lookup table for `decode_runs`, one token an entry; returns the number of index bits.

    Layout: code bits (8) | run class (8) | value bits (8) | first rank (16) of the value class.
    """
    token = np.empty(4096, np.int32)
    bits = _fill_codes(lengths, 512, token)
    for index in range(1 << bits):
        t = np.int64(token[index])
        value_class = t & 15
        extra = max(value_class - 7, 0)
        rank = value_class if value_class < 8 else 6 + (1 << extra)
        table[index] = np.uint64(
            np.int64(lengths[t]) | ((t >> 4) << 8) | (extra << 16) | (rank << 24)
        )
    return bits


@inline
def _run_token(w, entry):
    """The run, the rank of the value after it, and the bits used of one token at `w`."""
    code_bits = entry & _255
    run_class = (entry >> np.uint64(8)) & _255
    extra = (entry >> np.uint64(16)) & _255
    w >>= code_bits
    one = _1 << run_class
    run = one - _1 + (w & (one - _1))
    w >>= run_class
    rank = (entry >> np.uint64(24)) + (w & ((_1 << extra) - _1))
    return np.int64(run), rank, np.int64(code_bits + run_class + extra)


@inline
def _run_stream(data, bit, end, out, o, stop, table, mask, values, others):
    """Decode one stream to `out[o:stop]`, which already holds the run's symbol; a status."""
    while o < stop:
        if bit > 8 * end:
            return np.int64(BAD_END)
        w = _bits_at(data, bit, end)
        run, rank, bits = _run_token(w, at(table, w & mask))
        bit += bits
        if run > stop - o:
            return np.int64(BAD_RUN)
        o += run
        # Where a run ends the stream, the value after it does not exist and is dropped.
        if o < stop:
            if rank >= others:
                return np.int64(BAD_VALUE)
            out[o] = at(values, rank)
            o += 1
    if not _ends_well(data, bit, end):
        return np.int64(BAD_END)
    return np.int64(0)


@inline
def _fill(out, filled, needed, stop, value):
    """Fill on past position `needed` (below `stop`), 4 KiB at a time; returns the new end."""
    if needed < filled:
        return filled
    end = min(needed + 4096, stop)
    fill(out, filled, end, value)
    return end


@kernel(i64(BYTES, I64, U8, I64, i64, U64, i64, BYTES, i64))
def decode_runs(data, starts, out, stops, streams, table, table_bits, values, others):
    """Decode one block of the mode `runs`; returns 0 or a status.

    As `decode_words`. `values` has 512 entries: the `others` values by rank, then the run's symbol
    as the last entry; a rank is at most 134 + 127.
    """
    mask = (_1 << np.uint64(table_bits)) - _1
    bound = np.uint64(others)
    # Filling the output with the run's symbol first (a memset) leaves one store a token, with no
    # loop whose length the processor would have to guess. It is done piece by piece, so that the
    # stores find it in the first-level cache.
    symbol = values[511]
    a = starts[0] * 8
    i = stops[0]
    if streams == 4:
        b = starts[1] * 8
        c = starts[2] * 8
        d = starts[3] * 8
        j = stops[1]
        k = stops[2]
        n = stops[3]
        last = np.int64(data.shape[0]) - 8
        bad = False
        # Each stream's output is filled up to here.
        ti = i
        tj = j
        tk = k
        tn = n
        # A token uses at most 12 + 31 + 7 bits, so one load always holds it.
        while (max(max(a, b), max(c, d)) >> 3) <= last:
            w = load64(data, a >> 3) >> np.uint64(a & 7)
            run0, rank0, bits0 = _run_token(w, at(table, w & mask))
            w = load64(data, b >> 3) >> np.uint64(b & 7)
            run1, rank1, bits1 = _run_token(w, at(table, w & mask))
            w = load64(data, c >> 3) >> np.uint64(c & 7)
            run2, rank2, bits2 = _run_token(w, at(table, w & mask))
            w = load64(data, d >> 3) >> np.uint64(d & 7)
            run3, rank3, bits3 = _run_token(w, at(table, w & mask))
            # Nothing is stored before all four runs are known to stay inside what is filled; the
            # careful loop takes over from the first that goes past its stream.
            if (run0 >= ti - i) | (run1 >= tj - j) | (run2 >= tk - k) | (run3 >= tn - n):
                if (
                    (run0 >= stops[1] - i)
                    | (run1 >= stops[2] - j)
                    | (run2 >= stops[3] - k)
                    | (run3 >= stops[4] - n)
                ):
                    break
                ti = _fill(out, ti, i + run0, stops[1], symbol)
                tj = _fill(out, tj, j + run1, stops[2], symbol)
                tk = _fill(out, tk, k + run2, stops[3], symbol)
                tn = _fill(out, tn, n + run3, stops[4], symbol)
            bad |= (rank0 >= bound) | (rank1 >= bound) | (rank2 >= bound) | (rank3 >= bound)
            out[i + run0] = at(values, rank0)
            out[j + run1] = at(values, rank1)
            out[k + run2] = at(values, rank2)
            out[n + run3] = at(values, rank3)
            i += run0 + 1
            j += run1 + 1
            k += run2 + 1
            n += run3 + 1
            a += bits0
            b += bits1
            c += bits2
            d += bits3
        if bad:
            return np.int64(BAD_VALUE)
        fill(out, ti, stops[1], symbol)
        fill(out, tj, stops[2], symbol)
        fill(out, tk, stops[3], symbol)
        fill(out, tn, stops[4], symbol)
        for s in range(1, 4):
            bit = b if s == 1 else (c if s == 2 else d)
            o = j if s == 1 else (k if s == 2 else n)
            status = _run_stream(
                data, bit, starts[s + 1], out, o, stops[s + 1], table, mask, values, bound
            )
            if status < 0:
                return status
        return _run_stream(data, a, starts[1], out, i, stops[1], table, mask, values, bound)
    for s in range(streams):
        fill(out, stops[s], stops[s + 1], symbol)
        status = _run_stream(
            data,
            starts[s] * 8,
            starts[s + 1],
            out,
            stops[s],
            stops[s + 1],
            table,
            mask,
            values,
            bound,
        )
        if status < 0:
            return status
    return np.int64(0)

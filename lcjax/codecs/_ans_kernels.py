"""Numba side of the token codec: asymmetric numeral systems for tokens, and raw bits beside them.

Table ANS (Duda, "Asymmetric numeral systems", 2013, section 4): a state of ``log`` bits and one
table for each class of tokens. All classes share the state, so each word may be of another class.
Word ``k`` belongs to lane ``k % 4``; lanes have states of their own, which lets a processor work
at all four at once. The encoder goes from the last word to the first and writes each lane from
its end, so that the decoder reads forward. Raw bits are one stream in the words' order.
"""

import numpy as np

from lcjax._numba import kernel
from lcjax.codecs._token_kernels import ALONE, FINE, TOKENS, XOR, mapped, rotated, token_tables
from lcjax.entropy._jit import at, floor_log2, inline, load64, store64

LANES = 4
LEAST_LOG, MOST_LOG = 9, 12
# Sum of a table's weights, as a power of two.
_SCALE = 14
_TILE = 2048


@inline
def _put(out, place, value, bits):
    """Or bits into a zeroed buffer, lowest first; returns the place after them."""
    value, byte = value << (place & 7), place >> 3
    for k in range((bits + (place & 7) + 7) >> 3):
        out[byte + k] |= np.uint8((value >> (8 * k)) & 255)
    return place + bits


@inline
def _get(data, place, bits):
    """Up to 16 bits at a place; zeros after the end."""
    value, byte = np.int64(0), place >> 3
    for k in range(3):
        if byte + k < data.size:
            value |= np.int64(data[byte + k]) << (8 * k)
    return (value >> (place & 7)) & ((1 << bits) - 1)


@kernel()
def _write_tables(counts, fraction, weights, out):
    """Rounds counts to weights of ``fraction`` bits after the leading one, and writes those.

    Args:
      counts: int64 ``(classes, 256)``.
      fraction: bits.
      weights: int64 ``(classes, 256)``; gets them.
      out: uint8 of zeros, with room for 2 bytes a weight.

    Returns:
      Bits written.
    """
    place = 0
    for c in range(counts.shape[0]):
        total, last = np.int64(0), 0
        for token in range(TOKENS):
            total += counts[c, token]
            if counts[c, token] > 0:
                last = token
        place = _put(out, place, last, 8)
        before = 0
        for token in range(last + 1):
            n = counts[c, token]
            length, low, kept = 0, 0, 0
            if n > 0:
                share = np.float64(n) * (1 << _SCALE) / np.float64(total)
                weight = max(np.int64(share + 0.5), np.int64(1))
                length = floor_log2(np.uint64(weight)) + 1
                drop = max(length - 1 - fraction, 0)
                weight = min((weight + ((1 << drop) >> 1)) >> drop << drop, np.int64(1 << _SCALE))
                length = floor_log2(np.uint64(weight)) + 1
                kept = min(length - 1, fraction)
                low = (weight >> (length - 1 - kept)) & ((1 << kept) - 1)
                weights[c, token] = weight
            step = length - before
            if step == 0:
                place = _put(out, place, 0, 1)
            elif step == 1 or step == -1:
                place = _put(out, place, 1 + 4 * np.int64(step < 0), 3)
            else:
                place = _put(out, place, 3 + 4 * length, 6)
            place = _put(out, place, low, kept)
            before = length
    return place


@kernel()
def _read_tables(data, fraction, weights):
    """Inverse of ``_write_tables``; returns bits read, or -1 where a length is out of range."""
    place = 0
    for c in range(weights.shape[0]):
        last = _get(data, place, 8)
        place += 8
        length = 0
        for token in range(last + 1):
            kind = _get(data, place, 2)
            if kind & 1 == 0:
                place += 1
            elif kind == 1:
                length += -1 if _get(data, place + 2, 1) else 1
                place += 3
            else:
                length = _get(data, place + 2, 4)
                place += 6
            if not 0 <= length <= _SCALE + 1:
                return -1
            if length > 0:
                kept = min(length - 1, fraction)
                low = _get(data, place, kept)
                place += kept
                weights[c, token] = ((1 << kept) | low) << (length - 1 - kept)
            if place > 8 * data.size:
                return -1
    return place


@kernel()
def _normalize(weights, log, shares):
    """Shares of ``2^log`` in proportion to weights, at least 1 where there is a weight.

    Returns:
      Whether all classes have such shares.
    """
    for c in range(weights.shape[0]):
        total = np.int64(0)
        for token in range(TOKENS):
            total += weights[c, token]
        if total == 0:
            return False
        left = np.int64(1) << log
        for token in range(TOKENS):
            w = weights[c, token]
            shares[c, token] = max((w << log) // total, 1) if w > 0 else 0
            left -= shares[c, token]
        # What rounding left over goes to the largest, what it took too much comes from them.
        while left != 0:
            top = 0
            for token in range(TOKENS):
                if shares[c, token] > shares[c, top]:
                    top = token
            change = left if left > 0 else -min(-left, max(shares[c, top] >> 3, 1))
            if shares[c, top] + change < 1:
                return False
            shares[c, top] += change
            left -= change
    return True


@kernel()
def _coded_bits(counts, shares, log):
    """Bits that tokens take with shares of ``2^log``."""
    bits = 0.0
    for c in range(counts.shape[0]):
        for token in range(TOKENS):
            if counts[c, token] > 0:
                bits += counts[c, token] * (log - np.log2(np.float64(shares[c, token])))
    return bits


@inline
def _spread(shares, log, places):
    """Which token each state belongs to."""
    size = np.int64(1) << log
    step = (size >> 1) + (size >> 3) + 3
    place = np.int64(0)
    for token in range(TOKENS):
        for _ in range(shares[token]):
            places[place] = token
            place = (place + step) & (size - 1)


@kernel()
def _build_encoder(shares, log, states, entries):
    """Tables of the encoder.

    Args:
      shares: int64 ``(classes, 256)``.
      log: of a table's size.
      states: uint16 ``(classes * 2^log,)``; gets the next state.
      entries: uint64 ``(classes * 256,)``. A state plus the low 32 bits, modulo 2^32, shifted
        right by 16, is how many bits the state gives; what is left of it plus the high 32 bits,
        modulo 2^32, is an index of ``states``.
    """
    size = np.int64(1) << log
    places = np.empty(size, np.uint8)
    ends = np.empty(TOKENS, np.int64)
    for c in range(shares.shape[0]):
        _spread(shares[c], log, places)
        below = c * size
        for token in range(TOKENS):
            share = shares[c, token]
            ends[token] = below
            if share > 0:
                most = log - floor_log2(np.uint64(share - 1)) if share > 1 else log
                width = (most << 16) - (share << most)
                entries[c * TOKENS + token] = (width & 0xFFFFFFFF) | (
                    ((below - share) & 0xFFFFFFFF) << 32
                )
            below += share
        for u in range(size):
            token = places[u]
            states[ends[token]] = size + u
            ends[token] += 1


@kernel()
def _build_decoder(shares, log, entries):
    """Entries of the decoder, uint32 ``(classes * 2^log,)``.

    Of each state: how many bits the next one takes (4), token (8), and what they are added to.
    """
    size = np.int64(1) << log
    places = np.empty(size, np.uint8)
    nexts = np.empty(TOKENS, np.int64)
    for c in range(shares.shape[0]):
        _spread(shares[c], log, places)
        for token in range(TOKENS):
            nexts[token] = shares[c, token]
        for u in range(size):
            now = np.int64(places[u])
            x = nexts[now]
            nexts[now] = x + 1
            bits = log - floor_log2(np.uint64(x))
            entries[c * size + u] = bits | (now << 4) | (((x << bits) - size) << 12)


@kernel()
def _split(
    bits, base, form, strip, width, mantissa, depth, first, signed, classes, lengths, symbols,
    counts, raw,
):  # fmt: skip
    """Tokens of all words, how often each occurs in each class, and the raw bits.

    Args:
      bits: words.
      base: words.
      form: ``DIFF``, ``XOR`` or ``ALONE``.
      strip: lowest bits that are 0 in all words.
      width: bits of a word without those.
      mantissa: bits of its mantissa.
      depth: bits of a token below the leading one (``ALONE``: mantissa bits in it).
      first: of ``ALONE``, leading bits of token 2.
      signed: of ``ALONE``, 1 where raw bits hold the sign, else 0.
      classes: uint8, class of each key.
      lengths: uint8, raw bits of each token.
      symbols: uint16; gets ``class * 256 + token``.
      counts: int64 ``(classes * 256,)``, zeros.
      raw: uint8, with room for all and 8 bytes.

    Returns:
      Bytes of raw bits.
    """
    s, sign = np.uint64(strip), np.uint64(1) << np.uint64(width - 1)
    mag, shift = sign - np.uint64(1), np.uint64(mantissa - 1)
    one, seven = np.uint64(1), np.uint64(7)
    rest, lowest = np.uint64(mantissa - depth + signed), np.uint64(signed)
    deep, begin = np.uint64(depth), np.int64(first - 2)
    single = classes.size == 0
    z_tile = np.empty(_TILE, bits.dtype)
    key_tile = np.zeros(_TILE, np.uint16)
    token_tile = np.empty(_TILE, np.uint8)
    held, have, place = np.uint64(0), np.uint64(0), np.int64(0)
    for start in range(0, bits.size, _TILE):
        # Slices, because numba can't prove `start + k` positive, and loops over them vectorize.
        new = bits[start : start + _TILE]
        old = base[start : start + _TILE]
        made = symbols[start : start + _TILE]
        if form == ALONE:
            for k in range(new.size):
                z_tile[k] = rotated(np.uint64(new[k]) >> s, signed, sign)
        elif form == XOR:
            for k in range(new.size):
                z_tile[k] = mapped(np.uint64(new[k]) >> s, np.uint64(old[k]) >> s, XOR, sign)
        else:
            for k in range(new.size):
                z_tile[k] = mapped(np.uint64(new[k]) >> s, np.uint64(old[k]) >> s, form, sign)
        if not single:
            for k in range(old.size):
                key = np.uint64(at(classes, ((np.uint64(old[k]) >> s) & mag) >> shift))
                key_tile[k] = key << np.uint64(8)
        if form == ALONE:
            for k in range(new.size):
                z = np.uint64(z_tile[k])
                t = np.int64(z >> rest) - begin
                token = np.uint64(t) if 2 <= t < TOKENS else np.uint64(0)
                token_tile[k] = one if z <= lowest else token
        else:
            for k in range(new.size):
                z = np.uint64(z_tile[k])
                top = np.uint64(floor_log2(z | one))
                r = top - deep if top > deep else np.uint64(0)
                token_tile[k] = (r << deep) + (z >> r)
        for k in range(new.size):
            token = np.uint64(token_tile[k])
            symbol = np.uint64(key_tile[k]) | token
            made[k] = symbol
            counts[symbol] += 1
            r = np.uint64(at(lengths, token))
            held |= (np.uint64(z_tile[k]) & ((one << r) - one)) << have
            have += r
            store64(raw, place, held)
            place += np.int64(have >> np.uint64(3))
            held >>= have & ~seven
            have &= seven
    return place + np.int64(have > np.uint64(0))


@inline
def _push(symbol, states, entries, state, held, have):
    """A token in front of those a lane holds; returns its state, and bits held."""
    low = np.uint64(0xFFFFFFFF)
    entry = np.uint64(at(entries, np.uint64(symbol)))
    bits = ((state + entry) & low) >> np.uint64(16)
    held = (held << bits) | (state & ((np.uint64(1) << bits) - np.uint64(1)))
    state = np.uint64(at(states, ((state >> bits) + (entry >> np.uint64(32))) & low))
    return state, held, have + bits


@inline
def _flush(held, have, end, out):
    """Whole bytes in front of a lane; returns what is left, and where it begins now."""
    store64(out, end - 8, held << ((np.uint64(64) - have) & np.uint64(63)))
    end -= np.int64(have >> np.uint64(3))
    have &= np.uint64(7)
    return held & ((np.uint64(1) << have) - np.uint64(1)), have, end


@kernel()
def _encode(symbols, log, states, entries, out, ends, starts, last):
    """Writes all tokens.

    Args:
      symbols: uint16, from ``_split``.
      log: of a table's size.
      states: from ``_build_encoder``.
      entries: from it, too.
      out: uint8, with 8 bytes before the first lane.
      ends: int64 ``(4,)``, where each lane ends in ``out``; changed to where it begins.
      starts: int64 ``(4,)``; gets the bits to skip in each lane's first byte.
      last: int64 ``(4,)``; gets the state that each lane's decoder begins with.
    """
    size = np.uint64(1) << np.uint64(log)
    state, held = np.full(LANES, size), np.zeros(LANES, np.uint64)
    have, k = np.zeros(LANES, np.uint64), symbols.size
    while k & 15:
        k -= 1
        j = k & 3
        state[j], held[j], have[j] = _push(symbols[k], states, entries, state[j], held[j], have[j])
        held[j], have[j], ends[j] = _flush(held[j], have[j], ends[j], out)
    s0, s1, s2, s3 = state[0], state[1], state[2], state[3]
    h0, h1, h2, h3 = held[0], held[1], held[2], held[3]
    n0, n1, n2, n3 = have[0], have[1], have[2], have[3]
    e0, e1, e2, e3 = ends[0], ends[1], ends[2], ends[3]
    i = np.uint64(k)
    while i > np.uint64(0):
        for _ in range(4):
            i -= np.uint64(4)
            s3, h3, n3 = _push(symbols[i + np.uint64(3)], states, entries, s3, h3, n3)
            s2, h2, n2 = _push(symbols[i + np.uint64(2)], states, entries, s2, h2, n2)
            s1, h1, n1 = _push(symbols[i + np.uint64(1)], states, entries, s1, h1, n1)
            s0, h0, n0 = _push(symbols[i], states, entries, s0, h0, n0)
        h0, n0, e0 = _flush(h0, n0, e0, out)
        h1, n1, e1 = _flush(h1, n1, e1, out)
        h2, n2, e2 = _flush(h2, n2, e2, out)
        h3, n3, e3 = _flush(h3, n3, e3, out)
    for j, (now, left, end) in enumerate(((s0, n0, e0), (s1, n1, e1), (s2, n2, e2), (s3, n3, e3))):
        # Bits that do not fill a byte are the highest of the byte before.
        ends[j] = end - np.int64(left > np.uint64(0))
        starts[j] = (8 - np.int64(left)) & 7
        last[j] = np.int64(now - size)


@inline
def _pull(entries, row, state, word, used):
    """A token of a lane; returns it, the next state, the rest of the word, and bits used."""
    entry = np.uint64(at(entries, row + state))
    bits = entry & np.uint64(15)
    state = (entry >> np.uint64(12)) + (word & ((np.uint64(1) << bits) - np.uint64(1)))
    return (entry >> np.uint64(4)) & np.uint64(255), state, word >> bits, used + bits


@inline
def _load(data, place, limit):
    """At least 57 bits at a place, or anything past the last byte that may be read."""
    where = min(place >> np.uint64(3), limit)
    return load64(data, np.int64(where)) >> (place & np.uint64(7))


@inline
def _undone(z, b, sign):
    """The word that ``mapped`` made ``z`` of, form ``DIFF``."""
    one = np.uint64(1)
    full = sign | (sign - one)
    b = (b ^ full) if b & sign else (b | sign)
    d = ((z ^ full) >> one | sign) if z & one else z >> one
    a = (b + d) & full
    return (a ^ sign) if a & sign else (a ^ full)


@kernel()
def _decode(
    base, form, strip, width, mantissa, signed, classes, log, entries, raws, data, limit, places,
    states, out,
):  # fmt: skip
    """Inverse of ``_split`` and ``_encode``.

    Args:
      base: words; empty where none is needed.
      form: as in ``_split``.
      strip: as there.
      width: as there.
      mantissa: as there.
      signed: as there.
      classes: as there.
      log: of a table's size.
      entries: from ``_build_decoder``.
      raws: uint64, of each token what its raw bits are added to (32), and their number.
      data: uint8.
      limit: last byte of ``data`` that eight can be read from.
      places: int64 ``(5,)``, the bit each lane begins at, and that the raw bits do; changed to
        where they end.
      states: int64 ``(4,)``; changed to the last ones.
      out: words.
    """
    s, sign = np.uint64(strip), np.uint64(1) << np.uint64(width - 1)
    mag, shift = sign - np.uint64(1), np.uint64(mantissa - 1)
    one, top, low = np.uint64(1), np.uint64(width - 1), np.uint64(0xFFFFFFFF)
    size, last = np.uint64(log), np.uint64(limit)
    single = classes.size == 0
    rows = np.zeros(_TILE, np.uint16)
    row_of = np.empty(classes.size, np.uint16)
    for key in range(classes.size):
        row_of[key] = np.uint64(classes[key]) << size
    tokens = np.empty(_TILE, np.uint8)
    z_tile = np.empty(_TILE, out.dtype)
    p0, p1 = np.uint64(places[0]), np.uint64(places[1])
    p2, p3 = np.uint64(places[2]), np.uint64(places[3])
    s0, s1 = np.uint64(states[0]), np.uint64(states[1])
    s2, s3 = np.uint64(states[2]), np.uint64(states[3])
    place = np.uint64(places[4])
    for start in range(0, out.size, _TILE):
        new = out[start : start + _TILE]
        old = base[start : start + _TILE]
        count = new.size
        if not single:
            for k in range(old.size):
                b = np.uint64(old[k]) >> s
                rows[k] = at(row_of, (b & mag) >> shift)
        full = np.uint64(count & ~15)
        n = np.uint64(0)
        while n < full:
            w0, w1 = _load(data, p0, last), _load(data, p1, last)
            w2, w3 = _load(data, p2, last), _load(data, p3, last)
            for _ in range(4):
                n1, n2, n3 = n + one, n + np.uint64(2), n + np.uint64(3)
                tokens[n], s0, w0, p0 = _pull(entries, np.uint64(rows[n]), s0, w0, p0)
                tokens[n1], s1, w1, p1 = _pull(entries, np.uint64(rows[n1]), s1, w1, p1)
                tokens[n2], s2, w2, p2 = _pull(entries, np.uint64(rows[n2]), s2, w2, p2)
                tokens[n3], s3, w3, p3 = _pull(entries, np.uint64(rows[n3]), s3, w3, p3)
                n += np.uint64(4)
        for i in range(count & ~15, count):
            row = np.uint64(rows[i])
            if i & 3 == 0:
                tokens[i], s0, _, p0 = _pull(entries, row, s0, _load(data, p0, last), p0)
            elif i & 3 == 1:
                tokens[i], s1, _, p1 = _pull(entries, row, s1, _load(data, p1, last), p1)
            elif i & 3 == 2:
                tokens[i], s2, _, p2 = _pull(entries, row, s2, _load(data, p2, last), p2)
            else:
                tokens[i], s3, _, p3 = _pull(entries, row, s3, _load(data, p3, last), p3)
        for i in range(count):
            raw = np.uint64(at(raws, np.uint64(tokens[i])))
            r = raw >> np.uint64(32)
            z_tile[i] = (raw + (_load(data, place, last) & ((one << r) - one))) & low
            place += r
        if form == ALONE:
            if signed:
                for i in range(count):
                    z = np.uint64(z_tile[i])
                    new[i] = ((z >> one) | ((z & one) << top)) << s
            else:
                for i in range(count):
                    new[i] = np.uint64(z_tile[i]) << s
        elif form == XOR:
            for i in range(old.size):
                z = np.uint64(z_tile[i])
                new[i] = np.uint64(old[i]) ^ (((z >> one) | ((z & one) << top)) << s)
        else:
            for i in range(old.size):
                b = np.uint64(old[i]) >> s
                new[i] = _undone(np.uint64(z_tile[i]), b, sign) << s
    places[0], places[1], places[2], places[3] = p0, p1, p2, p3
    places[4] = place
    states[0], states[1], states[2], states[3] = s0, s1, s2, s3


@inline
def _classes_of(edges, keys):
    """The class of each key; empty for a single class."""
    if edges.size == 0:
        return np.empty(0, np.uint8)
    classes = np.zeros(keys, np.uint8)
    for k in range(edges.size):
        classes[edges[k] :] = k + 1
    return classes


@kernel()
def pack(bits, base, spec, edges, mantissa, raw, lanes, tables, sizes):
    """Encodes words.

    Args:
      bits: words.
      base: words.
      spec: int64; form, sparse, signed, strip, depth, first.
      edges: int64, where classes begin.
      mantissa: bits of the mantissa, without ``strip``.
      raw: uint8, with room for all words and 16 bytes; gets raw bits.
      lanes: uint8, with room for 12 bits a word and 24 bytes a lane; gets them.
      tables: uint8 of zeros, with room for 2 bytes a token and class, and a byte a class.
      sizes: int64 ``(16,)``; gets bytes of raw bits and of tables, ``log`` and ``fraction``, and
        of each lane where it begins, where it ends, and 8 times its state plus bits to skip.
    """
    form, signed, strip, depth, first = spec[0], spec[2], spec[3], spec[4], spec[5]
    width = bits.itemsize * 8 - strip
    lengths, values = np.empty(TOKENS, np.uint8), np.empty(TOKENS, np.uint32)
    token_tables(form, width, mantissa, depth, first, signed, lengths, values)
    classes = _classes_of(edges, 1 << (width - mantissa))
    symbols = np.empty(bits.size, np.uint16)
    flat = np.zeros((edges.size + 1) * TOKENS, np.int64)
    sizes[0] = _split(
        bits, base, form, strip, width, mantissa, depth, first, signed, classes, lengths,
        symbols, flat, raw,
    )  # fmt: skip
    counts = flat.reshape(edges.size + 1, TOKENS)
    most = 1
    for c in range(counts.shape[0]):
        used = 0
        for token in range(TOKENS):
            used += counts[c, token] > 0
        if used == 0:
            counts[c, 0] = 1  # a class without words has a table all the same
        most = max(most, used)
    # Finer tables and more states where there are words enough to gain by them.
    fraction = 3 if bits.size >= 1 << 17 else 2
    weights, shares = np.zeros_like(counts), np.zeros_like(counts)
    sizes[1] = (_write_tables(counts, fraction, weights, tables) + 7) >> 3
    log = LEAST_LOG
    while 1 << log < 4 * most:
        log += 1
    _normalize(weights, log, shares)  # four states for each token are room for all
    bits_now = _coded_bits(counts, shares, log)
    # Tables twice as large while that saves something: the smaller, the faster.
    while log < MOST_LOG and bits.size >> 5 > 1 << log:
        finer = np.zeros_like(counts)
        _normalize(weights, log + 1, finer)
        bits_finer = _coded_bits(counts, finer, log + 1)
        if bits_now - bits_finer < (bits_now + 8 * sizes[0]) * 3e-4:
            break
        log, shares, bits_now = log + 1, finer, bits_finer
    sizes[2], sizes[3] = log, fraction
    states = np.empty(counts.shape[0] << log, np.uint16)
    entries = np.zeros(counts.size, np.uint64)
    _build_encoder(shares, log, states, entries)
    ends, starts = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    last = np.empty(LANES, np.int64)
    for j in range(LANES):
        ends[j] = lanes.size // LANES * (j + 1)
        sizes[5 + 3 * j] = ends[j]
    _encode(symbols, log, states, entries, lanes, ends, starts, last)
    for j in range(LANES):
        sizes[4 + 3 * j] = ends[j]
        sizes[6 + 3 * j] = last[j] << 3 | starts[j]


@inline
def _varint(data, place):
    """An integer below 2^42 and the place after it; (-1, place) where there is none."""
    value = np.int64(0)
    for k in range(6):
        if place + k >= data.size:
            break
        byte = np.int64(data[place + k])
        value |= (byte & 127) << (7 * k)
        if byte < 128:
            return value, place + k + 1
    return np.int64(-1), place


@kernel()
def read_spec(data, width, mantissa, form, spec, edges):
    """Reads how words become tokens, and checks it.

    Args:
      data: uint8, not trusted.
      width: bits of a word.
      mantissa: bits of its mantissa.
      form: which the mode states.
      spec: int64 ``(7,)``; gets form, sparse, signed, strip, depth, first, the number of edges.
      edges: int64 ``(15,)``; gets them.

    Returns:
      The place after it, or -1.
    """
    if data.size < 3:
        return -1
    flags, strip, count = np.int64(data[0]), np.int64(data[1]), np.int64(data[2])
    first, place = _varint(data, 3)
    if flags >= 32 or strip >= mantissa or count > edges.size or first < 0:
        return -1
    depth, sparse, signed = flags & 7, (flags >> 3) & 1, flags >> 4
    mantissa -= strip
    width -= strip
    before = np.int64(0)
    for k in range(count):
        edges[k], place = _varint(data, place)
        if not before < edges[k] < 1 << (width - mantissa):
            return -1
        before = edges[k]
    if form == ALONE:
        if depth > min(FINE, mantissa) or sparse or first >> (width - 1 - mantissa + depth) > 0:
            return -1
    elif depth > (3 if width > 16 else 4) or signed or first:
        return -1
    spec[0], spec[1], spec[2], spec[3] = form, sparse, signed, strip
    spec[4], spec[5], spec[6] = depth, first, count
    return place


@kernel()
def read_head(data, place, head):
    """Reads where the parts of tokens are; see ``unpack``.

    Returns:
      0, or what is wrong: 5 a number out of range, 6 parts longer than the data.
    """
    if place >= data.size:
        return 5
    log, fraction = np.int64(data[place]) & 15, np.int64(data[place]) >> 4
    if fraction > 3 or not LEAST_LOG <= log <= MOST_LOG:
        return 5
    head[0], head[1] = log, fraction
    sizes = np.empty(LANES, np.int64)
    raw, place = _varint(data, place + 1)
    if raw < 0:
        return 5
    total = raw
    for j in range(LANES):
        state, place = _varint(data, place)
        sizes[j], place = _varint(data, place)
        if sizes[j] < 0 or state < 0 or state >> 3 >= 1 << log:
            return 5
        head[4 + 3 * j], head[6 + 3 * j] = state & 7, state >> 3
        total += sizes[j]
    if total > data.size - place:
        return 6
    head[3] = place
    place += raw
    for j in range(LANES):
        head[4 + 3 * j] += 8 * place
        place += sizes[j]
        head[5 + 3 * j] = place
    head[2], head[16] = place, data.size
    return 0


@kernel()
def unpack(base, spec, edges, mantissa, data, head, out):
    """Inverse of ``pack``.

    Args:
      base: words; empty where none is needed.
      spec: as in ``pack``.
      edges: as there.
      mantissa: as there.
      data: uint8, not trusted, and 8 bytes.
      head: int64; ``log``, ``fraction``, where tables begin, where the raw bits do, of each
        lane the bit it begins at, the byte it ends before, and its state; where tables end.
      out: words.

    Returns:
      0, or what is wrong: 1 tables that end elsewhere or have a bad length, 2 a token that does
      not fit the words, 3 tokens without room in their table, or none, 4 words that end elsewhere
      than their bits.
    """
    form, signed, strip, depth, first = spec[0], spec[2], spec[3], spec[4], spec[5]
    width = out.itemsize * 8 - strip
    log, fraction, tables = head[0], head[1], head[2]
    weights = np.zeros((edges.size + 1, TOKENS), np.int64)
    read = _read_tables(data[tables : head[16]], fraction, weights)
    if read < 0 or (read + 7) >> 3 != head[16] - tables:
        return 1
    lengths, values = np.empty(TOKENS, np.uint8), np.empty(TOKENS, np.uint32)
    token_tables(form, width, mantissa, depth, first, signed, lengths, values)
    raws = np.empty(TOKENS, np.uint64)
    for token in range(TOKENS):
        raws[token] = np.uint64(values[token]) | np.uint64(lengths[token]) << np.uint64(32)
        if lengths[token] == 255:
            for c in range(weights.shape[0]):
                if weights[c, token] > 0:
                    return 2
    shares = np.zeros_like(weights)
    if not _normalize(weights, log, shares):
        return 3
    entries = np.empty(weights.shape[0] << log, np.uint32)
    _build_decoder(shares, log, entries)
    places, states = np.empty(LANES + 1, np.int64), np.empty(LANES, np.int64)
    for j in range(LANES):
        places[j], states[j] = head[4 + 3 * j], head[6 + 3 * j]
    places[LANES] = 8 * head[3]
    classes = _classes_of(edges, 1 << (width - mantissa))
    _decode(
        base, form, strip, width, mantissa, signed, classes, log, entries, raws, data,
        data.size - 8, places, states, out,
    )  # fmt: skip
    for j in range(LANES):
        if places[j] != 8 * head[5 + 3 * j] or states[j] != 0:
            return 4
    # Between the raw bits and the first lane, whose first byte may have bits to skip.
    return 0 if (places[LANES] + 7) >> 3 == head[4] >> 3 else 4

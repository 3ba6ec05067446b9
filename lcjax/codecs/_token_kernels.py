"""Numba side of the token codec: a survey of words, and what their forms would cost."""

import numpy as np

from lcjax._numba import kernel
from lcjax.codecs._class_kernels import merge_classes, stream_bits_of
from lcjax.entropy._jit import floor_log2, inline

DIFF, XOR, ALONE = 0, 1, 2
ZERO, TOKENS = 1, 256
MOST_CLASSES = 16
# Mantissa bits of an exponent's bins in a survey of values by themselves.
FINE = 3


@inline
def rotated(a, signed, sign):
    """A word with its sign in the lowest bit, or without it where none is negative."""
    z = a & (sign - np.uint64(1))
    if signed:
        z = (z << np.uint64(1)) | np.uint64((a & sign) != np.uint64(0))
    return z


@inline
def mapped(a, b, form, sign):
    """A word against its base: small where the two are alike."""
    if form == XOR:
        return rotated(a ^ b, 1, sign)
    full = sign | (sign - np.uint64(1))
    # Flipping all bits of negatives and the sign of positives orders the floats.
    a = (a ^ full) if a & sign else (a | sign)
    b = (b ^ full) if b & sign else (b | sign)
    d = (a - b) & full
    z = (d << np.uint64(1)) & full
    return (z ^ full) if d & sign else z


@inline
def alone_token(z, first, rest, signed):
    """Token of a value by itself; ``first`` leading bits are token 2."""
    if z <= np.uint64(signed):
        return np.int64(ZERO)
    t = np.int64(z >> np.uint64(rest)) - first + 2
    return t if 2 <= t < TOKENS else np.int64(0)


@kernel()
def any_bits(words):
    """Or of all words."""
    seen = words.dtype.type(0)
    for k in range(words.size):
        seen |= words[k]
    return np.uint64(seen)


@kernel()
def _survey(
    bits, base, starts, piece, strip, width, mantissa, depth, counts, fine, keys, low, stats
):  # fmt: skip
    """Counts what a choice of form needs to know, over pieces of the words.

    Args:
      bits: words, ``(n,)``.
      base: the same.
      starts: where each piece begins.
      piece: words in each.
      strip: lowest bits that are 0 in all words, left out.
      width: bits of a word, without those.
      mantissa: bits of its mantissa, without those.
      depth: of the tokens.
      counts: int64 ``(2, 256)``; gets tokens of ``DIFF`` and ``XOR``.
      fine: int64 ``(2^(width - 1 - mantissa + FINE),)``; gets values by leading bits.
      keys: int64 ``(2^(width - mantissa),)``; gets bases by exponent and a mantissa bit.
      low: int64 ``(256,)``; gets words by their lowest byte.
      stats: int64 ``(7,)``; gets words; negative ones; zeros; and, of whether a word is
        unlike its base after one that was (after one that wasn't), how often no and yes.
    """
    s, sign = np.uint64(strip), np.uint64(1) << np.uint64(width - 1)
    mag = sign - np.uint64(1)
    for start in starts:
        last = np.int64(0)
        for k in range(start, min(start + piece, bits.size)):
            a, b = np.uint64(bits[k]) >> s, np.uint64(base[k]) >> s
            for form in (DIFF, XOR):
                z = mapped(a, b, form, sign)
                r = max(floor_log2(z | np.uint64(1)) - depth, 0)
                counts[form, (r << depth) + np.int64(z >> np.uint64(r))] += 1
            magnitude = a & mag
            if mantissa >= FINE:
                fine[magnitude >> np.uint64(mantissa - FINE)] += 1
            else:
                fine[magnitude << np.uint64(FINE - mantissa)] += 1
            keys[(b & mag) >> np.uint64(mantissa - 1)] += 1
            changed = np.int64(a != b)
            low[a & np.uint64(255)] += 1
            stats[0] += 1
            stats[1] += np.int64((a & sign) != np.uint64(0))
            stats[2] += np.int64(magnitude == np.uint64(0))
            stats[3 + 2 * last + changed] += 1
            last = changed


@kernel()
def _survey_alone(bits, starts, piece, strip, width, mantissa, fine, low, stats):
    """``_survey`` without a base."""
    s, sign = np.uint64(strip), np.uint64(1) << np.uint64(width - 1)
    mag = sign - np.uint64(1)
    for start in starts:
        for k in range(start, min(start + piece, bits.size)):
            a = np.uint64(bits[k]) >> s
            magnitude = a & mag
            if mantissa >= FINE:
                fine[magnitude >> np.uint64(mantissa - FINE)] += 1
            else:
                fine[magnitude << np.uint64(FINE - mantissa)] += 1
            low[a & np.uint64(255)] += 1
            stats[0] += 1
            stats[1] += np.int64((a & sign) != np.uint64(0))
            stats[2] += np.int64(magnitude == np.uint64(0))


@kernel()
def _depth_of(counts, deepest, stream_bits, symbol_bits):
    """The depth whose tokens and raw bits are smallest, from tokens of the deepest.

    Returns:
      The depth, and the bits.
    """
    now = counts.copy()
    best, least = deepest, np.inf
    for depth in range(deepest, -1, -1):
        bits = stream_bits_of(now, stream_bits, symbol_bits)
        for token in range(TOKENS):
            bits += now[token] * max((token >> depth) - 1, 0)
        if bits < least:
            best, least = depth, bits
        # One bit less: tokens from 2^depth on are halved, and a raw bit takes their last.
        if depth > 0:
            direct, half = 1 << depth, 1 << (depth - 1)
            for token in range(direct, TOKENS):
                n = now[token]
                now[token] = 0
                now[half + (token >> 1)] += n
    return best, least


@kernel()
def _window_of(fine, words, zeros, mantissa, signed, whole, stream_bits, symbol_bits):
    """The same for values alone: depth, first leading bits with a token, and the bits.

    ``fine`` counts all words by leading bits, ``FINE`` of the mantissa's among them; what
    has no token costs ``whole`` raw bits.
    """
    # Zeros have a token of their own.
    now = fine.copy()
    now[0] -= zeros
    best, first, least = 0, 0, np.inf
    tokens = np.empty(TOKENS, np.int64)
    size = now.size
    for depth in range(FINE, -1, -1):
        if depth < FINE:
            size >>= 1
            for k in range(size):
                now[k] = now[2 * k] + now[2 * k + 1]
        if depth > mantissa:
            continue
        span = min(TOKENS - 2, size)
        inside = np.int64(0)
        for k in range(span):
            inside += now[k]
        most, begin = inside, 0
        for k in range(span, size):
            inside += now[k] - now[k - span]
            if inside > most:
                most, begin = inside, k - span + 1
        tokens[:] = 0
        tokens[0] = words - zeros - most
        tokens[ZERO] = zeros
        for k in range(span):
            tokens[2 + k] = now[begin + k]
        bits = stream_bits_of(tokens, stream_bits, symbol_bits)
        bits += tokens[0] * whole + zeros * signed + most * (mantissa - depth + signed)
        if bits < least:
            best, first, least = depth, begin, bits
    return best, first, least


@kernel()
def _groups_of(keys, groups, edges):
    """Cuts keys into groups of about equal counts; ``edges`` gets where all but the first begin.

    Returns:
      How many edges there are.
    """
    total = np.int64(0)
    for n in keys:
        total += n
    below, start, found = np.int64(0), np.int64(0), 0
    for key in range(keys.size - 1):
        below += keys[key]
        if below == total or found + 1 >= groups:
            break
        # An equal share of what the groups before have left.
        if (below - start) * (groups - found) >= total - start:
            edges[found] = key + 1
            found += 1
            start = below
    return found


@kernel()
def _sampled_counts(
    bits, base, starts, piece, form, sparse, strip, width, mantissa, depth, first, signed, classes,
    counts,
):  # fmt: skip
    """Counts tokens by class over pieces of the words.

    ``sparse`` leaves out words that are their base; the rest is as in ``split``.
    """
    s, sign = np.uint64(strip), np.uint64(1) << np.uint64(width - 1)
    mag = sign - np.uint64(1)
    rest = mantissa - depth + signed
    for start in starts:
        for k in range(start, min(start + piece, bits.size)):
            a, b = np.uint64(bits[k]) >> s, np.uint64(base[k]) >> s
            if sparse and a == b:
                continue
            if form == ALONE:
                token = alone_token(rotated(a, signed, sign), first, rest, signed)
            else:
                z = mapped(a, b, form, sign)
                r = max(floor_log2(z | np.uint64(1)) - depth, 0)
                token = (r << depth) + np.int64(z >> np.uint64(r))
            counts[classes[(b & mag) >> np.uint64(mantissa - 1)], token] += 1


@inline
def _raw_bits(token, form, width, mantissa, depth, signed):
    """How many raw bits a token has."""
    if form == ALONE:
        if token > ZERO:
            return mantissa - depth + signed
        return signed if token == ZERO else width - 1 + signed
    return max((token >> depth) - 1, 0)


@kernel()
def token_tables(form, width, mantissa, depth, first, signed, lengths, values):
    """Of each token, how many raw bits it has, and what they are added to.

    ``lengths`` gets 255 for tokens that no word of ``width`` bits has.
    """
    for token in range(TOKENS):
        r = _raw_bits(token, form, width, mantissa, depth, signed)
        if form == ALONE:
            value, top = np.int64(0), width - 1 + signed
            if token > ZERO:
                value = np.int64(token - 2 + first) << r
        else:
            top = width
            value = np.int64(token - (r << depth)) << min(r, width)
        fits = r <= top and value >> top == 0
        lengths[token] = r if fits else 255
        values[token] = value if fits else 0


@inline
def _entropy_of(no, yes):
    bits = 0.0
    for n in (no, yes):
        if n > 0:
            bits += n * np.log2(np.float64(no + yes) / n)
    return bits


@kernel()
def choose(bits, base, based, mantissa, starts, piece, limits, chosen, edges):
    """Chooses a form for words on a sample; see ``_tokens.plan``.

    Args:
      bits: words.
      base: words.
      based: whether there is a base; without, ``base`` is ``bits``.
      mantissa: bits of the floats' mantissa.
      starts: where pieces of the sample begin.
      piece: words in each.
      limits: float64; bits that a class costs, and each token in one; how much smaller words
        by themselves must be with classes to have them.
      chosen: int64 ``(8,)``; gets form, sparse, signed, strip, depth, first, the number of
        edges, and whether lowest bytes repeat.
      edges: int64, with room for one less than the classes of the sample; gets edges.

    Returns:
      About how many bits words take, each.
    """
    seen = np.uint64(0)
    for start in starts:
        for k in range(start, min(start + piece, bits.size)):
            seen |= np.uint64(bits[k]) | np.uint64(base[k])
        if seen & np.uint64(1):
            break
    if not seen & np.uint64(1):
        seen |= any_bits(bits) | any_bits(base)
    strip = 0
    while strip < mantissa - 1 and not (seen >> np.uint64(strip)) & np.uint64(1):
        strip += 1
    mantissa -= strip
    width = bits.itemsize * 8 - strip
    deepest = 3 if width > 16 else 4
    counts = np.zeros((2, TOKENS), np.int64)
    fine = np.zeros(1 << (width - 1 - mantissa + FINE), np.int64)
    keys = np.zeros(1 << (width - mantissa), np.int64)
    low = np.zeros(256, np.int64)
    stats = np.zeros(7, np.int64)
    if based:
        _survey(
            bits, base, starts, piece, strip, width, mantissa, deepest, counts, fine, keys, low,
            stats,
        )  # fmt: skip
    else:
        _survey_alone(bits, starts, piece, strip, width, mantissa, fine, low, stats)
    words, zeros = stats[0], stats[2]
    share = np.float64(words) / np.float64(bits.size)
    # Costs in a sample count as in the whole, and what it saw of rare tokens is too little.
    stream_bits, symbol_bits = limits[0] * share, limits[1] * share + 2.0 * (1 - share)
    signed = 0
    if stats[1] > 0 or (
        words < bits.size and (any_bits(bits) >> np.uint64(bits.itemsize * 8 - 1)) > np.uint64(0)
    ):
        signed = 1
    alike = np.int64(0)
    for n in low:
        alike += n * (n - 1)
    chosen[7] = alike * 256 > 3 * words * (words - 1)
    depth, first, alone_bits = _window_of(
        fine, words, zeros, mantissa, signed, width - 1 + signed, stream_bits, symbol_bits
    )
    chosen[0], chosen[1], chosen[2], chosen[3] = ALONE, 0, signed, strip
    chosen[4], chosen[5], chosen[6] = depth, first, 0
    best = alone_bits
    if not based:
        return best / words
    form, diff_depth, diff_bits = DIFF, 0, np.inf
    for trial in (DIFF, XOR):
        deep, size = _depth_of(counts[trial], deepest, stream_bits, symbol_bits)
        if size < diff_bits:
            form, diff_depth, diff_bits = trial, deep, size
    groups = max(1, min(edges.size + 1, words // 192))
    cuts = np.zeros(edges.size, np.int64)
    cuts = cuts[: _groups_of(keys, groups, cuts)]
    classes = np.zeros(keys.size, np.uint8)
    for k in range(cuts.size):
        classes[cuts[k] :] = k + 1
    for trial in range(3):
        # Words by themselves, against the base, and only those that are not their base.
        if trial == 0 and alone_bits > 1.4 * diff_bits:
            continue
        if trial > 0 and diff_bits > 1.4 * alone_bits:
            continue
        if trial == 2 and 2 * (stats[3] + stats[5]) <= words:
            continue
        this, deep = (ALONE, depth) if trial == 0 else (form, diff_depth)
        joint = np.zeros((cuts.size + 1, TOKENS), np.int64)
        _sampled_counts(
            bits, base, starts, piece, this, trial == 2, strip, width, mantissa, deep, first,
            signed, classes, joint,
        )  # fmt: skip
        size = 0.0
        for c in range(joint.shape[0]):
            for token in range(TOKENS):
                if joint[c, token] > 0:
                    raw = _raw_bits(token, this, width, mantissa, deep, signed)
                    size += np.float64(joint[c, token] * raw)
        begins = np.zeros(joint.shape[0], np.int64)
        left, coded = merge_classes(joint, stream_bits, symbol_bits, MOST_CLASSES, begins)
        size += coded
        if trial == 2:
            size += stream_bits + _entropy_of(stats[3], stats[4])
            size += _entropy_of(stats[5], stats[6])
        if size > (limits[2] * alone_bits if trial == 0 else best) or size > best:
            continue
        best = size
        chosen[0], chosen[1], chosen[4], chosen[6] = this, trial == 2, deep, left - 1
        if trial > 0:
            chosen[2] = chosen[5] = 0
        for k in range(left - 1):
            edges[k] = cuts[begins[k + 1] - 1]
    return best / words


@kernel()
def compact(words, changed, out):
    """Those words that ``changed`` is not 0 for."""
    place = np.int64(0)
    for k in range(words.size):
        if changed[k]:
            out[place] = words[k]
            place += 1


@kernel()
def scatter(words, base, changed, out):
    """Inverse of ``compact``, where the others are their base."""
    place = np.int64(0)
    for k in range(base.size):
        if changed[k]:
            out[k] = words[place]
            place += 1
        else:
            out[k] = base[k]


@kernel()
def mark_changed(bits, base, changed):
    """1 where a word is not its base, else 0; returns how many are 1."""
    total = 0
    for k in range(bits.size):
        changed[k] = bits[k] != base[k]
        total += changed[k]
    return total

"""A reader of tokens written from ``lcjax/FORMAT.md`` alone: slow, in plain integers."""


class Bits:
    """Bits of some bytes, lowest first."""

    def __init__(self, data, at=0):
        self.value, self.at = int.from_bytes(data, "little"), at

    def take(self, count):
        out = (self.value >> self.at) & ((1 << count) - 1)
        self.at += count
        return out


def varint(data):
    value = shift = 0
    while True:
        byte = data.pop(0)
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value


def read_tables(data, classes, fraction, log):
    bits = Bits(data)
    tables = []
    for _ in range(classes):
        last, length, weights = bits.take(8), 0, {}
        for token in range(last + 1):
            if bits.take(1):
                if bits.take(1):
                    length = bits.take(4)
                else:
                    length += -1 if bits.take(1) else 1
            if length:
                kept = min(fraction, length - 1)
                leading = 1 << (length - 1)
                weights[token] = leading | bits.take(kept) << (length - 1 - kept)
        total, states = sum(weights.values()), 1 << log
        shares = {t: w * states // total or 1 for t, w in weights.items()}
        left = states - sum(shares.values())
        while left:
            top = min(shares, key=lambda t: (-shares[t], t))
            change = left if left > 0 else -min(-left, max(1, shares[top] // 8))
            shares[top] += change
            left -= change
        owner, place = [0] * states, 0
        for token in sorted(shares):
            for _ in range(shares[token]):
                owner[place] = token
                place = (place + 5 * states // 8 + 3) % states
        seen, table = dict(shares), []
        for token in owner:
            x = seen[token]
            seen[token] += 1
            b = log + 1 - x.bit_length()
            table.append((token, b, (x << b) - states))
        tables.append(table)
    assert -(-bits.at // 8) == len(data)
    return tables


def ordered(word, width):
    return word ^ ((1 << width) - 1) if word >> (width - 1) else word | 1 << (width - 1)


def unordered(word, width):
    return word ^ 1 << (width - 1) if word >> (width - 1) else word ^ ((1 << width) - 1)


def read(payload, mode, width, mantissa, count, base, entropy_decode):
    """The words of a payload; ``base`` is a list of words, or None."""
    data = list(payload)
    flags, strip, edge_count = data.pop(0), data.pop(0), data.pop(0)
    depth, sparse, signed = flags & 7, flags >> 3 & 1, flags >> 4
    first = varint(data)
    edges = [varint(data) for _ in range(edge_count)]
    width, mantissa = width - strip, mantissa - strip
    full = (1 << width) - 1
    old = [b >> strip for b in base] if base is not None else [0] * count
    marks = [1] * count
    if sparse:
        size = varint(data)
        marks = list(entropy_decode(bytes(data[:size])))
        del data[:size]
    out = list(old)
    where = [k for k in range(count) if marks[k]]
    if not where:
        return [w << strip for w in out]
    head = data.pop(0)
    fraction, log = head >> 4, head & 15
    raw_size = varint(data)
    lanes = []
    for _ in range(4):
        packed = varint(data)
        lanes.append([packed >> 3, packed & 7, varint(data)])
    raw = Bits(bytes(data[:raw_size]))
    del data[:raw_size]
    streams, states = [], []
    for state, skip, size in lanes:
        streams.append(Bits(bytes(data[:size]), skip))
        states.append(state)
        del data[:size]
    tables = read_tables(bytes(data), len(edges) + 1, fraction, log)
    for number, k in enumerate(where):
        lane = number % 4
        key = (old[k] & (full >> 1)) >> (mantissa - 1)
        group = sum(edge <= key for edge in edges)
        token, bits, low = tables[group][states[lane]]
        states[lane] = low + streams[lane].take(bits)
        if mode in ("tokens-diff", "tokens-xor"):
            r = max(0, (token >> depth) - 1)
            z = token - (r << depth) << r | raw.take(r)
        elif token == 0:
            z = raw.take(width - 1 + signed)
        elif token == 1:
            z = raw.take(signed)
        else:
            r = mantissa - depth + signed
            z = token - 2 + first << r | raw.take(r)
        if mode == "tokens-diff":
            d = -(z + 1) // 2 if z & 1 else z // 2
            out[k] = unordered((ordered(old[k], width) + d) & full, width)
        elif mode == "tokens-xor":
            out[k] = old[k] ^ (z >> 1 | (z & 1) << (width - 1))
        else:
            out[k] = (z >> 1 | (z & 1) << (width - 1)) if signed else z
    assert states == [0] * 4
    return [w << strip for w in out]

"""A slow decoder written from FORMAT.md alone, to check both against each other."""

import numpy as np


class Bad(Exception):
    """The stream breaks a rule of FORMAT.md."""


def need(condition, rule):
    if not condition:
        raise Bad(rule)


class Reader:
    def __init__(self, data):
        self.data = bytes(data)
        self.at = 0
        self.half = 0

    def take(self, size):
        need(self.at + size <= len(self.data), "truncated")
        self.at += size
        return self.data[self.at - size : self.at]

    def byte(self):
        return self.take(1)[0]

    def varint(self):
        value = 0
        for k in range(9):
            byte = self.byte()
            value |= (byte & 127) << (7 * k)
            if byte < 128:
                need(byte or k == 0, "long varint")
                return value
        raise Bad("varint over nine bytes")

    def nibble(self):
        if self.half:
            self.half = 0
            return self.data[self.at - 1] >> 4
        self.half = 1
        return self.byte() & 15

    def close_nibbles(self):
        if self.half:
            need(self.data[self.at - 1] >> 4 == 0, "padding")
        self.half = 0


class Bits:
    def __init__(self, data):
        self.bits = "".join(format(b, "08b")[::-1] for b in data)
        self.at = 0

    def take(self, size):
        need(self.at + size <= len(self.bits), "bit stream ends early")
        self.at += size
        return self.bits[self.at - size : self.at]

    def number(self, size):
        return int(self.take(size)[::-1] or "0", 2)

    def code(self, codes):
        word = ""
        while word not in codes:
            word += self.take(1)
        return codes[word]

    def close(self):
        rest = self.bits[self.at :]
        need(len(rest) < 8 and "1" not in rest, "bit stream does not end exactly")


def alphabet(reader, form):
    if form == 0:
        symbols = list(range(reader.byte() + 1))
    elif form == 1:
        low, size = reader.take(2)
        symbols = [(low + k) % 256 for k in range(size + 1)]
    elif form == 2:
        symbols = list(reader.take(reader.byte() + 1))
    else:
        bitmap = reader.take(32)
        symbols = [v for v in range(256) if bitmap[v // 8] >> (v % 8) & 1]
    need(len(symbols) >= 2 and len(set(symbols)) == len(symbols), "alphabet")
    return symbols


def canonical(table):
    """`table`: (length, meaning) in order."""
    need(sum(2.0**-length for length, _ in table) == 1, "Kraft sum")
    codes = {}
    code = 0
    before = 0
    for length, meaning in sorted(table, key=lambda entry: entry[0]):
        code <<= length - before
        before = length
        codes[format(code, f"0{length}b")] = meaning
        code += 1
    return codes


def word_table(reader, symbols):
    table = []
    nodes = unused = 0
    todo = [(s,) for s in reversed(symbols)]
    while todo:
        word = todo.pop()
        nodes += 1
        need(nodes <= 65536, "nodes")
        if unused:
            unused -= 1
            continue
        value = reader.nibble()
        if value == 14:
            unused = reader.nibble() + 2
        elif value == 15:
            need(len(word) < 8, "depth")
            todo += [(*word, s) for s in reversed(symbols)]
        else:
            need(value != 13, "reserved")
            if value:
                table.append((value, word))
    need(not unused, "unused leaves after the end")
    reader.close_nibbles()
    return canonical(table)


def token_table(reader, others):
    classes = others if others <= 8 else 7 + (others - 7).bit_length()
    table = []
    unused = 0
    for c in range(32):
        for v in range(classes):
            if sum(2.0**-length for length, _ in table) >= 1:
                break
            if unused:
                unused -= 1
                continue
            value = reader.nibble()
            if value == 14:
                unused = reader.nibble() + 2
            else:
                need(value <= 12, "reserved")
                if value:
                    table.append((value, (c, v)))
    reader.close_nibbles()
    return canonical(table)


def decode(data):
    reader = Reader(data)
    first = reader.byte()
    count = reader.varint()
    mode = first & 7
    need(mode <= 3, "mode")
    if mode < 2:
        need(first == mode and (mode == 0 or count), "mode byte")
        body = reader.take(count if mode == 0 else 1)
        need(reader.at == len(reader.data), "trailing bytes")
        return np.frombuffer(body if mode == 0 else body * count, np.uint8)
    need(count, "no symbols")
    streams = 1 << (first >> 3 & 3)
    symbols = alphabet(reader, first >> 6)
    codes = word_table(reader, symbols) if mode == 2 else token_table(reader, len(symbols) - 1)
    block = count
    if first & 32:
        block = reader.varint()
        need(256 <= block < count, "block")
    need(block <= 2**31, "block")
    blocks = -(-count // block)
    sizes = [reader.varint() for _ in range(blocks * streams - 1)]
    sizes.append(len(reader.data) - reader.at - sum(sizes))
    need(sizes[-1] >= 0, "sizes")
    result = []
    for b in range(blocks):
        n = min(block, count - b * block)
        part = -(-n // streams)
        for j in range(streams):
            size = min((j + 1) * part, n) - min(j * part, n)
            bits = Bits(reader.take(sizes[b * streams + j]))
            piece = []
            while len(piece) < size:
                if mode == 2:
                    piece += bits.code(codes)
                    continue
                c, v = bits.code(codes)
                run = 2**c - 1 + bits.number(c)
                g = max(v - 7, 0)
                r = v if v < 8 else 6 + 2**g + bits.number(g)
                need(run <= size - len(piece), "run")
                piece += [symbols[0]] * run
                if len(piece) < size:
                    need(r < len(symbols) - 1, "value")
                    piece.append(symbols[r + 1])
            bits.close()
            result += piece[:size]
    return np.array(result, np.uint8)

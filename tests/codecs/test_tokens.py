"""Tokens and raw bits: forms, classes, tables, and payloads that nobody wrote."""

import ml_dtypes
import numpy as np
import pytest
import token_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax import entropy
from lcjax.codecs import _tokens as tokens
from lcjax.codecs import exact
from lcjax.errors import CorruptDataError
from lcjax.hashing import read_only

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def words(values):
    return read_only(values.view(f"u{values.dtype.itemsize}"))


def moved(rng, base, size=1e-3):
    noise = rng.standard_normal(base.size) * size
    return (base.astype(np.float32) * (1 + noise)).astype(base.dtype)


def both_ways(new, base, spec):
    bits, against = words(new), None if base is None else words(base)
    mantissa = tokens.MANTISSA[new.dtype.name]
    payload = tokens.pack(bits, against, mantissa, spec)
    back = tokens.unpack(memoryview(payload), bits.dtype, bits.size, against, mantissa, spec.form)
    assert np.array_equal(back, bits)
    return payload


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 2047, 2048, 2049, 70_001])
@pytest.mark.parametrize(
    "spec",
    [
        tokens.Spec(tokens.DIFF, depth=2),
        tokens.Spec(tokens.DIFF, sparse=True, depth=3),
        tokens.Spec(tokens.XOR, depth=0, edges=(9, 30)),
        tokens.Spec(tokens.ALONE, signed=True, depth=1, first=12),
        tokens.Spec(tokens.ALONE, signed=True, depth=3, edges=(1, 15, 63)),
    ],
)
def test_every_form_round_trips_at_every_size(name, size, spec):
    rng = np.random.default_rng(size)
    base = rng.standard_normal(size).astype(DTYPES[name])
    new = moved(rng, base)
    new[::7] = base[::7]
    new[:3] = np.array([np.nan, -np.inf, -0.0], new.dtype)[:size]
    both_ways(new, base, spec)


@pytest.mark.parametrize("sparse", [False, True])
def test_nothing_changed(sparse):
    base = np.linspace(-1, 1, 5000, dtype=np.float32)
    payload = both_ways(base, base, tokens.Spec(tokens.DIFF, sparse=sparse))
    assert len(payload) < 40


def test_tokens_of_differences_by_hand():
    # One step up and one down from 1.0: zigzags 2 and 1, all tokens and no raw bits. 1.0 to 2.0 is
    # 2^23 steps, zigzag 2^24: with depth 0 the token is 24 + 1 and 24 zeros are raw.
    base = np.ones(3, np.float32)
    new = np.array([np.nextafter(np.float32(1), 2), np.nextafter(np.float32(1), 0), 2], np.float32)
    payload = both_ways(new, base, tokens.Spec(tokens.DIFF))
    # Head, log, 4 bytes of raw bits: 1 of zigzag 2, none of 1, 24 zeros.
    assert list(payload[:4]) == [0, 0, 0, 0]
    assert payload[4] & 15 == 9
    assert payload[5] == 4


def test_values_that_are_shorter_floats_leave_their_zeros_out():
    rng = np.random.default_rng(0)
    short = rng.standard_normal(20_000).astype(ml_dtypes.bfloat16)
    long_mode, long = exact.encode(short.astype(np.float32))
    short_mode, payload = exact.encode(short)
    assert long_mode == short_mode == "tokens"
    assert len(long) < len(payload) * 1.02
    later = moved(rng, short)
    narrow = exact.encode(later, short)[1]
    wide = exact.encode(later.astype(np.float32), short.astype(np.float32))[1]
    assert len(wide) < len(narrow) * 1.02


def test_classes_tell_apart_what_the_base_can():
    # Small values move by a thousand steps, large ones not at all: one bit would tell, and the
    # base's exponent says it.
    rng = np.random.default_rng(1)
    base = np.where(rng.random(100_000) < 0.5, 1e-4, 1.0).astype(np.float32)
    base *= rng.uniform(1, 2, base.size).astype(np.float32)
    new = base.copy()
    small = base < 0.01
    new[small] = (words(base)[small] + np.uint32(1000)).view(np.float32)
    found = tokens.plan(words(new), words(base), 23)
    assert found.spec.form in (tokens.DIFF, tokens.XOR)
    assert len(found.spec.edges) == 1
    payload = both_ways(new, base, tokens.Spec(tokens.DIFF, edges=found.spec.edges))
    # 10 raw bits of the zigzag 2000 where it moved, next to nothing for which did.
    assert len(payload) < small.sum() * 10 / 8 + 300


def test_rows_that_stay_cost_next_to_nothing():
    rng = np.random.default_rng(2)
    base = rng.standard_normal((2000, 64)).astype(np.float32)
    new = base.copy()
    rows = rng.choice(2000, 50, replace=False)
    new[rows] = moved(rng, base[rows].reshape(-1), 1e-1).reshape(50, 64)
    base, new = base.reshape(-1), new.reshape(-1)
    found = tokens.plan(words(new), words(base), 23)
    assert found.spec.sparse
    payload = both_ways(new, base, found.spec)
    assert len(payload) < 50 * 64 * 4


def test_a_fine_tune_of_bfloat16_where_few_values_move():
    rng = np.random.default_rng(3)
    base = (rng.standard_normal(200_000) * 0.02).astype(ml_dtypes.bfloat16)
    move = rng.standard_normal(base.size) * 1e-6
    new = (base.astype(np.float32) + move.astype(np.float32)).astype(ml_dtypes.bfloat16)
    changed = np.mean(words(new) != words(base))
    assert 0.001 < changed < 0.05
    mode, payload = exact.encode(new, base)
    assert mode == "tokens-diff"
    # The entropy of which move, without knowing that it is the small ones.
    flat = -changed * np.log2(changed) - (1 - changed) * np.log2(1 - changed)
    assert len(payload) < 0.85 * flat * base.size / 8


def test_size_is_close_to_the_entropy_of_the_tokens():
    rng = np.random.default_rng(4)
    values = np.exp(rng.standard_normal(300_000)).astype(np.float32)
    spec = tokens.Spec(tokens.ALONE, depth=2, first=(127 - 12) << 2)
    payload = both_ways(values, None, spec)
    leading = words(values) >> 21
    counts = np.bincount(leading)
    share = counts[counts > 0] / values.size
    ideal = (21 - (share * np.log2(share)).sum()) * values.size / 8
    assert ideal < len(payload) < 1.002 * ideal + 200


def test_constants_and_repeated_values_take_planes():
    rng = np.random.default_rng(5)
    values = rng.choice(np.float32([0.1, -0.3, 0.7]), 50_000)
    mode, payload = exact.encode(values)
    assert mode == "float"
    assert len(payload) < 50_000 * 4 * 1.6 / 8 * 1.05
    mode, payload = exact.encode(np.full(50_000, 0.1, np.float32))
    assert len(payload) < 60


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_payloads_are_refused_or_decoded_to_the_count(data):
    name = data.draw(st.sampled_from(sorted(DTYPES)))
    size = data.draw(st.sampled_from([1, 40, 1000, 3000]))
    rng = np.random.default_rng(size)
    base = rng.standard_normal(size).astype(DTYPES[name])
    new = moved(rng, base, data.draw(st.sampled_from([0.0, 1e-3, 1.0])))
    against = data.draw(st.sampled_from([None, base]))
    spec = data.draw(
        st.sampled_from(
            [
                tokens.Spec(tokens.ALONE, signed=True, depth=1),
                tokens.Spec(tokens.DIFF, depth=2, edges=(20, 31)),
                tokens.Spec(tokens.DIFF, sparse=True, edges=(20,)),
                tokens.Spec(tokens.XOR),
            ]
            if against is not None
            else [tokens.Spec(tokens.ALONE, signed=True, depth=3)]
        )
    )
    mantissa = tokens.MANTISSA[name]
    bits = words(new)
    payload = bytearray(
        tokens.pack(bits, None if against is None else words(against), mantissa, spec)
    )
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
        else:
            cut = data.draw(st.integers(0, len(payload)))
            payload[cut:] = payload[cut + data.draw(st.integers(0, 8)) :]
        if not payload:
            break
    form = data.draw(st.sampled_from([tokens.ALONE, tokens.DIFF, tokens.XOR, spec.form]))
    try:
        out = tokens.unpack(
            memoryview(bytes(payload)),
            bits.dtype,
            size,
            None if against is None else words(against),
            mantissa,
            form,
        )
    except CorruptDataError:
        return
    assert out.shape == (size,)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["moved", "alone", "sparse", "flipped", "short", "unchanged"])
def test_a_reader_made_from_the_format_page_reads_the_same(name, kind):
    rng = np.random.default_rng(6)
    base = rng.standard_normal(3001).astype(DTYPES[name])
    new = moved(rng, base, 0.02)
    spec, against = None, words(base)
    if kind == "alone":
        against = None
    elif kind == "sparse":
        new[::3] = base[::3]
        spec = tokens.Spec(tokens.DIFF, sparse=True, depth=2, edges=(11, 14))
    elif kind == "flipped":
        new = (base.astype(np.float32) * rng.choice([-1, 1], base.size)).astype(base.dtype)
    elif kind == "short":  # the lowest bits are 0
        base = (rng.integers(-99, 99, 3001) / 16).astype(base.dtype)
        new, against = base[::-1].copy(), words(base)
    elif kind == "unchanged":
        new = base
        spec = tokens.Spec(tokens.XOR, sparse=True)
    mantissa = tokens.MANTISSA[name]
    bits = words(new)
    spec = spec or tokens.plan(bits, against, mantissa).spec
    payload = tokens.pack(bits, against, mantissa, spec)
    mode = {tokens.DIFF: "tokens-diff", tokens.XOR: "tokens-xor", tokens.ALONE: "tokens"}[spec.form]
    got = token_reference.read(
        *(payload, mode, bits.itemsize * 8, mantissa, bits.size),
        *(None if against is None else against.tolist(), entropy.decode),
    )
    assert got == bits.tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1 << 22), min_size=1, max_size=256), st.integers(0, 3))
def test_tables_come_back_and_their_shares_fill_the_states(counts, fraction):
    from lcjax.codecs import _ans_kernels as ans

    given_ = np.zeros((2, 256), np.int64)
    given_[0, : len(counts)] = counts
    given_[0, 0] += not any(counts)
    given_[1, 255] = 1
    written, read = np.zeros_like(given_), np.zeros_like(given_)
    out = np.zeros(2 * 513, np.uint8)
    size = ans._write_tables(given_, fraction, written, out)
    assert ans._read_tables(read_only(out[: (size + 7) // 8]), fraction, read) == size
    assert np.array_equal(written, read)
    assert np.array_equal(written > 0, given_ > 0)
    shares = np.zeros_like(given_)
    assert ans._normalize(read, 10, shares)
    assert shares.sum(axis=1).tolist() == [1024, 1024]
    assert np.array_equal(shares > 0, given_ > 0)
    assert not ans._normalize(np.zeros_like(read), 10, shares)


def test_damage_is_named():
    base = np.linspace(1, 2, 1000, dtype=np.float32)
    new = moved(np.random.default_rng(0), base)
    mode, payload = exact.encode(new, base)
    assert mode == "tokens-diff"

    def read(data, mode=mode, against=base, dtype=base.dtype, count=1000):
        return exact.decode(memoryview(data), mode, dtype, count, against)

    with pytest.raises(CorruptDataError, match="needs a base"):
        read(payload, against=None)
    with pytest.raises(CorruptDataError, match="'tokens-diff' is not for float64"):
        read(payload, dtype=np.dtype(float), against=base.astype(float))
    with pytest.raises(CorruptDataError, match="form that is out of range"):
        read(b"\xff" + payload[1:])
    with pytest.raises(CorruptDataError, match="form that is out of range"):
        read(b"")
    with pytest.raises(CorruptDataError, match="longer than its bytes"):
        read(payload[:40])
    with pytest.raises(CorruptDataError, match="tables end elsewhere"):
        read(payload + b"x")
    with pytest.raises(CorruptDataError, match="do not end where its bits do"):
        read(payload, count=999, against=base[:999])

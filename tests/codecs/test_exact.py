"""The exact codec: every bit comes back, whatever the dtype, with and without a base."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax.codecs import exact
from lcjax.dtypes import DTYPES
from lcjax.errors import CorruptDataError


def random_bits(rng, dtype, size):
    """Arrays of any bit pattern that the dtype can hold."""
    if dtype == np.bool_:
        return rng.integers(0, 2, size).astype(bool)
    if dtype.itemsize == 1 and ml_dtypes_bits(dtype) < 8:
        return rng.integers(0, 1 << ml_dtypes_bits(dtype), size).astype(np.uint8).view(dtype)
    return rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)


def ml_dtypes_bits(dtype):
    if "int" in dtype.name:
        return ml_dtypes.iinfo(dtype).bits if dtype.kind == "V" else dtype.itemsize * 8
    digits = {"float6": 6, "float4": 4}
    return next((n for prefix, n in digits.items() if dtype.name.startswith(prefix)), 8)


def same_bits(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5, 3000])
def test_round_trip_of_any_bits(name, size):
    dtype = DTYPES[name]
    rng = np.random.default_rng(size)
    base = random_bits(rng, dtype, size)
    values = base.copy()
    changed = rng.integers(0, max(size, 1), size // 3)
    values[changed] = random_bits(rng, dtype, changed.size)
    for against in (None, base, random_bits(rng, dtype, size)):
        mode, payload = exact.encode(values, against)
        out = exact.decode(memoryview(payload), mode, dtype, size, against)
        assert same_bits(out, values)


def test_mostly_unchanged_values_cost_next_to_nothing():
    rng = np.random.default_rng(0)
    base = rng.standard_normal(100_000).astype(np.float32)
    values = base.copy()
    values[::1000] += 1
    mode, payload = exact.encode(values, base)
    assert mode in ("tokens-diff", "tokens-xor")
    assert len(payload) < values.nbytes / 200


def test_a_base_that_does_not_help_is_not_used():
    rng = np.random.default_rng(0)
    values = np.ones(10_000, np.float32)
    mode, payload = exact.encode(values, rng.standard_normal(10_000).astype(np.float32))
    assert mode == "float"
    assert len(payload) < 40


def test_smooth_changes_of_floats_are_small_integers():
    rng = np.random.default_rng(1)
    base = rng.standard_normal(50_000).astype(np.float32)
    values = base * np.float32(1 + 1e-5)
    alone = len(exact.encode(values)[1])
    mode, payload = exact.encode(values, base)
    assert mode == "tokens-diff"
    assert len(payload) < alone / 2


def test_flipped_signs_are_one_bit_each():
    rng = np.random.default_rng(2)
    base = rng.standard_normal(50_000).astype(np.float32)
    values = base * rng.choice(np.float32([-1, 1]), base.size)
    mode, payload = exact.encode(values, base)
    assert mode == "tokens-xor"
    assert base.size / 8 <= len(payload) < base.size / 8 + 200


def test_specials_keep_their_payloads():
    bits = np.array([0x7FC12345, 0xFF800001, 0x80000000, 1, 0x807FFFFF, 0x7F800000], np.uint32)
    values = bits.view(np.float32)
    for base in (None, values[::-1].copy()):
        mode, payload = exact.encode(values, base)
        out = exact.decode(memoryview(payload), mode, values.dtype, values.size, base)
        assert np.array_equal(out.view(np.uint32), bits)


def test_difference_of_floats_by_hand():
    # 1.0 -> the next float is one step up in the ordered integers: zigzag 2. Down: zigzag 1.
    from lcjax.codecs import _exact_kernels as kernels

    one = np.array([1, 1, -1, 0.0], np.float32)
    new = np.array([np.nextafter(np.float32(1), 2), np.nextafter(np.float32(1), 0), -1, -0.0], "f4")
    out = np.empty(4, np.uint32)
    kernels.difference(new.view(np.uint32), one.view(np.uint32), out, True)
    assert out.tolist() == [2, 1, 0, 1]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(exact.MODES), st.integers(0, 40))
def test_random_payloads_are_refused_or_decoded_to_the_count(data, mode, count):
    base = np.zeros(count, np.float32)
    try:
        out = exact.decode(memoryview(data), mode, np.dtype(np.float32), count, base)
    except CorruptDataError:
        return
    assert out.shape == (count,)


def test_damage_is_named():
    values = np.arange(1000, dtype=np.int32)
    mode, payload = exact.encode(values)
    with pytest.raises(CorruptDataError, match="unknown mode 'zip'"):
        exact.decode(memoryview(payload), "zip", values.dtype, 1000)
    with pytest.raises(CorruptDataError, match="needs a base"):
        exact.decode(memoryview(payload), "diff", values.dtype, 1000)
    with pytest.raises(CorruptDataError, match="after the last plane"):
        exact.decode(memoryview(payload + b"x"), mode, values.dtype, 1000)
    with pytest.raises(CorruptDataError):
        exact.decode(memoryview(payload[:-1]), mode, values.dtype, 1000)
    with pytest.raises(CorruptDataError):
        exact.decode(memoryview(payload), mode, values.dtype, 999)

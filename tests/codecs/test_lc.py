"""LC-Checkpoint's quantizer: the paper's example, its rules, encoder against decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax.codecs import lc
from lcjax.entropy import huffman

U = np.array([1.34, 1.02, 0.39, 1.37, 1.34, 1.77, 1.03, 1.58, 1.93, 1.03], np.float32)
C = np.array([0.58, 1.5, 0.19, 1.3, 1.16, 1.28, 0.89, 1.19, 1.11, 0.94], np.float32)


def decoded(c, group, table):
    out = c.copy()
    lc.apply(out, group.codes, table)
    out[group.exceptions] = group.exact
    return out


def bits_of(array):
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def test_the_papers_worked_example():
    result = lc.quantize([(U, C)], bits=2)
    assert np.round(result.table, 2).tolist() == np.float32([0, 0.79, 0.44, -0.48]).tolist()
    codes = result.groups[0].codes
    assert codes.tolist() == [1, 3, 0, 0, 0, 2, 0, 2, 1, 0]
    quantized = result.table[codes]
    expected = np.float32([0.79, -0.48, 0, 0, 0, 0.44, 0, 0.44, 0.79, 0])
    assert np.round(quantized, 2).tolist() == expected.tolist()
    lengths = huffman.code_lengths(np.bincount(codes, minlength=4), 12)
    assert lengths.tolist() == [1, 2, 3, 3]
    words = huffman.canonical_codes(lengths)
    texts = [f"{int(w):0{int(n)}b}" for w, n in zip(words, lengths, strict=True)]
    assert texts == ["0", "10", "110", "111"]


def plain_lc(u, c, bits):
    """The published rule with numpy and dictionaries, for finite float32 input."""
    d = u - c
    keys = np.where(np.abs(d) >= 2.0**-125, 2 * ((d.view("u4") >> 23) & 255) + (d > 0), 0)
    kept = sorted(set(keys.tolist()) - {0}, reverse=True)[: 2**bits - 1]
    codes = np.zeros(d.shape, np.uint8)
    table = [0.0]
    for k, key in enumerate(kept):
        members = d[keys == key].astype(np.float64)
        table.append((members.max() + members.min()) / 2)
        codes[keys == key] = k + 1
    return codes, np.float32(table)


@pytest.mark.parametrize("bits", range(1, 9))
def test_equals_a_plain_reading_of_the_rule(bits):
    rng = np.random.default_rng(bits)
    u = rng.standard_normal(70_000).astype(np.float32)
    d = rng.standard_normal(u.size) * 10.0 ** rng.uniform(-20, 1, u.size)
    c = (u - d.astype(np.float32)).astype(np.float32)
    result = lc.quantize([(u, c)], bits)
    codes, table = plain_lc(u, c, bits)
    assert np.array_equal(result.groups[0].codes, codes)
    assert np.array_equal(result.table, table)
    assert result.table.size <= 2**bits


def test_empty_exponents_do_not_use_up_codes():
    # One outlier 60 exponents above the rest: the window of 32 keys must move on.
    u = np.float32([2.0**40, 2.0**-20, -(2.0**-21), 2.0**-22, 0])
    result = lc.quantize([(u, np.zeros(5, np.float32))], bits=2)
    assert result.groups[0].codes.tolist() == [1, 2, 3, 0, 0]
    assert result.table.tolist() == [0, 2.0**40, 2.0**-20, -(2.0**-21)]


def test_positive_comes_first_between_equal_exponents():
    u = np.float32([-1.5, 1.25, -3])
    result = lc.quantize([(u, np.zeros(3, np.float32))], bits=2)
    assert result.table.tolist() == [0, -3, 1.25, -1.5]


def test_whole_model_scope_shares_one_table():
    big, small = np.float32([8, -8]), np.float32([1, -1])
    zero = np.zeros(2, np.float32)
    together = lc.quantize([(big, zero), (small, zero)], bits=1)
    assert together.table.tolist() == [0, 8]
    assert together.groups[1].codes.tolist() == [0, 0]
    alone = lc.quantize([(small, zero)], bits=1)
    assert alone.table.tolist() == [0, 1]


def odd_values(rng, size, dtype):
    """Values over all magnitudes with every special one among them, NaN payloads too."""
    values = rng.uniform(-3, 3, size) * 10.0 ** rng.uniform(-44, 38, size)
    out = values.astype(np.float32)
    specials = [np.inf, -np.inf, np.nan, -0.0, 0.0, 1e-40, -1e-42, 3.4e38, -3.4e38, 2.0**-126]
    where = rng.integers(0, size, 40)
    out[where] = rng.choice(np.float32(specials), 40)
    out = out.astype(dtype)
    bits = out.view(f"u{dtype.itemsize}")
    # Quiet and signalling NaNs with payloads, of both signs.
    payloads = [0x7FC1, 0xFFC5, 0x7F81, 0xFFA0]
    shift = 16 if dtype.itemsize == 4 else 0
    bits[rng.integers(0, size, 4)] = [(p << shift) + (shift and 3) for p in payloads]
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [1, 3, 5])
def test_decoder_rebuilds_the_encoders_reference_bit_for_bit(dtype, bits):
    rng = np.random.default_rng(7)
    c = odd_values(rng, 100_000, jnp.dtype(dtype))
    for _ in range(4):
        u = odd_values(rng, c.size, jnp.dtype(dtype))
        result = lc.quantize([(u, c)], bits)
        group = result.groups[0]
        assert np.array_equal(bits_of(decoded(c, group, result.table)), bits_of(group.reference))
        with np.errstate(all="ignore"):
            finite = np.isfinite(u.astype(np.float32) - c.astype(np.float32))
        assert np.array_equal(group.exceptions, np.flatnonzero(~finite))
        assert np.array_equal(bits_of(group.reference)[~finite], bits_of(u)[~finite])
        c = group.reference


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_device_arrays_give_the_same_as_host_arrays(dtype):
    rng = np.random.default_rng(3)
    u, c = (odd_values(rng, 3_000_000, jnp.dtype(dtype)) for _ in range(2))
    host = lc.quantize([(u, c)], 3)
    device = lc.quantize([(jnp.asarray(u), jnp.asarray(c))], 3)
    assert np.array_equal(host.table, device.table)
    for a, b in zip(host.groups, device.groups, strict=True):
        assert np.array_equal(a.codes, b.codes)
        assert np.array_equal(bits_of(a.reference), bits_of(np.asarray(b.reference)))
        assert np.array_equal(a.exceptions, b.exceptions)
        assert np.array_equal(bits_of(a.exact), bits_of(b.exact))


def test_unchanged_elements_keep_their_bits():
    c = np.float32([-0.0, 0.0, 1e-41, -1e-41, 5, np.inf])
    result = lc.quantize([(c.copy(), c)], 3)
    assert result.groups[0].codes.tolist() == [0] * 6
    assert np.array_equal(bits_of(result.groups[0].reference), bits_of(c))
    assert result.groups[0].exceptions.tolist() == []  # inf - inf is not finite, but inf stays


def test_subnormal_references_are_zeros_to_the_sum():
    c = np.float32([1e-41, -1e-41])
    u = np.float32([2, 2])
    result = lc.quantize([(u, c)], 1)
    assert result.groups[0].reference.tolist() == [2, 2]


def test_fidelity_is_measured_on_the_new_reference():
    result = lc.quantize([(U, C)], 2)
    error = U - result.groups[0].reference
    assert result.fidelity.max_error == pytest.approx(np.abs(error).max())
    assert result.fidelity.error_squares == pytest.approx((error**2).sum(), rel=1e-5)
    assert result.fidelity.delta_squares == pytest.approx(((U - C) ** 2).sum(), rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_kept_elements_are_within_half_a_bucket(size, bits, seed):
    rng = np.random.default_rng(seed)
    u = rng.standard_normal(size).astype(np.float32)
    c = np.zeros(size, np.float32)
    result = lc.quantize([(u, c)], bits)
    codes, reference = result.groups[0].codes, result.groups[0].reference
    kept = codes > 0
    assert np.all(np.abs(u - reference)[kept] <= np.abs(u)[kept] / 2)
    lowest = np.abs(u[kept]).min() if kept.any() else np.inf
    assert np.all(np.abs(u[~kept]) < 2 * lowest)


@pytest.mark.parametrize("bits", [3, 6])
def test_lowers_for_tpu_and_gpu(bits):
    tiles = jax.ShapeDtypeStruct((2, lc.TILE_ROWS, lc.TILE_LANES), jnp.uint32)
    narrow = jax.ShapeDtypeStruct(tiles.shape, jnp.uint16)
    codes = jax.ShapeDtypeStruct(tiles.shape, jnp.uint8)
    keys = jax.ShapeDtypeStruct((2**bits - 1,), jnp.int32)
    table = jax.ShapeDtypeStruct((2**bits,), jnp.float32)
    key = jax.ShapeDtypeStruct((), jnp.int32)
    for values in (tiles, narrow):
        for name, extra in {
            "largest_key": (key,),
            "key_window": (key,),
            "codes": (keys,),
            "apply": (codes, table),
            "anomalous": (),
        }.items():
            exported = jax.export.export(lc._built(name), platforms=["tpu", "cuda"])(
                values, values, *extra
            )
            text = exported.mlir_module()
            assert "f64" not in text
            assert "xi64>" not in text.split("func.func public", 1)[1].split("stablehlo.while")[0]
            assert "custom_call" not in text or "callback" not in text


def test_refuses_other_widths():
    with pytest.raises(ValueError, match="bits must be 1 to 8, got 9"):
        lc.quantize([(U, C)], 9)

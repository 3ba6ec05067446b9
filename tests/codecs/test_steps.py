"""Steps, levels and predicted moments: hand-computed values, round trips, hostile payloads."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax.codecs import levels, moments, steps
from lcjax.errors import CorruptDataError

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype("f4"), BF16, np.dtype("f2")]
ODD = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-41, -1e-41, 3e38, 1e-38]


def values(data, dtype, size):
    """Finite values of one magnitude, with odd ones strewn in."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    out = rng.standard_normal(size) * 10.0 ** data.draw(st.integers(-4, 2))
    for where in data.draw(st.lists(st.integers(0, size - 1), max_size=6)) if size else ():
        out[where] = ODD[rng.integers(len(ODD))]
    with np.errstate(over="ignore"):
        return out.astype(dtype)


class TestSteps:
    def test_by_hand(self):
        c = np.zeros(8, np.float32)
        u = np.array([0.5, -0.5, 0.75, 1.5, 1.625, -2.625, np.nan, 200], np.float32)
        made = steps.quantize(u, c, 1.0, 0.5, 0.75)
        # |d| <= 0.5 is code 0; (0.5, 1.5] is bin 1; (1.5, 2.5] is bin 2; (2.5, 3.5] is bin 3.
        assert made.codes.tolist() == [0, 0, 1, 3, 3, 6, 0, 0]
        assert made.table.tolist() == [0, 0.75, -0.75, 1.75, -1.75, 2.75, -2.75]
        assert made.where.tolist() == [6, 7]
        assert made.reference[:6].tolist() == [0, 0, 0.75, 1.75, 1.75, -2.75]
        assert np.isnan(made.reference[6]) and made.reference[7] == 200
        assert (made.losses.zeros, made.losses.odd, made.losses.max_error) == (2, 2, 0.5)
        assert made.losses.error_squares == 0.25 + 0.25 + 0 + 0.0625 + 0.015625 + 0.015625

    def test_middles_are_within_half_a_step(self):
        rng = np.random.default_rng(0)
        u, c = (rng.standard_normal(5000).astype(np.float32) for _ in range(2))
        made = steps.quantize(u, c, steps.bounded_step(0.01), 0.5)
        assert np.abs(u.astype(float) - made.reference).max() <= 0.01 * (1 + 1e-5)

    @pytest.mark.parametrize("bound", [0.01, 1e-3, 0.5, 3.7e-9])
    def test_bounded_step_is_on_its_grid(self, bound):
        step = steps.bounded_step(bound)
        assert 0.9 * 2 * bound < step <= 2 * bound
        assert np.float32(step) == step  # few bits, so exact in float32

    def test_additions_on_the_grid_are_exact(self):
        rng = np.random.default_rng(1)
        u = rng.standard_normal(2000).astype(np.float32)
        key = steps.encode_key(u, -10)
        c, n = key.reference, np.rint(key.reference.astype(float) * 2**30)
        for _ in range(5):
            u = u + rng.standard_normal(2000).astype(np.float32) * np.float32(0.01)
            made = steps.quantize(u, c, 0.013, 0.5, 0.9)
            n += np.rint(made.table[made.codes].astype(float) * 2**30)
            c = made.reference
        assert np.array_equal(c.astype(float) * 2**30, n)

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.sampled_from(FLOATS), st.integers(0, 300))
    def test_what_is_stored_is_what_a_reader_applies(self, data, dtype, size):
        u, c = values(data, dtype, size), values(data, dtype, size)
        made = steps.quantize(u, c, data.draw(st.floats(1e-6, 10)), 0.5, 0.9)
        again = c.copy()
        steps.apply(again, made.codes, made.table)
        again[made.where] = made.exact
        assert again.tobytes() == made.reference.tobytes()
        odd = ~np.isfinite(u.astype("f4"))
        assert made.reference[odd].tobytes() == u[odd].tobytes()

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.sampled_from(FLOATS), st.integers(0, 300), st.integers(-126, 100))
    def test_key_frames_round_trip(self, data, dtype, size, exponent):
        u = values(data, dtype, size)
        key = steps.encode_key(u, exponent)
        payload = memoryview(key.payload)
        got = steps.decode_key(payload, exponent, key.exceptions, dtype, size)
        assert got.tobytes() == key.reference.tobytes()
        finite = np.isfinite(u.astype("f8")) & np.isfinite(got.astype("f8"))
        error = np.abs(u.astype("f8")[finite] - got.astype("f8")[finite])
        ulp = {4: 2.0**-23, 2: 2.0**-7}[dtype.itemsize]
        assert np.all(error <= 2.0**exponent / 2 + np.abs(u.astype("f8")[finite]) * ulp + 1e-37)
        for damaged in (key.payload[:-1], key.payload + b"\0", b""):
            if size:
                with pytest.raises(CorruptDataError):
                    steps.decode_key(memoryview(damaged), exponent, key.exceptions, dtype, size)

    def test_grid_exponent(self):
        assert steps.grid_exponent(0.3, 1.0) == -2
        assert steps.grid_exponent(1e-9, 1.0) == -23  # |n| <= 2^23 for 1.0 = 0.5 * 2^1
        assert steps.grid_exponent(0.0, 0.0) == -126

    def test_shorten(self):
        u = np.array([1.0, 1.25, 1.3, -1.3, 5.5], np.float32)
        assert steps.shorten(u, 1).tolist() == [1.0, 1.5, 1.5, -1.5, 6.0]
        assert steps.shorten(u, 23).tolist() == u.tolist()


class TestLevels:
    def test_by_hand(self):
        u = np.array([1.0, 4.0, 0.5, 0.0, 2.0, np.inf, 1.0], np.float32)
        c = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 3.0], np.float32)
        made = levels.encode(u, c, 2.0, 0.5)
        # 128 levels a symbol: 4 / 1 is two octaves up (symbol 1), 0.5 half a stride down
        # (symbol 0), 1 / 3 is 96 levels down (symbol 2).
        assert made.spec == levels.Spec(shift=0, stride=128, extra=0, low=(127 + 1) * 64)
        assert made.reference.tolist() == [1.0, 4.0, 1.0, 0.0, 2.0, np.inf, 0.75]
        assert (made.exceptions, made.losses.zeros, made.losses.odd) == (1, 3, 1)
        assert made.losses.max_octaves == 1.0

    def test_drift_moves_what_the_dead_zone_holds(self):
        c = np.full(100, 1.0, np.float32)
        u = np.full(100, 1.5, np.float32)
        total, count = levels.drift(u, c)
        assert (total, count) == (3200, 100)
        made = levels.encode(u, c, 2.0, 0.5, 32)
        assert np.all(made.reference == 1.5) and made.losses.zeros == 100

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.sampled_from([np.dtype("f4"), BF16]), st.integers(0, 300))
    def test_round_trip_and_never_zero(self, data, dtype, size):
        octaves = data.draw(st.sampled_from([1 / 64, 0.5, 1.0, 2.0]))
        u, c = np.abs(values(data, dtype, size)), np.abs(values(data, dtype, size))
        c = levels.encode(c, None, 0.25, 0.5).reference
        shift = data.draw(st.integers(-200, 200))
        made = levels.encode(u, c, octaves, 0.5, shift)
        got = c.copy()
        levels.decode(memoryview(made.payload), made.spec, made.exceptions, got)
        assert got.tobytes() == made.reference.tobytes()
        assert np.array_equal(got.astype("f4") == 0, u.astype("f4") == 0)
        normal = np.isfinite(u.astype("f4")) & (u.astype("f4") > 2e-38) & (c.astype("f4") > 0)
        ratio = np.abs(np.log2(u[normal].astype("f8") / got[normal].astype("f8")))
        assert np.all(ratio <= octaves / 2 + 0.2)  # levels are linear within an octave

    @pytest.mark.parametrize("dtype", [np.dtype("f4"), BF16], ids=lambda d: d.name)
    def test_symbols_that_depend_on_the_level_go_into_classes(self, dtype):
        # What is small rises in one of two cases, what is large never changes.
        c = np.repeat(np.array([2.0**-20, 1.0], np.float32), 4000).astype(dtype)
        c[::100] = 0
        rng = np.random.default_rng(0)
        rises = (rng.random(c.size) < 0.5) & (c.astype("f4") < 0.5)
        u = np.where(rises, 16 * c.astype("f4"), c.astype("f4")).astype(dtype)
        made = levels.encode(u, c, 2.0, 0.5)
        assert len(made.spec.edges) == 1
        assert (127 - 20) * 64 < made.spec.edges[0] <= 127 * 64
        got = c.copy()
        levels.decode(memoryview(made.payload), made.spec, made.exceptions, got)
        assert got.tobytes() == made.reference.tobytes()
        # 3,960 symbols of one bit, and streams that say nothing.
        assert 3960 / 8 <= len(made.payload) < 3960 / 8 + 40

    def test_classes_are_joined_while_that_saves_bytes(self):
        from lcjax.codecs import _class_kernels as kernels

        counts = np.zeros((4, 256), np.int64)
        counts[0, 0] = counts[1, 0] = 100
        counts[2, 1] = 1
        counts[3, 1] = 100
        begins = np.zeros(4, np.int64)
        # One symbol among 101 others costs 0.08 bits each: more than a stream of its own saves.
        left, bits = kernels.merge_classes(counts.copy(), 4.0, 0.0, 16, begins)
        assert left == 2
        assert bits == 8.0  # of streams: all symbols of each are the same
        assert begins[:2].tolist() == [0, 2]
        # Streams that cost more than the 201 bits which telling them apart saves.
        assert kernels.merge_classes(counts.copy(), 300.0, 0.0, 16, begins)[0] == 1
        assert kernels.merge_classes(counts.copy(), 0.0, 0.0, 1, begins)[0] == 1

    @settings(max_examples=100, deadline=None)
    @given(
        st.binary(max_size=60),
        st.integers(0, 3),
        st.integers(-300, 300),
        st.integers(1, 999),
        st.sets(st.integers(1, 16319), max_size=15),
    )
    def test_hostile_payloads(self, payload, exceptions, shift, stride, edges):
        reference = np.linspace(0, 1, 40, dtype=np.float32)
        spec = levels.Spec(shift, stride, -stride, 16319, tuple(sorted(edges)))
        assert levels.valid(spec)
        try:
            levels.decode(memoryview(payload), spec, exceptions, reference)
        except CorruptDataError:
            return
        assert reference.shape == (40,)


class TestMoments:
    def test_by_hand(self):
        trail = np.array([0.1, -0.2, 0.0, 0.4], np.float32)
        nu = np.array([4.0, 0.25, 9.0, 0.0], np.float32)
        m = np.array([-0.4, 0.2, 0.3, 0.0], np.float32)
        root = moments.root_of(nu)
        assert root.tolist() == [2.0, 0.5, 3.0, 0.0]
        # y = m / root = -0.2, 0.4, 0.1 and p = root D = 0.2, -0.1, 0; the last has no root.
        assert moments.fit(m, trail, root) == pytest.approx(
            (-0.08 - 0.02, 0.05, 0.29, -0.02 - 0.08, 0.05, 0.21, 3)
        )
        made = moments.encode(m, trail, root, -2.0, None, 0.5)
        assert made.values == pytest.approx([-0.4, 0.2, 0.0, 0.0])

    def test_trails_by_hand(self):
        c = np.array([[1, 2, 1], [3, 2, np.inf], [2, 6, 5], [2, 7, 6]], np.float32)
        trail = moments.extended(None, c[1], c[0], 128)
        assert trail.tolist() == [2.0, 0.0, 0.0]  # what is not finite counts as 0
        second = moments.extended(trail, c[2], c[1], 128)
        assert second.tolist() == [0.5 * 2 - 1, 4.0, 0.0]
        assert trail.tolist() == [2.0, 0.0, 0.0]
        assert moments.extended(second, c[3], c[2], 0).tolist() == [0.0, 1.0, 1.0]
        assert moments.extended(second, c[3], c[2], 256).tolist() == [0.0, 5.0, 1.0]

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.sampled_from(FLOATS), st.integers(0, 300), st.booleans())
    def test_round_trip(self, data, dtype, size, coded):
        m = values(data, dtype, size)
        trail = moments.extended(None, values(data, dtype, size), values(data, dtype, size), 0)
        root = moments.root_of(np.abs(values(data, np.dtype("f4"), size)))
        gain = float(np.float32(data.draw(st.floats(-100, 100))))
        step = data.draw(st.floats(1e-3, 10)) if coded else None
        made = moments.encode(m, trail, root, gain, step, 0.5)
        got = moments.decode(
            *(memoryview(made.payload), trail, root, gain, made.table, made.exceptions, dtype)
        )
        assert got.tobytes() == made.values.tobytes()
        odd = ~np.isfinite(m.astype("f4"))
        assert got[odd].tobytes() == m[odd].tobytes()

"""The two hashes: hand-computed values, order independence, host against device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lcjax import boxes, hashing

MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    x = ((x ^ x >> 16) * 0x7FEB352D) & MASK
    x = ((x ^ x >> 15) * 0x846CA68B) & MASK
    return x ^ x >> 16


def by_hand(words: list[int], start: int = 0) -> str:
    low = high = 0
    for k, word in enumerate(words):
        t = mix(word ^ ((start + k) * 0x9E3779B1 + 0x7F4A7C15) & MASK)
        low += t
        high += mix((t + 0x6C62272E) & MASK)
    return f"{(high & MASK) << 32 | low & MASK:016x}"


def test_bytes_hash_is_xxh3():
    # XXH3-64 and XXH3-128 of no bytes with seed 0, from the algorithm's published test vectors.
    assert hashing.bytes_hash(b"") == "2d06800538d394c2"
    assert hashing.content_name(b"") == "99aa06d3014798d86001c324468d497f"


def test_value_hash_of_known_words():
    assert hashing.value_hash(np.array([1, 2, 0xFFFFFFFF], np.uint32)) == by_hand([1, 2, MASK])
    assert hashing.value_hash(np.array([7], np.uint8), 5) == by_hand([7], 5)
    assert hashing.value_hash(np.array([], np.float32)) == "0" * 16


def test_wide_elements_are_words_low_first():
    value = np.array([0x1122334455667788], np.uint64)
    assert hashing.value_hash(value, 3) == by_hand([0x55667788, 0x11223344], 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "float16", "int32"])
def test_device_hash_equals_host_hash(dtype):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(5000) * 50).astype(jnp.dtype(dtype))
    starts = np.array([10, 0, 7, 0], np.int32)
    sizes = np.array([1000, 0, 3999, 1], np.int32)
    run = jax.jit(hashing.value_hash_device, static_argnums=3)
    lanes = np.asarray(run(values, starts, sizes, 5000))
    ends = np.cumsum(sizes)
    for (low, high), start, size, end in zip(lanes, starts, sizes, ends, strict=True):
        expected = hashing.value_hash(values[end - size : end], int(start))
        assert f"{int(high) << 32 | int(low):016x}" == expected


def test_every_bit_counts():
    values = np.zeros(64, np.float32)
    plain = hashing.value_hash(values)
    seen = {plain}
    for k in range(64):
        for bit in range(32):
            flipped = values.copy()
            flipped.view(np.uint32)[k] ^= np.uint32(1 << bit)
            seen.add(hashing.value_hash(flipped))
    assert len(seen) == 1 + 64 * 32


def test_two_flipped_signs_do_not_cancel():
    values = np.arange(100, dtype=np.float32)
    changed = values.copy()
    changed[[3, 50]] *= -1
    assert hashing.value_hash(values) != hashing.value_hash(changed)


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=3),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_boxes_cover_and_their_hashes_add_up(shape, limit, seed):
    shape = tuple(shape)
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    parts = boxes.split(shape, limit)
    assert boxes.tile_exactly(shape, parts)
    hashes = []
    for box in parts:
        piece = np.ascontiguousarray(values[boxes.slices(box)])
        start = boxes.flat_start(box, shape)
        assert np.array_equal(piece.reshape(-1), values.reshape(-1)[start : start + piece.size])
        assert piece.size <= limit or piece.size == 1 or piece.size == 0
        hashes.append(boxes.box_hash(piece, box, shape))
    assert hashing.combine(hashes) == hashing.value_hash(values)


def test_hash_of_shards_that_are_not_contiguous():
    values = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    cuts = [((0, 0, 0), (4, 2, 6)), ((0, 2, 0), (4, 5, 4)), ((0, 2, 4), (4, 5, 6))]
    assert boxes.tile_exactly((4, 5, 6), cuts)
    parts = [
        boxes.box_hash(np.ascontiguousarray(values[boxes.slices(b)]), b, (4, 5, 6)) for b in cuts
    ]
    assert hashing.combine(parts) == hashing.value_hash(values)


def test_overlapping_boxes_are_not_a_tiling():
    assert not boxes.tile_exactly((4,), [((0,), (2,)), ((1,), (3,))])
    assert not boxes.tile_exactly((4,), [((0,), (2,))])
    assert not boxes.tile_exactly((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))])


def test_indices_beyond_32_bits_stay_distinct_from_each_other():
    # Shapes alone are enough to test the arithmetic of leaves over 2^31 elements.
    shape = (1 << 20, 1 << 13)
    parts = boxes.split(shape)
    assert boxes.tile_exactly(shape, parts)
    assert boxes.flat_start(parts[-1], shape) == (1 << 33) - boxes.CHUNK_ELEMENTS
    value = np.ones(4, np.float32)
    assert hashing.value_hash(value, 1 << 33) == by_hand([0x3F800000] * 4, 1 << 33)

import numpy as np
import pytest
from entropy_data import gaussian, signed, skewed

from lcjax import entropy

MILLION = 1_000_000


def size_and_bound(symbols):
    data = entropy.encode(symbols)
    np.testing.assert_array_equal(entropy.decode(data), symbols)
    return len(data), entropy.entropy_bits(symbols) * symbols.size / 8


@pytest.mark.parametrize("p0", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999])
def test_skewed(p0):
    size, ideal = size_and_bound(skewed(p0, MILLION))
    assert size <= 1.02 * ideal + 96


@pytest.mark.parametrize(
    ("bits", "sigma"),
    [(3, 0.5), (3, 1.0), (3, 2.0), (4, 0.5), (4, 1.0), (4, 2.0), (4, 4.0), (8, 6.3)],
)
def test_gaussian(bits, sigma):
    size, ideal = size_and_bound(gaussian(bits, sigma, MILLION))
    assert size <= 1.02 * ideal + 96


@pytest.mark.parametrize("p0", [0.5, 0.8, 0.9, 0.97, 0.995])
def test_many_values_and_many_zeros(p0):
    size, ideal = size_and_bound(signed(10, p0, MILLION))
    assert size <= 1.03 * ideal + 160


def test_long_inputs_coded_after_a_survey():
    for p0 in (0.5, 0.8, 0.9, 0.96):
        size, ideal = size_and_bound(skewed(p0, 5 * MILLION))
        assert size <= 1.02 * ideal + 96


def test_uniform_grows_little():
    for count in (1, 10, 1000, MILLION, 5 * MILLION):
        symbols = np.random.default_rng(0).integers(0, 256, count).astype(np.uint8)
        assert len(entropy.encode(symbols)) <= count + 6


def test_constant():
    assert len(entropy.encode(np.full(2**26, 9, np.uint8))) <= 8


@pytest.mark.parametrize(("count", "p0", "most"), [(1, 0.5, 3), (10, 0.5, 10), (200, 0.95, 36)])
def test_small(count, p0, most):
    for seed in range(20):
        symbols = skewed(p0, count, 3, seed)
        assert len(entropy.encode(symbols)) <= most


def test_a_hundred_symbols_at_half_a_bit():
    sizes = [len(entropy.encode(skewed(0.92, 100, 3, seed))) for seed in range(50)]
    assert np.mean(sizes) <= 20


def test_order_beyond_single_counts_is_used():
    # Pairs 01 and 23 only: one bit a symbol, where single symbols have two.
    pairs = np.random.default_rng(0).integers(0, 2, 200_000)
    symbols = np.stack([2 * pairs, 2 * pairs + 1], axis=1).astype(np.uint8).reshape(-1)
    assert len(entropy.encode(symbols)) <= 0.7 * entropy.entropy_bits(symbols) * symbols.size / 8

"""Symbol sources that the tests share."""

import numpy as np


def skewed(p0, count, others=7, seed=0):
    """Symbol 0 with probability p0, the rest over `others` values, halving each time."""
    rng = np.random.default_rng(seed)
    rest = 0.5 ** np.arange(1, others + 1)
    p = np.concatenate([[p0], rest / rest.sum() * (1 - p0)])
    return np.searchsorted(np.cumsum(p)[:-1], rng.random(count), side="right").astype(np.uint8)


def gaussian(bits, sigma, count, seed=0):
    """Codes of a uniform quantizer with `bits` bits on Gaussian values of `sigma` steps."""
    rng = np.random.default_rng(seed)
    middle = 2 ** (bits - 1)
    values = np.round(rng.standard_normal(count) * sigma + middle)
    return np.clip(values, 0, 2**bits - 1).astype(np.uint8)


def signed(sigma, p0, count, seed=0):
    """Signed 8-bit values, stored as bytes, of which a share p0 is set to 0."""
    rng = np.random.default_rng(seed)
    values = np.clip(np.round(rng.standard_normal(count) * sigma), -128, 127).astype(np.int8)
    values[rng.random(count) < p0] = 0
    return values.view(np.uint8)

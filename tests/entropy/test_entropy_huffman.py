import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax.entropy import huffman


def test_worked_example_of_the_paper():
    symbols = np.array([1, 3, 0, 0, 0, 2, 0, 2, 1, 0])
    lengths = huffman.code_lengths(np.bincount(symbols), 12)
    assert lengths.tolist() == [1, 2, 3, 3]
    codes = huffman.canonical_codes(lengths)
    words = [format(c, f"0{n}b") for c, n in zip(codes.tolist(), lengths.tolist(), strict=True)]
    assert words == ["0", "10", "110", "111"]


def test_ties_favour_lower_symbols():
    assert huffman.code_lengths([1, 1, 1]).tolist() == [1, 2, 2]
    assert huffman.code_lengths([1, 1, 1, 1, 1]).tolist() == [2, 2, 2, 3, 3]


def test_one_symbol_and_none():
    assert huffman.code_lengths([0, 7, 0]).tolist() == [0, 1, 0]
    assert huffman.code_lengths([0, 0]).tolist() == [0, 0]
    assert huffman.code_lengths([]).tolist() == []


def test_length_limit_by_hand():
    # Without a limit 1 2 3 4 4; with 3 bits the best is 2 2 2 3 3: 2*(16+8+4) + 3*(2+1) = 65
    # against 1 3 3 3 3 with 16 + 3*15 = 61.
    assert huffman.code_lengths([16, 8, 4, 2, 1], 12).tolist() == [1, 2, 3, 4, 4]
    assert huffman.code_lengths([16, 8, 4, 2, 1], 3).tolist() == [1, 3, 3, 3, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(3, 5))
def test_optimal_under_the_limit(counts, limit):
    lengths = huffman.code_lengths(counts, limit)
    best = min(
        sum(c * n for c, n in zip(counts, choice, strict=True))
        for choice in itertools.product(range(1, limit + 1), repeat=len(counts))
        if sum(2 ** (limit - n) for n in choice) <= 2**limit
    )
    assert int(np.dot(counts, lengths.astype(int))) == best
    assert sum(2 ** (limit - int(n)) for n in lengths) == 2**limit


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=600), st.integers(10, 12))
def test_codes_are_prefix_free_and_complete(counts, limit):
    lengths = huffman.code_lengths(counts, limit)
    assert [n > 0 for n in lengths] == [c > 0 for c in counts]
    used = [
        (int(n), int(c)) for n, c in zip(lengths, huffman.canonical_codes(lengths), strict=True)
    ]
    # Left-aligned, the codes' intervals tile [0, 2**limit) in canonical order.
    spans = sorted((c << (limit - n), 1 << (limit - n)) for n, c in used if n)
    if len(spans) > 1:
        assert max(n for n, _ in used) <= limit
        assert [s for s, _ in spans] == [0, *np.cumsum([w for _, w in spans])[:-1].tolist()]
        assert sum(w for _, w in spans) == 2**limit


def test_bad_arguments():
    with pytest.raises(ValueError, match="negative"):
        huffman.code_lengths([3, -1])
    with pytest.raises(ValueError, match="do not fit"):
        huffman.code_lengths([1] * 9, 3)
    with pytest.raises(ValueError, match="max_length"):
        huffman.code_lengths([1, 1], 0)
    with pytest.raises(ValueError, match="over-subscribed"):
        huffman.canonical_codes([1, 1, 1])
    with pytest.raises(ValueError, match="below 2"):
        huffman.code_lengths([2**62, 2**62])

import subprocess
import sys

import numpy as np
import pytest
from entropy_data import gaussian, signed, skewed
from entropy_reference import decode as reference_decode
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax import entropy
from lcjax.errors import CorruptDataError

CASES = {
    "empty": np.zeros(0, np.uint8),
    "one": np.array([200], np.uint8),
    "constant": np.full(100_000, 7, np.uint8),
    "uniform": np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8),
    "paper": np.array([1, 3, 0, 0, 0, 2, 0, 2, 1, 0], np.uint8),
    "two values": skewed(0.5, 3000, 1) * 255,
    "words": skewed(0.8, 60_000),
    "words of single symbols": gaussian(8, 6.3, 20_000),
    "words, four bits": gaussian(4, 1.5, 20_000),
    "renumbered": skewed(0.7, 20_000) * 32 + 5,
    "wide alphabet": signed(20, 0.8, 50_000),
    "runs": skewed(0.99, 200_000),
    "runs, four streams": skewed(0.97, 400_000),
    "runs of many values": signed(30, 0.98, 200_000),
    "ends with a run": np.concatenate([skewed(0.99, 5000), np.zeros(777, np.uint8)]),
    "only a run after one": np.array([1] + [0] * 5000, np.uint8),
    "periodic": np.tile(np.array([0, 1], np.uint8), 4000),
}


def round_trip(symbols):
    data = entropy.encode(symbols)
    assert entropy.encoded_symbols(data) == symbols.size
    decoded = entropy.decode(data, count=symbols.size)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, symbols)
    return data


@pytest.mark.parametrize("name", CASES)
def test_round_trip_and_reference_decoder(name):
    data = round_trip(CASES[name])
    np.testing.assert_array_equal(reference_decode(data), CASES[name])


def test_all_modes_are_covered():
    modes = {name: entropy.encode(symbols)[0] for name, symbols in CASES.items()}
    assert {m & 7 for m in modes.values()} == {0, 1, 2, 3}
    assert {m >> 6 for m in modes.values()} == {0, 1, 2, 3}
    assert modes["runs, four streams"] & 0x1F == 3 | 2 << 3
    assert modes["words"] & 0x1F == 2 | 3 << 3
    assert modes["words of single symbols"] & 0x1F == 2 | 2 << 3


@settings(max_examples=250, deadline=None)
@given(
    count=st.integers(0, 5000),
    p0=st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 0.97, 0.995, 0.9999]),
    others=st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 40, 255]),
    offset=st.integers(0, 255),
    factor=st.sampled_from([1, 3, 8, 37]),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_of_skewed_sources(count, p0, others, offset, factor, seed):
    symbols = skewed(p0, count, others, seed)
    flat = np.random.default_rng(seed).integers(0, others + 1, count)
    symbols = np.where(symbols > 0, np.maximum(symbols, flat), 0)
    round_trip((symbols * factor + offset).astype(np.uint8))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 255))
def test_round_trip_of_arbitrary_bytes(data, modulus):
    symbols = (np.frombuffer(data, np.uint8).astype(int) % modulus).astype(np.uint8)
    stream = round_trip(symbols)
    np.testing.assert_array_equal(reference_decode(stream), symbols)
    assert len(stream) <= symbols.size + 4


LARGE = {
    "words": lambda n: skewed(0.8, n),
    "single": lambda n: gaussian(8, 6.3, n),
    "runs": lambda n: skewed(0.96, n),
    "rare": lambda n: skewed(0.9995, n),
    "uniform": lambda n: np.random.default_rng(0).integers(0, 256, n).astype(np.uint8),
    # The survey of a long input misses what only one place holds.
    "a value in one place": lambda n: np.concatenate(
        [skewed(0.8, n - 1), np.array([99], np.uint8)]
    ),
    "changes": lambda n: np.concatenate([skewed(0.99, n - n // 3), gaussian(3, 3.0, n // 3)]),
    "almost constant": lambda n: (np.arange(n) == n // 2).astype(np.uint8),
}


@pytest.mark.parametrize("name", LARGE)
def test_threads_do_not_change_the_bytes(name):
    symbols = LARGE[name](5_000_011)
    data = entropy.encode(symbols, threads=1)
    assert entropy.encode(symbols, threads=3) == data
    assert entropy.encode(symbols) == data
    for threads in (1, 2, 5, None):
        decoded = entropy.decode(data, threads=threads)
        assert np.array_equal(decoded, symbols)


def test_blocks_are_sized_by_compressed_bytes():
    assert entropy.encode(skewed(0.5, 2_000_000))[0] & 32
    assert not entropy.encode(skewed(0.999, 5_000_000))[0] & 32


def test_inputs_of_other_kinds():
    grid = skewed(0.8, 6000).reshape(60, 100)
    data = entropy.encode(grid)
    assert entropy.encode(grid.tobytes()) == data
    assert entropy.encode(memoryview(bytearray(grid.tobytes()))) == data
    assert entropy.encode(grid[::-1, ::2]) == entropy.encode(grid[::-1, ::2].copy())
    for kind in (bytes, bytearray, memoryview, lambda d: np.frombuffer(d, np.uint8)):
        np.testing.assert_array_equal(entropy.decode(kind(data)), grid.reshape(-1))
    assert entropy.encode(b"") == entropy.encode(np.zeros((3, 0), np.uint8)) == b"\0\0"
    with pytest.raises(TypeError, match="uint8, got int64"):
        entropy.encode(grid.astype(np.int64))
    with pytest.raises(TypeError, match="uint8, got int8"):
        entropy.encode(grid.view(np.int8))
    with pytest.raises(TypeError, match="bytes"):
        entropy.decode(grid.astype(np.int64))
    with pytest.raises(ValueError, match="threads"):
        entropy.encode(grid, threads=0)


@pytest.mark.parametrize("name", ["uniform", "constant", "words", "runs", "empty"])
def test_count_and_out(name):
    symbols = CASES[name]
    data = entropy.encode(symbols)
    out = np.full(symbols.size + 20, 77, np.uint8)
    part = out[10 : 10 + symbols.size]
    assert entropy.decode(data, out=part) is part
    np.testing.assert_array_equal(part, symbols)
    # Nothing is written beside the range given.
    assert (out[:10] == 77).all()
    assert (out[10 + symbols.size :] == 77).all()
    with pytest.raises(CorruptDataError, match="expected"):
        entropy.decode(data, count=symbols.size + 1)
    with pytest.raises(CorruptDataError, match="room for"):
        entropy.decode(data, out=out)
    with pytest.raises(TypeError, match="uint8"):
        entropy.decode(data, out=np.zeros(symbols.size, np.int8))


def test_out_must_be_writable_and_contiguous():
    data = entropy.encode(CASES["words"])
    readonly = np.zeros(60_000, np.uint8)
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        entropy.decode(data, out=readonly)
    with pytest.raises(ValueError, match="contiguous"):
        entropy.decode(data, out=np.zeros(120_000, np.uint8)[::2])


def test_limit_on_allocation():
    data = bytes([1]) + b"\xff\xff\xff\xff\xff\xff\x7f" + b"\x05"
    assert entropy.encoded_symbols(data) == 2**49 - 1
    with pytest.raises(CorruptDataError, match="max_symbols"):
        entropy.decode(data)
    data = entropy.encode(np.full(1000, 5, np.uint8))
    with pytest.raises(CorruptDataError, match="max_symbols=999"):
        entropy.decode(data, max_symbols=999)
    assert (entropy.decode(data, max_symbols=1000) == 5).all()
    # Whoever names a count means it.
    assert (entropy.decode(data, max_symbols=1, count=1000) == 5).all()


def test_importing_does_not_import_numba():
    code = (
        "import sys, lcjax.entropy, lcjax.entropy.huffman\n"
        "print([m for m in ('numba', 'jax', 'flax', 'orbax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_entropy_bits():
    assert entropy.entropy_bits(b"") == 0.0
    assert entropy.entropy_bits(b"aaaa") == 0.0
    assert entropy.entropy_bits(b"abab") == 1.0
    assert entropy.entropy_bits(np.arange(256, dtype=np.uint8)) == 8.0

import contextlib
from pathlib import Path

import numpy as np
import pytest
from entropy_data import gaussian, signed, skewed
from entropy_reference import Bad
from entropy_reference import decode as reference_decode

from lcjax import entropy
from lcjax.entropy import _format
from lcjax.errors import CorruptDataError

SOURCES = {
    "raw": np.random.default_rng(0).integers(0, 256, 60).astype(np.uint8),
    "constant": np.full(1000, 3, np.uint8),
    "words": skewed(0.8, 900),
    "single": gaussian(8, 6.3, 400),
    "four streams": gaussian(3, 2.0, 14_000),
    "runs": skewed(0.98, 5000),
    "runs of many values": signed(30, 0.95, 3000),
}


def outcome(data):
    """What became of a damaged stream: None for an error, else the symbols."""
    try:
        declared = entropy.encoded_symbols(data)
        symbols = entropy.decode(data, max_symbols=1 << 20)
    except CorruptDataError:
        return None
    assert symbols.shape == (declared,)
    return symbols


@pytest.mark.parametrize("name", SOURCES)
def test_truncated(name):
    data = entropy.encode(SOURCES[name])
    for size in range(0, len(data), 1 + len(data) // 400):
        with pytest.raises(CorruptDataError):
            entropy.decode(data[:size])


@pytest.mark.parametrize("name", SOURCES)
def test_trailing_bytes(name):
    data = entropy.encode(SOURCES[name])
    for extra in (b"\0", b"\1", b"\xff" * 9):
        with pytest.raises(CorruptDataError):
            entropy.decode(data + extra)


@pytest.mark.parametrize("name", SOURCES)
def test_mutated(name):
    rng = np.random.default_rng(1)
    original = np.frombuffer(entropy.encode(SOURCES[name]), np.uint8)
    refused = 0
    trials = 700
    for trial in range(trials):
        data = original.copy()
        # Most damage to the head, where the structure is.
        reach = min(len(data), 24) if trial % 4 else len(data)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(0, reach)] = rng.choice([0, 255, rng.integers(0, 256)])
        if trial % 5 == 0:
            at = rng.integers(0, len(data))
            data = np.delete(data, at) if trial % 2 else np.insert(data, at, rng.integers(0, 256))
        refused += outcome(data.tobytes()) is None
    assert refused > 0


@pytest.mark.parametrize("name", ["words", "runs", "runs of many values", "single"])
def test_damage_is_judged_as_the_format_says(name):
    rng = np.random.default_rng(2)
    original = np.frombuffer(entropy.encode(SOURCES[name][:300]), np.uint8)
    for _ in range(250):
        data = original.copy()
        data[rng.integers(0, len(data))] ^= 1 << rng.integers(0, 8)
        symbols = outcome(data.tobytes())
        if data[0] & 7 < 2 or (symbols is None and entropy_count(data) > 1 << 20):
            continue
        try:
            expected = reference_decode(data.tobytes())
        except Bad:
            assert symbols is None
        else:
            np.testing.assert_array_equal(symbols, expected)


GOLDEN = sorted((Path(__file__).parent / "golden").glob("*_streams.bin"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_mutated_index_and_blocks(path):
    rng = np.random.default_rng(4)
    original = np.frombuffer(path.read_bytes(), np.uint8)
    refused = 0
    for trial in range(600):
        data = original.copy()
        reach = 60 if trial % 3 else len(data)
        data[rng.integers(0, reach)] = rng.integers(0, 256)
        if trial % 4 == 0:
            data = data[: rng.integers(1, len(data))]
        symbols = outcome(data.tobytes())
        refused += symbols is None
        if trial % 20 == 0 and symbols is not None:
            np.testing.assert_array_equal(symbols, reference_decode(data.tobytes()))
    assert refused > 100


def test_output_beside_the_range_is_never_touched():
    rng = np.random.default_rng(5)
    for name, symbols in SOURCES.items():
        original = np.frombuffer(entropy.encode(symbols), np.uint8)
        room = np.full(symbols.size + 128, 171, np.uint8)
        for _ in range(150):
            data = original.copy()
            data[rng.integers(min(12, len(data) - 1), len(data))] ^= 1 << rng.integers(0, 8)
            with contextlib.suppress(CorruptDataError):
                entropy.decode(data, out=room[64:-64])
            assert (room[:64] == 171).all(), name
            assert (room[-64:] == 171).all(), name


def entropy_count(data):
    try:
        return entropy.encoded_symbols(data)
    except CorruptDataError:
        return 0


def test_random_bytes():
    rng = np.random.default_rng(3)
    for trial in range(2000):
        head = bytes([trial % 4 | rng.integers(0, 32) << 3, rng.integers(1, 100)])
        outcome(head + rng.integers(0, 256, rng.integers(0, 60)).astype(np.uint8).tobytes())
    assert outcome(b"\0\0") is not None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\2", "ends early"),
        (b"\4\1\0", "mode 4"),
        (b"\x08\1\0", "bits set"),
        (b"\1\0\0", "at least one symbol"),
        (b"\0\x81\x00a", "varint"),
        (b"\0" + b"\xff" * 9 + b"\1", "varint"),
        (b"\0\2a", "expected 2"),
        (b"\2\4\0\x11", "alphabet has 1"),
        (b"\x82\4\1aa\x11\x00", "twice"),
        (b"\xc2\4" + b"\1" + b"\0" * 31 + b"\x11\x00", "alphabet has 1"),
        (b"\2\4\1\x11", "4 symbols in 0 bytes"),
        (b"\2\4\1\x12\x00", "Kraft"),
        (b"\2\4\2\x11\x01\x00", "Kraft"),
        (b"\2\4\1\x00\x00", "Kraft"),
        (b"\2\4\1\xd1\x00", "reserved"),
        (b"\2\4\1" + b"\xff" * 8, "longer than 8"),
        (b"\2\4\1\x11\x10", "padding|end where"),
        (b"\2\4\1\x11\x00\x00", "end where"),
        (b"\2\xff\xff\x7f\1\x11\x00", "64 a byte"),
        (b"\x22\4\1\x11\0\1\0", "blocks of 0"),
        (b"\x22\4\1\x11\4\1\0", "blocks of 4"),
        (b"\x22\x80\2\1\x11\xff\1\1\0", "blocks of 255"),
        (b"\x22\x80\4\1\x11\x80\2\x09\0", "9 bytes where 1 are left"),
        (b"\x3a\x80\4\1\x11\x80\2\1", "index of 15"),
        (b"\x0a\4\1\x11\x02\0", "where 1 are left"),
        (b"\3\1\1\x11\x03", "past the end"),
        (b"\3\5\1\x11\x80\x00", "end where"),
        (b"\3\5\1\xff", "reserved"),
        (b"\3\5\1\x00", "ends early"),
    ],
)
def test_message_names_the_rule(data, message):
    with pytest.raises(CorruptDataError, match=message):
        entropy.decode(data)
    with pytest.raises(Bad):
        reference_decode(data)


def test_long_chain_of_unused_nodes_is_bounded():
    # A tree that goes on for ever: each level has 255 leaves without a code.
    data = b"\xc2\4" + b"\xff" * 32 + b"\xef\xff" * 100_000
    with pytest.raises(CorruptDataError):
        entropy.decode(data)


def test_blocks_of_huge_counts_are_refused_before_allocation():
    count = _format.varint(2**62)
    for mode in (2, 3):
        for index in (b"", b"\1", _format.varint(2**31)):
            first = bytes([mode | (32 if index else 0)])
            with pytest.raises(CorruptDataError):
                entropy.decode(first + count + b"\1\x11" + index + b"\0", count=2**62)

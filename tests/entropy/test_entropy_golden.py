"""Streams written by earlier versions: they must decode for ever. Never rewrite a file here."""

from pathlib import Path

import numpy as np
import pytest

from lcjax import entropy

FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.bin")), ids=lambda p: p.stem)
def test_decodes_for_ever(path):
    expected = np.load(path.with_suffix(".npy"), allow_pickle=False)
    np.testing.assert_array_equal(entropy.decode(path.read_bytes()), expected)


def test_every_mode_has_a_file():
    modes = {path.read_bytes()[0] & 7 for path in FOLDER.glob("*.bin")}
    assert modes == {0, 1, 2, 3}


def test_example_of_the_format_page():
    data = bytes.fromhex("02 0a 03 21 33 1d b3 00")
    assert entropy.decode(data).tolist() == [1, 3, 0, 0, 0, 2, 0, 2, 1, 0]
    assert entropy.encode(bytes([1, 3, 0, 0, 0, 2, 0, 2, 1, 0])) == data

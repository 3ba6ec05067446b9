"""Files of every released format version decode to the values recorded with them."""

import pathlib

import numpy as np
import orbax.checkpoint as ocp
import pytest

import lcjax
from tests.golden.make import PRESETS, plain

VERSIONS = sorted((pathlib.Path(__file__).parent / "golden").glob("v*"))
CASES = [
    pytest.param(folder, path.name.removesuffix("-0.msg"), id=f"{folder.name}-{path.stem[:-2]}")
    for folder in VERSIONS
    for path in sorted(folder.glob("*-0.msg"))
]


def same(tree, path):
    with np.load(path) as expected:
        found = plain(tree)
        assert set(found) == set(expected.files)
        for name in expected.files:
            assert found[name].tobytes() == expected[name].tobytes(), name
    return True


@pytest.mark.parametrize(("folder", "preset"), CASES)
def test_messages(folder, preset):
    ref = None
    for step in range(4):
        ref = lcjax.decode((folder / f"{preset}-{step}.msg").read_bytes(), ref)
        assert same(ref.tree, folder / f"{preset}-{step}.npz")


@pytest.mark.parametrize(("folder", "preset"), CASES)
@pytest.mark.parametrize("layout", ["linked", "pooled"])
def test_steps(folder, preset, layout):
    root = folder / f"{preset}-{layout}"
    with ocp.CheckpointManager(
        root, handler_registry=lcjax.handler_registry(preset="lossless")
    ) as manager:
        assert manager.all_steps() == [3]
        assert same(manager.restore(3), folder / f"{preset}-3.npz")


def test_there_are_files_of_this_version():
    from lcjax import container

    folder = next(f for f in VERSIONS if f.name == f"v{container.VERSION}")
    assert {p.name for p in folder.glob("*-0.msg")} == {f"{preset}-0.msg" for preset in PRESETS}

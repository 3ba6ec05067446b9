"""``lcjax bench lossless``: tiny pairs, every method that is installed, the rows' fields."""

import argparse
import importlib.util

import ml_dtypes
import numpy as np
import pytest

from lcjax import cli
from lcjax.bench import BenchError, _lossless_methods, lossless
from lcjax.bench._lossless_pairs import Leaf, Pair

FIELDS = ["pair", "dtype", "method", "bytes", "ratio", "encode_gbs", "decode_gbs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """States of a tiny run, trained once."""
    return tmp_path_factory.mktemp("lossless")


def options(out, **changes):
    chosen = {"quick": True, "pairs": None, "methods": "lcjax", "out": out}
    return argparse.Namespace(**{**chosen, **changes})


class TestRows:
    def test_every_pair_in_both_dtypes(self, folder):
        rows = lossless.run(options(folder))
        assert all(set(FIELDS) <= set(row) for row in rows)
        found = {(row["pair"], row["dtype"]) for row in rows}
        for dtype in ("float32", "bfloat16"):
            for kind in ("params", "mu", "nu"):
                assert any(pair.startswith(kind) and d == dtype for pair, d in found), (kind, dtype)
        sizes = {(r["pair"], r["dtype"], r["method"]): r["bytes"] for r in rows}
        for pair, dtype in found:
            # A whole file adds an index and hashes to the payloads.
            assert sizes[pair, dtype, "lcjax file"] > sizes[pair, dtype, "lcjax"]

    def test_a_second_run_finds_its_states(self, folder, capsys):
        lossless.run(options(folder))
        capsys.readouterr()
        lossless.run(options(folder, pairs="mu"))
        assert "training" not in capsys.readouterr().err

    def test_unknown_pairs_are_refused(self, folder):
        with pytest.raises(BenchError, match="no pair has 'sigma' in its name; there are "):
            lossless.run(options(folder, pairs="sigma"))

    def test_from_the_command_line(self, folder, tmp_path):
        target = tmp_path / "rows.json"
        command = ["bench", "lossless", "--quick", "--out", str(folder), "--methods", "lcjax"]
        assert cli.main([*command, "--pairs", "nu", "--json", str(target)]) == 0
        assert '"lcjax file"' in target.read_text()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("module", list(_lossless_methods.PEERS))
def test_peers_give_back_what_they_got(module, dtype):
    tools = _lossless_methods.peers(module)
    if importlib.util.find_spec(module) is None:
        assert tools == []
        return
    rng = np.random.default_rng(0)
    old = rng.standard_normal((64, 48)).astype(np.float32)
    new = old + np.float32(1e-3) * rng.standard_normal(old.shape).astype(np.float32)
    leaves = [Leaf(old.astype(dtype), new.astype(dtype))]
    for tool in tools:
        given = tool.prepare(leaves)
        stored = tool.encode(given)
        assert 0 < stored.size < 2 * old.size * np.dtype(dtype).itemsize
        assert lossless._same(tool.decode(stored, given), leaves), tool.name


def test_a_method_that_errs_is_left_out_and_ours_stops_the_run(capsys):
    leaf = Leaf(np.ones(4, np.float32), np.full(4, 2, np.float32))
    pair = Pair("params", (leaf,))

    def method(name):
        stored = _lossless_methods.Stored(1, None)
        return _lossless_methods.Method(name, lambda _: stored, lambda _, __: [leaf.old])

    assert lossless.measure(pair, [method("wrong")]) == []
    assert "wrong gives back other values" in capsys.readouterr().err
    with pytest.raises(BenchError, match="a defect"):
        lossless.measure(pair, [method("lcjax")])

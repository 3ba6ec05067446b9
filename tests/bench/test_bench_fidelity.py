"""``lcjax bench fidelity``: its formulas by hand, its rivals against their promises, a tiny run."""

import argparse
import json

import jax
import numpy as np
import pytest
from scipy import stats

from lcjax.bench import BenchError, _rivals, fidelity
from lcjax.bench._lost_steps import Curve, estimate, fit
from lcjax.bench._tasks import Size, Task, divergence

FIELDS = [
    "model",
    "optimizer",
    "method",
    "bytes",
    "ratio_raw",
    "ratio_orbax",
    "params_ratio",
    "kl",
    "gap",
    "lost_steps",
    "lost_steps_upper",
    "encode_s",
    "decode_s",
]
TINY = Size(width=16, depth=1, batch=2, validation=8)


class TestLostSteps:
    def test_the_fit_finds_a_curve_of_its_own_kind(self):
        losses = {s: 5 - 0.4 * np.log(s + 60) for s in range(100, 700, 25)}
        curve = fit(losses)
        assert curve == pytest.approx((5, 0.4))
        assert curve.slope(140) == pytest.approx(0.4 / 200)

    def test_a_gap_of_ten_steps_is_ten_lost_steps(self):
        curve = Curve(5.0, 0.4)
        after = (25, 50)
        slopes = [0.4 / (300 + n + 60) for n in after]
        exact = {(300, order): [2.0, 1.9] for order in (1, 2, 3)}
        shares = {1: 9, 2: 10, 3: 11}
        restored = {
            (300, order): [2.0 + lost * slopes[0], 1.9 + lost * slopes[1]]
            for order, lost in shares.items()
        }
        found = estimate(exact, restored, curve, after)
        assert found.gap == pytest.approx(10 * sum(slopes) / 2)
        assert found.lost_steps == pytest.approx(10)
        margin = stats.t.ppf(0.95, 2) * 1.0 / np.sqrt(3)
        assert found.upper == pytest.approx(10 + margin)
        assert margin == pytest.approx(1.686, abs=1e-3)

    def test_nothing_lost_is_bounded_by_nothing(self):
        losses = {(300, 1): [2.0, 1.9]}
        assert estimate(losses, losses, Curve(5.0, 0.4), (25, 50)) == (0, 0, 0)

    def test_one_order_has_no_bound(self):
        found = estimate({(300, 1): [2.0]}, {(300, 1): [2.1]}, Curve(5.0, 0.4), (25,))
        assert found.lost_steps > 0 and np.isnan(found.upper)


def test_divergence_of_two_coins():
    true, other = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert divergence(true, other) == pytest.approx(expected)
    assert divergence(true, true) == 0


def states(count=4, size=5000):
    """States with the shape of AdamW's; every save moves every value."""
    rng = np.random.default_rng(3)
    w = rng.standard_normal(size).astype(np.float32)
    for step in range(count):
        m = rng.standard_normal(size).astype(np.float32) * np.float32(1e-3)
        v = np.square(m) + np.float32(1e-9)
        moments = {"mu": {"w": m}, "nu": {"w": v}, "count": np.int32(step)}
        yield {"params": {"w": w}, "opt_state": moments}
        w = w + np.float32(0.01) * rng.standard_normal(size).astype(np.float32)


def leaves(state):
    moments = state["opt_state"]
    return state["params"]["w"], moments["mu"]["w"], moments["nu"]["w"], moments["count"]


class TestRivals:
    def test_eight_bits_keep_parameters_and_a_share_of_the_largest_moment(self):
        coder = _rivals.eight_bit()
        for state in states():
            saved = coder.save(0, state)
            w, m, v, count = leaves(coder.restore()[0])
            true_w, true_m, true_v, true_count = leaves(state)
            assert (w == true_w).all() and count == true_count
            assert np.abs(m - true_m).max() <= 0.01 * np.abs(true_m).max()
            assert np.abs(v - true_v).max() <= 0.005 * true_v.max()
        assert saved.params == 20000
        # 5000 values of 8 bits and three blocks' scales for each moment, a count.
        assert saved.bytes == 20000 + 2 * (5000 + 3 * 4) + 4

    @pytest.mark.parametrize("signed", [True, False])
    def test_the_dynamic_map_has_256_values_up_to_one(self, signed):
        table = _rivals.dynamic_map(signed)
        assert table.size == np.unique(table).size == 256
        assert table[-1] == 1 and 0 in table
        assert table[0] == (np.float32(-0.99296875) if signed else 0)

    def test_excp_keeps_what_its_formula_keeps(self):
        constants = _rivals.Excp(alpha=1e9, beta=1.0, bits=4)  # 2.5 medians
        coder = _rivals.excp(constants)
        before = None
        for state in states():
            coder.save(0, state)
            found, _ = coder.restore()
            if before is not None:
                change = leaves(state)[0] - leaves(before)[0]
                kept = np.abs(change) > 2.5 * np.median(np.abs(change))
                moved = leaves(found)[0] != leaves(before)[0]
                assert (moved == kept).all()
                _, m, v, _ = leaves(found)
                true_m = leaves(state)[1]
                strong = np.abs(true_m) > np.abs(true_m).mean()
                assert ((m != 0) == (kept & strong)).all()
                assert ((v != 0) == (kept & strong)).all()
                assert np.unique(m).size <= 16
            before = found

    def test_kmeans_finds_clusters(self):
        rng = np.random.default_rng(0)
        values = np.repeat([-3, 1, 7], 100) + rng.uniform(-0.1, 0.1, 300)
        centers, labels = _rivals._kmeans(values.astype(np.float32), 3)
        assert centers == pytest.approx([-3, 1, 7], abs=0.05)
        assert (labels == np.repeat([0, 1, 2], 100)).all()

    @pytest.mark.parametrize("bits", [1, 2, 4, 8])
    def test_packed_indices_come_back(self, bits):
        indices = np.random.default_rng(0).integers(0, 2**bits, 1001).astype(np.uint8)
        packed = _rivals._pack(indices, bits)
        assert packed.size == -(-1001 * bits // 8)
        assert (_rivals._unpack(packed, bits, 1001) == indices).all()

    def test_sz3_keeps_its_bounds(self):
        pytest.importorskip("pysz", reason="SZ3 comes with the extra 'bench'")
        coder, before = _rivals.sz3(0.5, 0.5), None
        for state in states():
            coder.save(0, state)
            found, _ = coder.restore()
            if before is not None:
                w, m, v, _ = leaves(found)
                true_w, true_m, true_v, _ = leaves(state)
                change = true_w - leaves(before)[0]
                assert np.abs(w - true_w).max() <= 0.5001 * np.sqrt(np.square(change).mean())
                assert np.abs(m - true_m).max() <= 0.5001 * np.sqrt(np.square(true_m).mean())
                assert np.abs(np.log2(v / true_v)).max() <= 0.5001
            before = found


class TestTask:
    @pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
    def test_training_repeats_and_leaves_its_state_alone(self, optimizer):
        task = Task("transformer", optimizer, TINY)
        state = jax.device_get(task.train(task.start(), 0, 0, 3))
        twice = [jax.device_get(task.train(state, 1, 3, 2)) for _ in range(2)]
        for one, other in zip(*map(jax.tree.leaves, twice), strict=True):
            assert one.tobytes() == other.tobytes()
        other = task.train(state, 2, 3, 2)
        assert task.validation_loss(other) != task.validation_loss(twice[0])

    def test_images_are_asked_for_by_name(self, monkeypatch):
        monkeypatch.delenv("LCJAX_DATA", raising=False)
        with pytest.raises(BenchError, match=r"LCJAX_DATA .*fashion12k.npz"):
            Task("cnn", "adamw", TINY)


@pytest.fixture
def plan(monkeypatch):
    small = fidelity.Plan(TINY, (150,), 2, 1, ("adamw",))
    monkeypatch.setattr(fidelity, "QUICK_PLAN", small)
    monkeypatch.setattr(fidelity, "ALPHAS", (0.0, 1.0))
    monkeypatch.setattr(fidelity, "BETAS", (0.0,))


def options(out, **changes):
    chosen = {"quick": True, "models": "transformer", "optimizers": None, "methods": None}
    return argparse.Namespace(**{**chosen, "plot": None, "out": out, **changes})


class TestRun:
    def test_rows_and_resuming(self, tmp_path, plan, monkeypatch):
        wanted = options(tmp_path, plot=tmp_path / "picture.png", methods="l")
        rows = fidelity.run(wanted)
        by_name = {row["method"]: row for row in rows}
        assert {"Orbax", "lossless", "balanced", "ExCP, published"} <= set(by_name)
        for row in rows:
            assert set(FIELDS) <= set(row)
        for name in ("Orbax", "lossless"):
            row = by_name[name]
            assert (row["kl"], row["gap"], row["lost_steps"]) == (0, 0, 0)
        balanced = by_name["balanced"]
        assert balanced["kl"] > 0 and balanced["gap"] != 0
        assert balanced["lost_steps_upper"] > balanced["lost_steps"]
        assert balanced["ratio_orbax"] == by_name["Orbax"]["bytes"] / balanced["bytes"]
        (rarely,) = (r for r in rows if r["method"].endswith("as few bytes as balanced"))
        interval = 25 * balanced["ratio_orbax"]
        assert rarely["lost_steps"] == pytest.approx((interval - 25) / 2)
        assert (tmp_path / "picture.png").stat().st_size > 1000
        monkeypatch.setattr(fidelity._Bench, "_measure", None)  # all that is left to measure
        again = fidelity.run(options(tmp_path, methods="l"))
        assert json.dumps(again) == json.dumps(rows)

    def test_a_line_cut_off_is_measured_again(self, tmp_path, plan):
        rows = fidelity.run(options(tmp_path, methods="lossless"))
        path = tmp_path / "results.jsonl"
        path.write_text(path.read_text()[:-20])
        again = fidelity.run(options(tmp_path, methods="lossless"))
        assert [row["bytes"] for row in again] == [row["bytes"] for row in rows]
        assert json.loads(path.read_text().splitlines()[-1])

    def test_other_settings_are_refused(self, tmp_path, plan):
        (tmp_path / "results.jsonl").write_text('{"plan": 1}\n')
        with pytest.raises(BenchError, match="other settings"):
            fidelity.run(options(tmp_path))

    def test_unknown_names_are_refused(self, tmp_path, plan):
        with pytest.raises(BenchError, match="unknown 'rnn'; choose from transformer, cnn"):
            fidelity.run(options(tmp_path, models="rnn"))

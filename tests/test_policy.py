"""Rules and presets: who gets what, and what each keeps of its promise over a run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import lcjax
from lcjax import container, policy, scales
from lcjax.codecs import moments
from lcjax.jobs import within


def adam_states(steps=6, shape=(40, 30), rate=1e-2, dtype=np.float32, seed=0):
    """States of a real AdamW run on noise with a drift, in a dict of plain containers."""
    rng = np.random.default_rng(seed)
    params = {
        "kernel": jnp.asarray(rng.standard_normal(shape), dtype),
        "bias": jnp.zeros(shape[1], dtype),
    }
    tx = optax.adamw(rate)
    opt = tx.init(params)
    drift = jax.tree.map(lambda p: rng.standard_normal(p.shape), params)
    for _ in range(steps):
        for _ in range(5):
            gradient = jax.tree.map(
                lambda p, d: jnp.asarray(0.3 * d + rng.standard_normal(p.shape), p.dtype),
                params,
                drift,
            )
            updates, opt = tx.update(gradient, opt, params)
            params = optax.apply_updates(params, updates)
        yield {"params": params, "opt_state": opt, "key": jax.random.key(3), "step": 5}


def decoded(states, **kwargs):
    """What a reader has after each state, with what was saved; both sides agree bit for bit."""
    sent = received = None
    for state in states:
        message, sent = lcjax.encode(state, sent, **kwargs)
        received = lcjax.decode(message, received)
        for a, b in zip(
            *(jax.tree.leaves(r.as_tree(state)) for r in (sent, received)), strict=True
        ):
            if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        yield state, received.as_tree(state), message


def own_segment(message):
    return container.from_bytes(container.from_bytes(message).chunk(1))


def with_moments(message, **fields):
    """The message with other fields in the chunks of its moments."""
    outer, own = container.from_bytes(message), own_segment(message)
    for leaf in own.meta["leaves"]:
        for chunk in leaf["chunks"]:
            if chunk["codec"] == "moment":
                chunk.update(fields)
    forged, whole = container.Writer(), container.Writer()
    for k in range(len(own)):
        forged.add(bytes(own.chunk(k)))
    whole.add(bytes(outer.chunk(0)))
    whole.add(forged.finish(own.meta).to_bytes())
    return whole.finish(outer.meta).to_bytes()


def by_name(explanation):
    return {leaf.name: leaf for leaf in explanation}


class TestExplain:
    def test_balanced_on_adamw(self):
        state = next(adam_states(1))
        found = by_name(lcjax.explain(state, preset="balanced"))
        assert {name: leaf.role for name, leaf in found.items()} == {
            "key": "rng",
            "opt_state/0/count": "count",
            "opt_state/0/mu/bias": "mu",
            "opt_state/0/mu/kernel": "mu",
            "opt_state/0/nu/bias": "nu",
            "opt_state/0/nu/kernel": "nu",
            "params/bias": "param",
            "params/kernel": "param",
            "step": "step",
        }
        assert found["params/kernel"].codec == (
            "steps of 2.8 rms of all deltas, by mean(opt_state/0/nu/kernel)^-0.25"
        )
        assert found["opt_state/0/mu/kernel"].codec == (
            "predicted from the delta of params/kernel; the rest is dropped"
        )
        assert found["opt_state/0/nu/kernel"].codec == "levels of log2, 2 octaves apart"
        assert found["key"].codec == "exact, by itself"
        assert "params/kernel" in str(lcjax.explain(state, preset="balanced"))

    def test_rules_go_first_and_in_order(self):
        preset = lcjax.Preset(
            "balanced",
            rules=(
                lcjax.Rule(lcjax.Exact(), path="*/bias"),
                lcjax.Rule(lcjax.Bounded(absolute=1e-3), path="params/*", dtype="float32"),
                lcjax.Rule(lcjax.Exact(), role="mu|nu"),
            ),
        )
        found = by_name(lcjax.explain(next(adam_states(1)), preset=preset))
        assert found["params/bias"].codec.startswith("exact")
        assert found["params/bias"].reason == "path */bias"
        assert found["params/kernel"].codec == "every element within 0.001"
        assert found["params/kernel"].reason == "path params/*, dtype float32"
        assert found["opt_state/0/mu/kernel"].codec.startswith("exact")

    def test_stated_roles(self):
        state = {"teacher": np.ones((8, 8), np.float32), "w": np.ones((8, 8), np.float32)}
        preset = lcjax.Preset("balanced", roles=(("teacher", "other"),))
        found = by_name(lcjax.explain(state, preset=preset))
        assert (found["teacher"].role, found["w"].role) == ("other", "param")
        assert found["teacher"].codec.startswith("exact")
        with pytest.raises(lcjax.PresetError, match="papa"):
            lcjax.Preset("balanced", roles=(("teacher", "papa"),))

    def test_dtypes_without_a_lossy_codec_stay_exact(self):
        state = {
            name: jnp.zeros((8, 8), name)
            for name in ("float32", "bfloat16", "float16", "complex64", "float8_e4m3fn", "int4")
        }
        found = by_name(lcjax.explain(state, preset="extreme"))
        lossy = {name for name, leaf in found.items() if leaf.codec.startswith("steps")}
        assert lossy == {"float32", "bfloat16", "float16"}

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: lcjax.Bounded(), "either absolute= or relative="),
            (lambda: lcjax.Bounded(absolute=-1), "absolute must be a number from"),
            (lambda: lcjax.Step(size=True), "size must be a number from"),
            (lambda: lcjax.Rule("exact"), "a rule's codec must be one of"),
            (lambda: lcjax.Preset("lossless", rules=("x",)), "rules must be lcjax.Rule objects"),
        ],
    )
    def test_bad_options(self, make, message):
        with pytest.raises(lcjax.PresetError, match=message):
            make()

    def test_json_round_trip(self):
        rules = (
            lcjax.Rule(lcjax.Bounded(relative=0.01), path="a*"),
            lcjax.Rule(lcjax.Moment(size=2.0), role="mu"),
        )
        preset = lcjax.Preset("extreme", rules=rules, roles=(("x", "param"),))
        assert policy.preset_from_json(preset.to_json()) == preset


class TestRuns:
    @pytest.mark.parametrize("preset", ["balanced", "extreme"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_errors_do_not_accumulate(self, preset, dtype):
        states = adam_states(12, dtype=jnp.dtype(dtype))
        errors = []
        for state, got, _ in decoded(states, preset=preset):
            u, c = (np.asarray(s["params"]["kernel"], np.float64) for s in (state, got))
            errors.append(np.sqrt(np.mean((u - c) ** 2)))
            v, w = (np.asarray(s["opt_state"][0].nu["kernel"], np.float64) for s in (state, got))
            assert np.array_equal(v > 0, w > 0)
            assert np.abs(np.log2(w[v > 0] / v[v > 0])).max() < 1.7
        assert max(errors[6:]) < 2 * max(errors[1:6])

    def test_moments_point_where_the_true_ones_do(self):
        *_, (state, got, _) = decoded(adam_states(8), preset="balanced")
        m, kept = (np.asarray(s["opt_state"][0].mu["kernel"]) for s in (state, got))
        assert np.corrcoef(m.ravel(), kept.ravel())[0, 1] > 0.3

    @pytest.mark.parametrize("preset", ["balanced", "extreme"])
    def test_a_reader_goes_on_as_the_writer_would(self, preset):
        sent = received = None
        for k, state in enumerate(adam_states(8)):
            chosen = "lossless" if k == 3 else preset  # a trail that begins within the chain
            message, sent = lcjax.encode(state, sent, preset=chosen)
            other, _ = lcjax.encode(state, received, preset=chosen)
            assert other == message
            received = lcjax.decode(message, received)
        spans = [
            chunk["trail"]
            for leaf in own_segment(message).meta["leaves"]
            for chunk in leaf["chunks"]
            if chunk["codec"] == "moment"
        ]
        assert spans == [[4, 205]] * len(spans) and spans

    def test_gains(self):
        def scale(cross, predicted, own, **options):
            codec = lcjax.Moment(**options)
            return scales.moment_scale(codec, moments.Fit(cross, predicted, own, 3, 4, 50, 10))

        # As large as the moment (or 1.5 times that), in the direction of the correlation.
        assert scale(-1.0, 100.0, 25.0) == (pytest.approx(-0.5), None)
        assert scale(2.0, 100.0, 25.0, norm=1.5) == (pytest.approx(0.75), None)
        # The rest is y + D / 2: 50 + 3 + 1 = 54 squared, over 10 elements.
        assert scale(-1.0, 100.0, 25.0, size=2.0).step == pytest.approx(2 * 5.4**0.5)
        assert scale(0.0, 100.0, 25.0) == (0.0, pytest.approx(2 * 5.0**0.5))
        assert scale(1.0, 0.0, 25.0, key_size=None) == scale(0.0, 1.0, 0.0, key_size=None)
        assert scale(1.0, 0.0, 25.0, key_size=None) == (0.0, None)

    def test_without_deltas_moments_are_coded_by_themselves(self):
        state, got, _ = next(decoded(adam_states(1), preset="balanced"))
        m, kept = (np.asarray(s["opt_state"][0].mu["kernel"]) for s in (state, got))
        assert np.corrcoef(m.ravel(), kept.ravel())[0, 1] > 0.7
        anew = lcjax.Preset("balanced", rules=(lcjax.Rule(lcjax.Moment(key_size=None), role="mu"),))
        _, got, _ = next(decoded(adam_states(1), preset=anew))
        assert not np.asarray(got["opt_state"][0].mu["kernel"]).any()

    def test_values_that_are_not_finite_come_back(self):
        def broken():
            for k, state in enumerate(adam_states(5)):
                kernel = np.array(state["params"]["kernel"])
                if k in (0, 2, 3):
                    kernel[k, :4] = [np.nan, np.inf, -np.inf, np.nan]
                nu = np.array(state["opt_state"][0].nu["kernel"])
                mu = np.array(state["opt_state"][0].mu["kernel"])
                nu[k, 0], mu[k, 1], mu[k, 2] = np.inf, np.nan, -np.inf
                adam = state["opt_state"][0]._replace(nu={"kernel": nu}, mu={"kernel": mu})
                yield {"params": {"kernel": kernel}, "opt_state": (adam,)}

        for state, got, _ in decoded(broken(), preset="extreme"):
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(got), strict=True):
                a, b = np.asarray(a), np.asarray(b)
                odd = ~np.isfinite(a)
                assert a[odd].tobytes() == b[odd].tobytes()
                assert np.array_equal(odd, ~np.isfinite(b))

    @pytest.mark.parametrize("preset", ["paper", "balanced", "extreme", "lossless"])
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    def test_a_mask_of_infinities_is_written_once(self, preset, dtype):
        mask = np.where(np.tril(np.ones((128, 128))) > 0, 0, -np.inf).astype(dtype)
        states = [{"params": {"mask": mask}}] * 3
        sizes = [len(message) for _, _, message in decoded(states, preset=preset)]
        assert sizes[0] < mask.nbytes / 4
        assert max(sizes[1:]) < 700

    @pytest.mark.parametrize("preset", ["paper", "balanced", "extreme"])
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    def test_a_save_of_nothing_but_nan_costs_no_more_than_an_exact_one(self, preset, dtype):
        states = list(adam_states(4, dtype=dtype))
        nothing = jax.tree.map(
            lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x,
            {k: states[2][k] for k in ("params", "opt_state")},
        )
        states[2] = states[2] | nothing
        sizes = [len(message) for _, _, message in decoded(states, preset=preset)]
        exact = [len(message) for _, _, message in decoded(states, preset="lossless")]
        assert sizes[2] < 1.02 * exact[2] + 400
        assert sizes[3] < 1.02 * exact[3] + 400

    def test_a_state_that_stands_still_costs_nothing(self):
        states = list(adam_states(3))
        sizes = [len(m) for _, _, m in decoded([*states, *[states[-1]] * 4], preset="balanced")]
        params = [leaf.size for leaf in jax.tree.leaves(states[0]["params"])]
        assert max(sizes[4:]) < sizes[2]
        assert sizes[-1] - sizes[-2] in range(-40, 41)
        assert sum(params) > 1000

    def test_a_cosine_tail_is_followed(self):
        rng = np.random.default_rng(4)
        w = rng.standard_normal((50, 50)).astype(np.float32)

        def tail():
            nonlocal w
            for k in range(14):
                yield {"w": w}
                w = w + np.float32(0.01 * 0.4**k) * rng.standard_normal(w.shape).astype("f4")

        for state, got, _ in decoded(tail(), preset="balanced"):
            error = np.abs(state["w"] - got["w"]).max()
        assert error < 1e-4

    def test_frozen_leaves_beside_moving_ones(self):
        rng = np.random.default_rng(5)
        frozen = rng.standard_normal((50, 50)).astype(np.float32)

        def run():
            for _ in range(8):
                moving = rng.standard_normal((50, 50)).astype(np.float32)
                yield {"frozen": frozen, "moving": moving}

        kept = [np.asarray(got["frozen"]) for _, got, _ in decoded(run(), preset="balanced")]
        assert all(np.array_equal(kept[0], k) for k in kept[1:])

    @pytest.mark.parametrize("codec", [lcjax.Bounded(absolute=0.003), lcjax.Bounded(relative=0.01)])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_bounded_keeps_its_promise(self, codec, dtype):
        preset = lcjax.Preset("lossless", rules=(lcjax.Rule(codec, role="param"),))
        for state, got, _ in decoded(adam_states(5, dtype=jnp.dtype(dtype)), preset=preset):
            u = np.asarray(state["params"]["kernel"])
            assert within(u, np.asarray(got["params"]["kernel"]), codec)

    def test_pure_bf16_that_mostly_stays(self):
        rng = np.random.default_rng(6)
        w = np.asarray(jnp.asarray(rng.standard_normal(20000), jnp.bfloat16))
        moved = w.copy()
        moved[::100] = (moved[::100].astype("f4") * 1.02).astype(w.dtype)
        runs = list(decoded([{"w": w}, {"w": moved}], preset="balanced"))
        inner = container.from_bytes(container.from_bytes(runs[1][2]).chunk(0))
        assert inner.meta["leaves"][0]["chunks"][0]["codec"] in ("exact:diff", "lc")
        assert len(runs[1][2]) < len(runs[0][2]) / 20
        assert np.abs(np.asarray(runs[1][1]["w"], "f4") - moved.astype("f4")).max() < 0.02

    def test_a_reader_needs_the_leaves_that_a_moment_names(self):
        first, delta = self.two_messages()
        with pytest.raises(lcjax.CorruptDataError, match="no/such/leaf"):
            lcjax.decode(with_moments(delta, given=["no/such/leaf", None]), lcjax.decode(first))

    @pytest.mark.parametrize(
        "trail", [[2, 205], [1 << 40, 205], [0, 205], [1, 257], [1], "x", [True, 3]]
    )
    def test_a_trail_longer_than_its_chain_is_refused(self, trail):
        first, delta = self.two_messages()
        with pytest.raises(lcjax.CorruptDataError, match="moment"):
            lcjax.decode(with_moments(delta, trail=trail), lcjax.decode(first))

    def two_messages(self):
        states = list(adam_states(2))
        first, ref = lcjax.encode(states[0], preset="balanced")
        return first, lcjax.encode(states[1], ref)[0]


class TestOrbax:
    def save_all(self, root, registry, states):
        with ocp.CheckpointManager(root, handler_registry=registry) as manager:
            for step, state in enumerate(states):
                manager.save(step, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()

    def test_a_resumed_run_writes_what_an_uninterrupted_one_would(self, tmp_path):
        chain = lcjax.ChainOptions(delta_budget=1e9)
        states = list(adam_states(6))
        for root, stops in ((tmp_path / "whole", [6]), (tmp_path / "resumed", [3, 4, 6])):
            for k, stop in enumerate(stops):
                registry = lcjax.handler_registry("balanced", chain=chain)
                start = stops[k - 1] if k else 0
                with ocp.CheckpointManager(root, handler_registry=registry) as manager:
                    if start:
                        manager.restore(start - 1, args=ocp.args.StandardRestore(states[0]))
                    for step in range(start, stop):
                        manager.save(step, args=ocp.args.StandardSave(states[step]))
                        manager.wait_until_finished()
        found = [
            {p.name: p.read_bytes() for p in (tmp_path / run / "5" / "default").glob("*.lcx")}
            for run in ("whole", "resumed")
        ]
        assert found[0] == found[1] and len(found[0]) == 7

    def test_presets_by_step(self, tmp_path):
        registry = lcjax.handler_registry(
            lambda step, item: "lossless" if step % 2 else "balanced",
            chain=lcjax.ChainOptions(delta_budget=1e9),
        )
        states = list(adam_states(6))
        self.save_all(tmp_path, registry, states)
        reader = lcjax.handler_registry("lossless")
        with ocp.CheckpointManager(tmp_path, handler_registry=reader) as manager:
            for step, state in enumerate(states):
                got = manager.restore(step, args=ocp.args.StandardRestore(state))
                same = np.array_equal(got["params"]["kernel"], state["params"]["kernel"])
                assert same == bool(step % 2)

    def test_presets_by_item(self, tmp_path):
        registry = lcjax.handler_registry("balanced", items={"params": "lossless"})
        state = next(adam_states(1))
        args = {
            "params": ocp.args.StandardSave(state["params"]),
            "train": ocp.args.StandardSave(state),
        }
        with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
            manager.save(0, args=ocp.args.Composite(**args))
            manager.wait_until_finished()
            got = manager.restore(
                0,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(state["params"]),
                    train=ocp.args.StandardRestore(state),
                ),
            )
        assert np.array_equal(got.params["kernel"], state["params"]["kernel"])
        assert not np.array_equal(got.train["params"]["kernel"], state["params"]["kernel"])

    def test_a_reconstruction_is_what_a_restore_gives(self, tmp_path):
        handler = lcjax.CheckpointHandler("extreme")
        registry = lcjax.handler_registry(handler=handler)
        with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
            for step, state in enumerate(adam_states(4)):
                told = handler.reconstruction(state, tmp_path, step=step)
                manager.save(step, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
                got = manager.restore(step, args=ocp.args.StandardRestore(state))
                for a, b in zip(jax.tree.leaves(told), jax.tree.leaves(got), strict=True):
                    assert jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.all(x == y)), a, b))

    def test_what_was_lost_is_in_the_manifest(self, tmp_path):
        from etils import epath

        from lcjax import session

        states = list(adam_states(3))
        self.save_all(tmp_path, lcjax.handler_registry("balanced"), states)
        with session.Opened(epath.Path(tmp_path / "2" / "default")) as opened:
            record = opened.record
        lost = {n: leaf.lost for n, leaf in zip(record.names, record.leaves, strict=True)}
        assert lost["key"] is None and lost["opt_state/0/count"] is None
        kernel = lost["params/kernel"]
        assert 0.1 < kernel.relative_error < 0.9 and kernel.step > kernel.max_error > 0
        assert kernel.odd == 0 and 600 < kernel.zeros < 1200
        assert lost["opt_state/0/mu/kernel"].zeros == 1200
        assert record.notes()["params/kernel"].left == pytest.approx(kernel.left**2)

"""Chains of deltas under an Orbax manager: every listed step restores, whatever happens."""

import errno
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax_helpers import (
    LAYOUTS,
    LINKED,
    POOLED,
    Recorder,
    Training,
    chain_length,
    is_key_frame,
    item_of,
    manager,
    new_bytes,
    no_links,
    opened,
    registry,
    same,
    save,
)

import lcjax
from lcjax import chain

layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture
def training():
    return Training()


def pool_of(root):
    return sorted(p.name.removesuffix(".lcx") for p in (root / "lcjax_segments").glob("*.lcx"))


def named_in(root, steps, item="default"):
    names = set()
    for step in steps:
        with opened(root, step, item) as o:
            names.update(ref.name for ref in o.refs if ref.pooled)
    return sorted(names)


class TestKeepOne:
    def run(self, root, training, options, saves=12):
        recorder, written, seen = Recorder(root), [], set()
        with manager(root, chain=options, keep=1) as m:
            for step in range(saves):
                state = training.next()
                save(m, step, state)
                written.append(new_bytes(root, seen))
                recorder.note(step, state)
                assert m.all_steps() == [step]
                recorder.check(m)
        return written

    @layouts
    def test_nothing_is_lost(self, tmp_path, training, layout):
        written = self.run(tmp_path, training, LAYOUTS[layout])
        assert chain_length(tmp_path, 11) == 12
        own = written[0] - 13_000  # the optimizer state is stored anew each time
        assert max(written[1:]) < own + 5_000

    @pytest.mark.parametrize(
        "error", [PermissionError(errno.EPERM, "no"), OSError(errno.EOPNOTSUPP, "no")]
    )
    def test_without_hard_links_auto_pools(self, tmp_path, training, monkeypatch, error):
        no_links(monkeypatch, error)
        self.run(tmp_path, training, lcjax.ChainOptions(delta_budget=1e9, grace_seconds=0))
        with opened(tmp_path, 11) as o:
            assert len(o.chain_refs) == 12
            assert all(ref.pooled for ref in o.chain_refs)

    def test_with_hard_links_auto_links(self, tmp_path, training):
        self.run(tmp_path, training, lcjax.ChainOptions(delta_budget=1e9), saves=3)
        with opened(tmp_path, 2) as o:
            assert not any(ref.pooled for ref in o.chain_refs)
        assert not (tmp_path / "lcjax_segments").exists()

    def test_links_that_run_out_in_the_middle_of_a_chain(self, tmp_path, training, monkeypatch):
        no_links(monkeypatch, OSError(errno.EMLINK, "too many links"), after=4)
        self.run(tmp_path, training, LINKED, saves=6)
        assert chain_length(tmp_path, 5) == 6

    @layouts
    def test_a_state_that_stands_still(self, tmp_path, training, layout):
        state = training.next()
        with manager(tmp_path, "lossless", LAYOUTS[layout], keep=2) as m:
            for step in range(6):
                save(m, step, state)
                same(m.restore(step, args=ocp.args.StandardRestore(state)), state)
        assert chain_length(tmp_path, 5) == 6

    @layouts
    def test_a_state_that_goes_back_and_forth(self, tmp_path, training, layout):
        states = [training.next(), training.next()]
        with manager(tmp_path, "lossless", LAYOUTS[layout], keep=2) as m:
            for step in range(7):
                save(m, step, states[step % 2])
                for k in m.all_steps():
                    restored = m.restore(k, args=ocp.args.StandardRestore(states[0]))
                    same(restored, states[k % 2])


class TestLinks:
    def test_older_segments_are_links_and_bytes_are_counted_once(self, tmp_path, training):
        with manager(tmp_path, chain=LINKED) as m:
            for step in range(4):
                save(m, step, training.next())
        with opened(tmp_path, 3) as o:
            first, *_, last = (item_of(tmp_path, 3) / f"{r.name}.lcx" for r in o.chain_refs)
        assert os.stat(first).st_nlink == 4
        assert os.stat(last).st_nlink == 1
        assert new_bytes(tmp_path, set()) < 3 * new_bytes(tmp_path / "0", set())

    def test_a_step_copied_elsewhere_restores(self, tmp_path, training):
        recorder = Recorder(tmp_path / "run")
        with manager(tmp_path / "run") as m:
            for step in range(3):
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
        shutil.copytree(tmp_path / "run" / "2", tmp_path / "elsewhere" / "7")
        shutil.rmtree(tmp_path / "run")
        with manager(tmp_path / "elsewhere") as m:
            same(m.restore(7), recorder.expected[2])
        with ocp.Checkpointer(lcjax.CheckpointHandler()) as c:
            same(c.restore(tmp_path / "elsewhere" / "7" / "default"), recorder.expected[2])


class TestPool:
    def test_a_step_copied_without_the_pool_says_so(self, tmp_path, training):
        with manager(tmp_path / "run", chain=POOLED) as m:
            save(m, 0, training.next())
        shutil.copytree(tmp_path / "run" / "0", tmp_path / "elsewhere" / "0")
        with (
            manager(tmp_path / "elsewhere", chain=POOLED) as m,
            pytest.raises(lcjax.MissingFileError, match="elsewhere/lcjax_segments"),
        ):
            m.restore(0)
        shutil.copytree(tmp_path / "run" / "lcjax_segments", tmp_path / "elsewhere/lcjax_segments")
        with manager(tmp_path / "elsewhere", chain=POOLED) as m:
            assert m.restore(0)["step"] == 1

    def test_segments_of_deleted_steps_are_collected(self, tmp_path, training):
        options = lcjax.ChainOptions("pooled", max_chain=3, delta_budget=1e9, grace_seconds=0)
        recorder = Recorder(tmp_path)
        with manager(tmp_path, chain=options, keep=1) as m:
            for step in range(14):
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
                recorder.check(m)
                # Deletion follows the commit, so what the last deleted step needed may still lie.
                assert len(pool_of(tmp_path)) <= 6
                assert {*named_in(tmp_path, [step])} <= {*pool_of(tmp_path)}

    def test_two_items_share_the_pool(self, tmp_path, training):
        options = lcjax.ChainOptions("pooled", max_chain=3, delta_budget=1e9, grace_seconds=0)
        recorders = {name: Recorder(tmp_path, name) for name in ("a", "b")}
        with manager(tmp_path, chain=options, keep=2) as m:
            for step in range(9):
                states = {"a": training.next(), "b": training.next()}
                args = {name: ocp.args.StandardSave(state) for name, state in states.items()}
                m.save(step, args=ocp.args.Composite(**args))
                m.wait_until_finished()
                for name, recorder in recorders.items():
                    recorder.note(step, states[name])
                for k in m.all_steps():
                    restored = m.restore(k)
                    for name, recorder in recorders.items():
                        same(restored[name], recorder.expected[k], f"{name} of step {k}")

    def test_within_the_grace_period_nothing_is_collected(self, tmp_path, training):
        options = lcjax.ChainOptions("pooled", max_chain=1)
        with manager(tmp_path, chain=options, keep=1) as m:
            for step in range(4):
                save(m, step, training.next())
        assert len(pool_of(tmp_path)) == 4

    def test_an_unreadable_manifest_stops_collection(self, tmp_path, training):
        options = lcjax.ChainOptions("pooled", max_chain=1, grace_seconds=0)
        with manager(tmp_path, chain=options, keep=1) as m:
            save(m, 0, training.next())
            broken = tmp_path / "foreign" / "default"
            broken.mkdir(parents=True)
            (broken / chain.MANIFEST_FILE).write_bytes(b"not a manifest")
            for step in range(1, 5):
                save(m, step, training.next())
        assert len(pool_of(tmp_path)) == 5


class TestKeyFrames:
    def test_max_chain(self, tmp_path, training):
        options = lcjax.ChainOptions(max_chain=4, delta_budget=1e9)
        with manager(tmp_path, chain=options) as m:
            for step in range(10):
                save(m, step, training.next())
        assert [chain_length(tmp_path, k) for k in range(10)] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
        assert [k for k in range(10) if is_key_frame(tmp_path, k)] == [0, 4, 8]

    def test_delta_budget(self, tmp_path, training):
        options = lcjax.ChainOptions(delta_budget=0.5)
        recorder = Recorder(tmp_path)
        with manager(tmp_path, chain=options, keep=1) as m:
            for step in range(20):
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
                recorder.check(m)
                with opened(tmp_path, step) as o:
                    key, *deltas = (ref.size for ref in o.chain_refs)
                largest = max(deltas, default=0)
                assert sum(deltas) <= 0.5 * key + largest
        assert sum(base is None for base in recorder.bases.values()) > 1

    def test_a_useless_base_gives_a_key_frame(self, tmp_path):
        with manager(tmp_path) as m:
            save(m, 0, Training(1).next())
            other = jax.tree.map(lambda x: x * 1e6, Training(2).next()["params"])
            state = {**Training(1).next(), "params": other}
            save(m, 1, state)
            same(m.restore(1, args=ocp.args.StandardRestore(state)), state)
        assert is_key_frame(tmp_path, 1)


class TestRestart:
    @layouts
    def test_the_chain_goes_on_from_the_restored_step(self, tmp_path, training, layout):
        recorder = Recorder(tmp_path)
        for start in (0, 3, 6):
            with manager(tmp_path, chain=LAYOUTS[layout], keep=1) as m:
                if start:
                    same(m.restore(m.latest_step()), recorder.expected[start - 1])
                for step in range(start, start + 3):
                    state = training.next()
                    save(m, step, state)
                    recorder.note(step, state)
                    recorder.check(m)
        assert chain_length(tmp_path, 8) == 9

    @layouts
    def test_without_a_restore_a_key_frame_is_written(self, tmp_path, training, layout):
        for step in range(2):
            with manager(tmp_path, chain=LAYOUTS[layout]) as m:
                save(m, step, training.next())
        assert is_key_frame(tmp_path, 1)

    def test_close_keeps_the_chain(self, tmp_path, training):
        shared = registry()
        recorder = Recorder(tmp_path)
        for step in range(3):
            with manager(tmp_path, handler_registry=shared) as m:
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
                recorder.check(m)
        assert recorder.bases == {0: None, 1: 0, 2: 1}

    def test_a_damaged_base_gives_a_key_frame(self, tmp_path, training):
        with manager(tmp_path) as m:
            save(m, 0, training.next())
        with manager(tmp_path) as m:
            m.restore(0)
            with opened(tmp_path, 0) as o:
                path = item_of(tmp_path, 0) / f"{o.chain_refs[0].name}.lcx"
            data = bytearray(path.read_bytes())
            data[40] ^= 1
            path.write_bytes(data)
            state = training.next()
            save(m, 1, state)
            same(m.restore(1, args=ocp.args.StandardRestore(state)), state)


class TestLookingBackAndRollingBack:
    @layouts
    def test_a_look_at_an_old_step_does_not_disturb_the_chain(self, tmp_path, training, layout):
        recorder = Recorder(tmp_path)
        with manager(tmp_path, chain=LAYOUTS[layout]) as m:
            for step in range(6):
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
                same(m.restore(step // 2), recorder.expected[step // 2])
            recorder.check(m)
        assert recorder.bases == {0: None, 1: 0, 2: 1, 3: 2, 4: 3, 5: 4}

    @layouts
    @pytest.mark.parametrize("delete", [False, True])
    def test_rolling_back_builds_on_an_earlier_step(self, tmp_path, training, layout, delete):
        recorder = Recorder(tmp_path)
        with manager(tmp_path, chain=LAYOUTS[layout]) as m:

            def go(step, **kwargs):
                state = training.next()
                save(m, step, state, **kwargs)
                recorder.note(step, state)

            for step in (40, 50, 100):
                go(step)
            same(m.restore(50), recorder.expected[50])
            if delete:
                m.delete(100)
            for step in (60, 70):
                go(step, force=True)
                recorder.check(m)
            if delete:
                go(100)
                recorder.check(m)
            else:
                go(110)
                recorder.check(m)
        assert recorder.bases[60] == 50
        assert recorder.bases[70] == 60
        assert recorder.bases[100 if delete else 110] == 70

    def test_rolling_back_without_a_restore_builds_on_an_earlier_save(self, tmp_path, training):
        recorder = Recorder(tmp_path)
        with manager(tmp_path) as m:
            for step, force in ((10, False), (20, False), (15, True)):
                state = training.next()
                save(m, step, state, force=force)
                recorder.note(step, state)
            recorder.check(m)
        assert recorder.bases[15] == 10


class TestDeletion:
    @layouts
    def test_of_the_base_by_hand(self, tmp_path, training, layout):
        recorder = Recorder(tmp_path)
        with manager(tmp_path, chain=LAYOUTS[layout]) as m:
            for step in range(5):
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
                if step == 2:
                    shutil.rmtree(tmp_path / "2")
                    m.reload()
            recorder.check(m)
            assert m.all_steps() == [0, 1, 3, 4]
        # Step 1 is still there to build on.
        assert recorder.bases == {0: None, 1: 0, 2: 1, 3: 1, 4: 3}

    @layouts
    def test_of_the_only_base(self, tmp_path, training, layout):
        with manager(tmp_path, chain=LAYOUTS[layout]) as m:
            save(m, 0, training.next())
            shutil.rmtree(tmp_path / "0")
            state = training.next()
            save(m, 1, state)
            same(m.restore(1, args=ocp.args.StandardRestore(state)), state)
        assert is_key_frame(tmp_path, 1)

    @layouts
    def test_by_the_manager(self, tmp_path, training, layout):
        recorder = Recorder(tmp_path)
        with manager(tmp_path, chain=LAYOUTS[layout]) as m:
            for step in range(6):
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
                if step in (0, 1, 4):
                    m.delete(step)
            assert m.all_steps() == [2, 3, 5]
            recorder.check(m)

    def test_while_it_is_being_built_on(self, tmp_path, training, monkeypatch):
        recorder = Recorder(tmp_path)
        with manager(tmp_path) as m:
            state = training.next()
            save(m, 0, state)
            real = chain.carry_segments

            def late(source, *args):
                shutil.rmtree(tmp_path / "0")
                return real(source, *args)

            monkeypatch.setattr("lcjax.chain.carry_segments", late)
            state = training.next()
            save(m, 1, state)
            recorder.note(1, state)
            monkeypatch.undo()
            m.reload()
            recorder.check(m)
        assert is_key_frame(tmp_path, 1)

    @layouts
    @pytest.mark.parametrize(
        "options", [{"enable_background_delete": True}, {"todelete_subdir": "trash"}]
    )
    def test_by_orbax_in_other_ways(self, tmp_path, training, layout, options):
        recorder = Recorder(tmp_path)
        with manager(tmp_path, chain=LAYOUTS[layout], keep=1, **options) as m:
            for step in range(5):
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
                recorder.check(m)
        assert chain_length(tmp_path, 4) == 5

    @layouts
    def test_best_fn_that_evicts_the_newest(self, tmp_path, training, layout):
        recorder = Recorder(tmp_path)
        options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "keep": 2}
        with manager(tmp_path, chain=LAYOUTS[layout], **options) as m:
            for step, loss in enumerate([1.0, 2.0, 9.0, 8.0, 0.5, 7.0]):
                state = training.next()
                save(m, step, state, metrics={"loss": loss})
                if step in m.all_steps():
                    recorder.note(step, state)
                restored = {k: m.restore(k) for k in m.all_steps()}
                for k, value in restored.items():
                    same(value, recorder.expected[k])
            assert m.all_steps() == [0, 4]
            assert m.best_step() == 4


class TestChangingStates:
    @pytest.mark.parametrize("preset", ["paper", "lossless"])
    def test_leaves_that_come_go_and_change(self, tmp_path, preset):
        rng = np.random.default_rng(0)

        def f32(*shape):
            return jnp.asarray(rng.standard_normal(shape).astype(np.float32))

        a, b = f32(40, 30), f32(50)
        states = [
            {"a": a, "b": b},
            {"a": a + 0.01, "b": b + 0.01},
            {"a": a + 0.02, "b": b + 0.02, "new": f32(30)},
            {"a": a + 0.03, "b": b.astype(jnp.bfloat16), "new": f32(30)},
            {"a": a + 0.04, "b": b.astype(jnp.bfloat16), "new": f32(10, 3)},
            {"a": a + 0.05},
            {"c": f32(20)},
            {},
            {"a": a},
        ]
        recorder = Recorder(tmp_path, preset=preset)
        with manager(tmp_path, preset) as m:
            for step, state in enumerate(states):
                save(m, step, state)
                recorder.note(step, state)
                recorder.check(m)
                if preset == "lossless":
                    same(m.restore(step), state)
        assert [k for k in range(9) if is_key_frame(tmp_path, k)] == [0, 6, 7, 8]

    def test_scalars_only(self, tmp_path):
        with manager(tmp_path) as m:
            for step in range(3):
                save(m, step, {"step": step, "name": "x"})
                assert m.restore(step) == {"step": step, "name": "x"}


class TestSharing:
    def test_two_items_keep_chains_of_their_own(self, tmp_path):
        runs = {"params": Training(1), "train_state": Training(2)}
        recorders = {name: Recorder(tmp_path, name) for name in runs}
        with manager(tmp_path, keep=1) as m:
            for step in range(4):
                states = {name: run.next() for name, run in runs.items()}
                args = {name: ocp.args.StandardSave(state) for name, state in states.items()}
                m.save(step, args=ocp.args.Composite(**args, meta=ocp.args.JsonSave({"s": step})))
                m.wait_until_finished()
                restored = m.restore(step)
                assert restored["meta"] == {"s": step}
                for name, recorder in recorders.items():
                    recorder.note(step, states[name])
                    same(restored[name], recorder.expected[step], name)
        for recorder in recorders.values():
            assert recorder.bases == {0: None, 1: 0, 2: 1, 3: 2}

    def test_two_managers_on_one_handler(self, tmp_path):
        shared = registry()
        roots = [tmp_path / "a", tmp_path / "b"]
        runs = [Training(1), Training(2)]
        recorders = [Recorder(root) for root in roots]
        with (
            manager(roots[0], handler_registry=shared) as a,
            manager(roots[1], handler_registry=shared) as b,
        ):
            for step in range(3):
                for m, run, recorder in zip((a, b), runs, recorders, strict=True):
                    state = run.next()
                    save(m, step, state)
                    recorder.note(step, state)
            for m, recorder in zip((a, b), recorders, strict=True):
                recorder.check(m)
                assert recorder.bases == {0: None, 1: 0, 2: 1}


class TestNames:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"step_prefix": "ckpt"}, "ckpt_{}"),
            ({"step_format_fixed_length": 8}, "{:08}"),
            ({"step_prefix": "v2", "step_format_fixed_length": 4}, "v2_{:04}"),
        ],
    )
    def test_step_names(self, tmp_path, training, options, name):
        recorder = Recorder(tmp_path)
        with manager(tmp_path, **options) as m:
            for step in range(9, 12):
                state = training.next()
                save(m, step, state)
                with opened(tmp_path, name.format(step)) as o:
                    assert o.record.step == step
                    assert len(o.chain_refs) == step - 8
                recorder.root = tmp_path / "links"
                recorder.root.mkdir(exist_ok=True)
                (recorder.root / str(step)).symlink_to(tmp_path / name.format(step))
                recorder.note(step, state)
            recorder.check(m)

    def test_checkpointers_build_chains_on_numbered_directories(self, tmp_path, training):
        recorder = Recorder(tmp_path, item="")
        with ocp.Checkpointer(lcjax.CheckpointHandler(preset="paper", chain=LINKED)) as c:
            for step in (10, 20, 30):
                state = training.next()
                c.save(tmp_path / str(step), args=lcjax.args.Save(state))
                recorder.note(step, state)
                same(c.restore(tmp_path / str(step)), recorder.expected[step])
        assert recorder.bases == {10: None, 20: 10, 30: 20}

    @pytest.mark.parametrize("options", [LINKED, POOLED, lcjax.ChainOptions()])
    def test_a_directory_without_a_number_stands_alone(self, tmp_path, training, options):
        with ocp.Checkpointer(lcjax.CheckpointHandler(preset="paper", chain=options)) as c:
            for name in ("first", "second"):
                state = training.next()
                c.save(tmp_path / name, args=lcjax.args.Save(state))
                same(c.restore(tmp_path / name, args=lcjax.args.Restore(state)), state)
            state = training.next()
            c.save(tmp_path / "first", args=lcjax.args.Save(state), force=True)
            same(c.restore(tmp_path / "first", args=lcjax.args.Restore(state)), state)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "second"]

    def test_overwriting_a_numbered_directory(self, tmp_path, training):
        recorder = Recorder(tmp_path, item="")
        with ocp.Checkpointer(lcjax.CheckpointHandler(preset="paper", chain=LINKED)) as c:
            for step in (1, 2, 2, 3, 3, 1):
                state = training.next()
                c.save(tmp_path / str(step), args=lcjax.args.Save(state), force=True)
                recorder.note(step, state)
                for k in recorder.expected:
                    same(c.restore(tmp_path / str(k)), recorder.expected[k], f"step {k}")
        assert recorder.bases[1] is None
        assert recorder.bases[3] == 2

    def test_the_step_may_be_given(self, tmp_path, training):
        with ocp.Checkpointer(lcjax.CheckpointHandler(preset="paper", chain=LINKED)) as c:
            c.save(tmp_path / "early", args=lcjax.args.Save(training.next(), step=1))
            c.save(tmp_path / "late", args=lcjax.args.Save(training.next(), step=2))
            for name, step in (("early", 1), ("late", 2)):
                assert c.restore(tmp_path / name)["step"] == step

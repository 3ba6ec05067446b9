"""Every way in which a script hands its state to lcjax, saved and restored."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax_helpers import (
    LINKED,
    Recorder,
    Training,
    every_kind,
    is_key_frame,
    item_of,
    manager,
    opened,
    same,
    save,
)

import lcjax

ASYNC = {"async": True, "sync": False}


@pytest.fixture(scope="module")
def tree():
    return every_kind()


def managers(path, sync, preset):
    """Every construction of a manager, with what ``save`` takes and how to unpack a restore."""
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=not sync)
    handler = lcjax.CheckpointHandler(preset=preset)
    yield (
        "registry",
        ocp.CheckpointManager(
            path / "a", options=options, handler_registry=lcjax.handler_registry(preset=preset)
        ),
    )
    yield (
        "item_handlers",
        ocp.CheckpointManager(path / "b", options=options, item_handlers={"state": handler}),
    )
    yield (
        "one item_handler",
        ocp.CheckpointManager(path / "c", options=options, item_handlers=handler),
    )
    checkpointer = (ocp.Checkpointer if sync else ocp.AsyncCheckpointer)(handler)
    yield (
        "legacy checkpointers",
        ocp.CheckpointManager(path / "d", {"state": checkpointer}, options=options),
    )
    yield (
        "legacy checkpointer",
        ocp.CheckpointManager(path / "e", checkpointer, options=options),
    )


@pytest.mark.parametrize("mode", ASYNC)
def test_every_construction_saves_and_restores(tmp_path, tree, mode):
    for name, m in managers(tmp_path, not ASYNC[mode], "lossless"):
        if name == "registry":
            m.save(0, args=ocp.args.StandardSave(tree))
        elif name == "item_handlers":
            m.save(0, args=ocp.args.Composite(state=lcjax.args.Save(tree)))
        elif name == "one item_handler":
            m.save(0, args=lcjax.args.Save(tree))
        elif name == "legacy checkpointers":
            m.save(0, {"state": tree})
        else:
            m.save(0, tree)
        m.wait_until_finished()
        restored = m.restore(0)
        if name in ("item_handlers", "legacy checkpointers"):
            same(restored["state"], tree, name)
            again = m.restore(0, items={"state": tree})["state"]
        else:
            same(restored, tree, name)
            again = None if name == "registry" else m.restore(0, items=tree)
        if again is not None:
            same(again, tree, name)
        m.close()


@pytest.mark.parametrize("mode", ASYNC)
def test_legacy_items_of_item_handlers(tmp_path, tree, mode):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=ASYNC[mode])
    handlers = {"state": lcjax.CheckpointHandler(preset="lossless")}
    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=handlers) as m:
        m.save(0, {"state": tree})
        m.wait_until_finished()
        same(m.restore(0)["state"], tree)
        composite = ocp.args.Composite(state=lcjax.args.Restore(tree))
        same(m.restore(0, args=composite)["state"], tree)


SAVES = {
    "StandardSave": ocp.args.StandardSave,
    "PyTreeSave": ocp.args.PyTreeSave,
    "lcjax.args.Save": lcjax.args.Save,
}
RESTORES = {
    "StandardRestore": ocp.args.StandardRestore,
    "PyTreeRestore": ocp.args.PyTreeRestore,
    "lcjax.args.Restore": lcjax.args.Restore,
}


@pytest.mark.parametrize("saving", SAVES)
def test_all_arguments_reach_lcjax_through_the_registry(tmp_path, tree, saving):
    with manager(tmp_path, "lossless") as m:
        m.save(3, args=SAVES[saving](tree))
        m.wait_until_finished()
        assert "lcjax" in (item_of(tmp_path, 3) / "LCJAX.txt").read_text()
        same(m.restore(3), tree, "no args")
        for name, cls in RESTORES.items():
            same(m.restore(3, args=cls(tree)), tree, f"{name} with a target")
            same(m.restore(3, args=cls()), tree, name)


def test_a_new_manager_restores_the_latest_step(tmp_path, tree):
    with manager(tmp_path, "lossless") as m:
        save(m, 5, tree)
    with manager(tmp_path, "paper") as m:
        same(m.restore(m.latest_step(), args=ocp.args.StandardRestore(tree)), tree)
        same(m.restore(None, args=ocp.args.StandardRestore(tree)), tree)


@pytest.mark.parametrize("cls", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_checkpointers_without_a_manager(tmp_path, tree, cls):
    with cls(lcjax.CheckpointHandler(preset="lossless")) as c:
        c.save(tmp_path / "final", args=lcjax.args.Save(tree))
        c.save(tmp_path / "legacy", tree)
        if cls is ocp.AsyncCheckpointer:
            c.wait_until_finished()
        same(c.restore(tmp_path / "final"), tree)
        same(c.restore(tmp_path / "final", args=lcjax.args.Restore(tree)), tree)
        same(c.restore(tmp_path / "legacy", item=tree), tree)
    with ocp.Checkpointer(lcjax.CheckpointHandler()) as c:  # as LCJAX.txt says
        same(c.restore(tmp_path / "final"), tree)
        assert c.metadata(tmp_path / "final").item_metadata.tree["uint8"].shape == (256,)


def test_a_preset_per_save(tmp_path):
    run = Training()
    with manager(tmp_path, "paper") as m:
        recorder = Recorder(tmp_path)
        for step, preset in enumerate(["paper", "paper", "lossless", "lossless", "paper"]):
            state = run.next()
            m.save(step, args=lcjax.args.Save(state, preset=preset))
            m.wait_until_finished()
            recorder.note(step, state, preset)
            if preset == "lossless":
                same(m.restore(step, args=lcjax.args.Restore(state)), state)
            with opened(tmp_path, step) as o:
                assert o.record.preset["name"] == preset
        recorder.check(m)
        assert not any(is_key_frame(tmp_path, k) for k in (1, 2, 3, 4))


@pytest.mark.parametrize("options", [{"bits": 2}, {"scope": "leaf"}, {"bits": 5, "scope": "leaf"}])
def test_options_of_a_save(tmp_path, options):
    run = Training()
    with manager(tmp_path) as m:
        save(m, 0, run.next())
        m.save(1, args=lcjax.args.Save(run.next(), **options))
        m.wait_until_finished()
    with opened(tmp_path, 1) as o:
        expected = {"name": "paper", "bits": 3, "scope": "model", **options}
        assert o.record.preset == expected
        last = o.segments()[0][0][-1]
        sizes = {table.size for table in last.tables}
        assert len(last.tables) == (2 if options.get("scope") == "leaf" else 1)
        assert max(sizes) <= 2 ** expected["bits"]


def test_paper_on_every_kind_of_leaf(tmp_path, tree):
    recorder = Recorder(tmp_path)
    tree = {**tree, "bfloat16": jnp.asarray([1e-40, -0.0, jnp.nan, jnp.inf], jnp.bfloat16)}
    with manager(tmp_path, chain=LINKED) as m:
        for step in range(3):
            moved = {
                **tree,
                "float32_large": tree["float32_large"] * (1 + 0.01 * step),
                "float32": tree["float32"][::-1] if step == 1 else tree["float32"],
            }
            save(m, step, moved)
            recorder.note(step, moved)
            recorder.check(m)
            restored = m.restore(step, args=ocp.args.StandardRestore(moved))
            exact = [k for k in tree if not k.startswith(("float", "bfloat"))]
            same({k: restored[k] for k in exact}, {k: moved[k] for k in exact})
            # What is not finite is exact, whatever the preset.
            odd = ~np.isfinite(np.asarray(moved["float32"]))
            same(np.asarray(restored["float32"])[odd], np.asarray(moved["float32"])[odd])
    assert recorder.bases == {0: None, 1: 0, 2: 1}


def test_paper_keeps_the_payload_of_a_bfloat16_nan(tmp_path):
    values = np.array([0x7FC1, 0x3F80], np.uint16)
    with manager(tmp_path, chain=LINKED) as m:
        for step in range(2):
            state = {
                "w": jnp.asarray(values.view(jnp.bfloat16)),
                "moving": jnp.linspace(0, 1 + 0.01 * step, 100),
            }
            save(m, step, state)
            same(m.restore(step)["w"], state["w"])


def test_key_frame_on_demand(tmp_path):
    run = Training()
    with manager(tmp_path) as m:
        save(m, 0, run.next())
        state = run.next()
        m.save(1, args=lcjax.args.Save(state, key_frame=True))
        m.wait_until_finished()
        assert is_key_frame(tmp_path, 1)
        same(m.restore(1, args=lcjax.args.Restore(state)), state)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of thirty saves: its directory, manager, true states and recorder."""
    root = tmp_path_factory.mktemp("paper")
    training, states = Training(), {}
    recorder = Recorder(root)
    with manager(root, chain=LINKED) as made:
        for step in range(30):
            states[step] = training.next()
            save(made, step, states[step])
            recorder.note(step, states[step])
        yield root, made, states, recorder


class TestPaper:
    """Thirty saves of the lossy preset, against the pure functions."""

    def test_what_is_restored_is_what_was_recorded(self, run):
        root, m, _, recorder = run
        recorder.check(m)
        assert [k for k in range(30) if is_key_frame(root, k)] == [0]

    def test_what_is_no_parameter_is_exact(self, run):
        _, m, states, _ = run
        for step, state in states.items():
            restored = m.restore(step, args=ocp.args.StandardRestore(state))
            for name in ("opt_state", "step", "key"):
                same(restored[name], state[name], name)

    def test_errors_do_not_accumulate(self, run):
        _, m, states, _ = run
        errors = [self.error(m.restore(step), state) for step, state in states.items()]
        moved = self.error(states[0], states[1])
        assert errors[0] == 0
        assert 0 < max(errors) < 2 * moved  # without feedback it would pass 5 steps' movement
        assert max(errors[20:]) < 1.5 * max(errors[1:10])

    def error(self, restored, state):
        pairs = zip(
            jax.tree.leaves(restored["params"]), jax.tree.leaves(state["params"]), strict=True
        )
        return float(np.sqrt(sum(np.sum((np.asarray(a) - b) ** 2) for a, b in pairs)))

    def test_what_was_lost_is_written_down(self, run):
        root, m, states, _ = run
        for step in (1, 15, 29):
            with opened(root, step) as o:
                lost = o.record.fidelity
            error = self.error(m.restore(step), states[step])
            whole = self.error(jax.tree.map(jnp.zeros_like, states[step]), states[step])
            assert lost["state_error"] == pytest.approx(error / whole, rel=2e-3)
            assert 0 < lost["relative_error"] < 1
            assert 0 < lost["max_error"] <= error
        with opened(root, 0) as o:
            assert o.record.fidelity is None


class TestAnnouncement:
    def warnings(self, caplog):
        return [r.getMessage() for r in caplog.records if "is lossy" in r.getMessage()]

    def test_a_lossy_preset_says_so_once_per_handler(self, tmp_path, caplog):
        caplog.set_level(logging.WARNING)
        run = Training()
        with manager(tmp_path) as m:
            for step in range(3):
                save(m, step, run.next())
        (text,) = self.warnings(caplog)
        assert "'paper'" in text
        assert "lossless" in text

    def test_lossless_says_nothing(self, tmp_path, caplog):
        caplog.set_level(logging.WARNING)
        with manager(tmp_path, "lossless") as m:
            save(m, 0, Training().next())
            assert self.warnings(caplog) == []
            m.save(1, args=lcjax.args.Save(Training().next(), preset="paper"))
            m.wait_until_finished()
        assert len(self.warnings(caplog)) == 1


class TestPresetErrors:
    def test_without_a_preset_nothing_is_saved(self, tmp_path):
        with ocp.Checkpointer(lcjax.CheckpointHandler()) as c:
            with pytest.raises(lcjax.PresetError, match="preset='lossless'"):
                c.save(tmp_path / "x", args=lcjax.args.Save({"w": jnp.ones(3)}))
            c.save(tmp_path / "x", args=lcjax.args.Save({"w": jnp.ones(3)}, preset="lossless"))
            same(c.restore(tmp_path / "x"), {"w": jnp.ones(3)})

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"preset": "papper"}, "unknown preset 'papper'.*'lossless', 'paper'"),
            ({"preset": "paper", "bits": 9}, "bits must be an int from 1 to 8, got 9"),
            ({"preset": "paper", "scope": "tree"}, "scope must be one of model, leaf"),
            ({"preset": "lossless", "bits": 3}, "'lossless' takes neither"),
            ({"preset": None}, "name a preset"),
        ],
    )
    def test_bad_presets_are_refused_at_construction(self, kwargs, message):
        with pytest.raises(lcjax.PresetError, match=message):
            lcjax.handler_registry(**kwargs)
        if kwargs["preset"] is not None:
            with pytest.raises(lcjax.PresetError, match=message):
                lcjax.CheckpointHandler(**kwargs)

    def test_a_bad_preset_of_a_save_costs_that_save(self, tmp_path):
        with manager(tmp_path) as m:
            with pytest.raises(lcjax.PresetError, match="unknown preset 'x'"):
                m.save(0, args=lcjax.args.Save({"w": jnp.ones(3)}, preset="x"))
            save(m, 1, {"w": jnp.ones(3)})
            same(m.restore(1), {"w": jnp.ones(3)})

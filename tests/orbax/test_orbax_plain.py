"""Steps that plain Orbax wrote, read by lcjax; and steps of lcjax, met by plain Orbax."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax_helpers import abstract, is_key_frame, item_of, manager, same, save

import lcjax

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    # Where Orbax gives up in the middle of reading, that is reported later.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def state():
    return {
        "params": {"w": jnp.linspace(0, 1, 300), "b": jnp.zeros(4, jnp.bfloat16)},
        "key": jax.random.key(5),
        "step": 3,
        "numpy": np.arange(3),
    }


@pytest.fixture(scope="module", params=["StandardSave", "PyTreeSave", "zarr3"])
def written(request, state, tmp_path_factory):
    """A root with step 0 by plain Orbax, and what Orbax restores of it."""
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "zarr3":
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
        with ocp.CheckpointManager(root, item_handlers=handler) as m:
            m.save(0, args=ocp.args.PyTreeSave(state))
            m.wait_until_finished()
    else:
        with ocp.CheckpointManager(root) as m:
            m.save(0, args=getattr(ocp.args, request.param)(state))
            m.wait_until_finished()
    return root


class TestWrittenByOrbax:
    @pytest.mark.parametrize(
        "args",
        [
            lambda s: None,
            lambda s: ocp.args.StandardRestore(),
            lambda s: ocp.args.StandardRestore(s),
            lambda s: ocp.args.StandardRestore(abstract(s)),
            lambda s: ocp.args.PyTreeRestore(),
            lambda s: ocp.args.PyTreeRestore(s),
            lambda s: lcjax.args.Restore(),
            lambda s: lcjax.args.Restore(s),
        ],
        ids=[
            "no args",
            "Standard",
            "Standard target",
            "Standard abstract target",
            "PyTree",
            "PyTree target",
            "lcjax",
            "lcjax target",
        ],
    )
    def test_it_restores(self, written, state, args):
        with manager(written, "paper") as m:
            given = args(state)
            restored = m.restore(0) if given is None else m.restore(0, args=given)
        same(restored["params"], state["params"])
        same(restored["key"], state["key"])
        assert restored["step"] == 3
        assert np.array_equal(restored["numpy"], state["numpy"])

    def test_its_metadata(self, written, state):
        with manager(written, "paper") as m:
            m.restore(0)  # as in Orbax, a manager learns with the first call what an item is
            tree = m.item_metadata(0).tree
        assert tree["params"]["w"].shape == (300,)
        assert tree["params"]["b"].dtype == jnp.bfloat16

    def test_a_part_of_it(self, written, state):
        with manager(written, "paper") as m:
            target = {"params": state["params"]}
            restored = m.restore(0, args=lcjax.args.Restore(target, partial_restore=True))
        same(restored, target)


def test_after_the_switch_lcjax_writes(tmp_path, state):
    with ocp.CheckpointManager(tmp_path) as m:
        save(m, 0, state)
    with manager(tmp_path, "lossless") as m:
        m.restore(0, args=ocp.args.StandardRestore(state))
        for step in (1, 2):
            save(m, step, state)
        for step in (0, 1, 2):
            same(m.restore(step, args=ocp.args.StandardRestore(state)), state)
    assert is_key_frame(tmp_path, 1)
    assert not is_key_frame(tmp_path, 2)
    assert (item_of(tmp_path, 2) / "LCJAX.txt").exists()


class TestMetByOrbax:
    @pytest.fixture
    def root(self, tmp_path, state):
        with manager(tmp_path, "lossless") as m:
            save(m, 0, state)
        return tmp_path

    def test_without_arguments_it_restores(self, root, state):
        with ocp.CheckpointManager(root) as m:
            same(m.restore(0), state)
            assert m.item_metadata(0).tree["params"]["w"].shape == (300,)

    def test_with_lcjax_arguments_it_restores(self, root, state):
        with ocp.CheckpointManager(root) as m:
            same(m.restore(0, args=lcjax.args.Restore(state)), state)

    def test_with_standard_arguments_it_fails_and_the_note_says_what_to_do(self, root, state):
        with (
            ocp.CheckpointManager(root) as m,
            pytest.raises((FileNotFoundError, ValueError), match="default"),
        ):
            m.restore(0, args=ocp.args.StandardRestore(state))
        note = (item_of(root, 0) / "LCJAX.txt").read_text()
        for word in ("lcjax 0.", "lossless", "pip install lcjax", "handler_registry", "FORMAT.md"):
            assert word in note

    def test_the_notes_recipe_works(self, root):
        note = (item_of(root, 0) / "LCJAX.txt").read_text()
        recipe = [line.strip() for line in note.splitlines() if line.startswith("    ")][1:]
        code = "\n".join([*recipe, "print(float(state['params']['w'][-1]), state['step'])"])
        code = code.replace("path_of_this_directory", repr(str(item_of(root, 0))))
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.stdout.split() == ["1.0", "3"], done.stderr

"""What Orbax's Standard handler does, side by side with lcjax."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from orbax_helpers import abstract, every_kind, item_of, manager, same, save

import lcjax

# Where Orbax refuses a target it gives up in the middle of reading, which is reported later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def without(tree, *names):
    return {k: v for k, v in tree.items() if k not in names}


@pytest.fixture(scope="module")
def tree():
    """Every kind of leaf that Standard takes."""
    whole = without(every_kind(), "empty", "text", "uint4")
    return {**whole, "python": without(whole["python"], "large")}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tree):
    """Two managers, Orbax's own and ours, with the same tree saved as step 0."""
    root = tmp_path_factory.mktemp("pair")
    with (
        ocp.CheckpointManager(root / "orbax") as theirs,
        manager(root / "lcjax", "lossless") as ours,
    ):
        save(theirs, 0, tree)
        save(ours, 0, tree)
        yield theirs, ours


def restore_both(pair, target):
    return [m.restore(0, args=ocp.args.StandardRestore(target)) for m in pair]


class TestRestore:
    def test_without_a_target(self, pair, tree):
        theirs, ours = restore_both(pair, None)
        same(ours, theirs)
        same(ours, tree)

    @pytest.mark.parametrize("kind", ["concrete", "abstract", "zeros"])
    def test_with_a_target(self, pair, tree, kind):
        target = {
            "concrete": lambda: tree,
            "abstract": lambda: jax.tree.map(
                lambda x: ocp.utils.to_shape_dtype_struct(x) if isinstance(x, jax.Array) else x,
                tree,
            ),
            "zeros": lambda: jax.tree.map(
                lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else x, tree
            ),
        }[kind]()
        theirs, ours = restore_both(pair, target)
        same(ours, theirs)

    @pytest.mark.parametrize(
        ("name", "wanted"),
        [
            ("float32_large", jax.ShapeDtypeStruct((20, 50), jnp.bfloat16)),
            ("float32_large", np.zeros((20, 50), np.float64)),
            ("float32_large", jnp.zeros((20, 50), jnp.float16)),
            ("int32", jax.ShapeDtypeStruct((2,), jnp.float32)),
            ("uint8", np.zeros(256, np.int32)),
            ("numpy_float64", jnp.zeros(4)),
            ("zero_d", 0.0),
            ("key", jax.random.key(0)),
            ("keys", jax.random.split(jax.random.key(0, impl="rbg"), 3)),
        ],
    )
    def test_the_targets_dtype_and_type_win(self, pair, tree, name, wanted):
        theirs, ours = restore_both(pair, {**tree, name: wanted})
        same(ours[name], theirs[name], name)

    @pytest.mark.parametrize(("name", "wanted"), [("int", 0.0), ("float", 0), ("bool", 0)])
    def test_scalars_become_what_the_target_is(self, pair, tree, name, wanted):
        python = {**tree["python"], name: wanted}
        theirs, ours = restore_both(pair, {**tree, "python": python})
        same(ours["python"], theirs["python"])

    def test_none_in_the_target_leaves_a_leaf_out(self, pair, tree):
        theirs, ours = restore_both(pair, {**tree, "float32": None})
        same(ours, theirs)

    def test_raw_key_data_and_typed_keys_become_each_other(self, tmp_path):
        key = jax.random.key(3)
        raw = jax.random.key_data(key)
        with manager(tmp_path, "lossless") as m:
            save(m, 0, {"k": key})
            save(m, 1, {"k": raw})
            for step in (0, 1):
                for wanted in (key, raw):
                    restored = m.restore(step, args=ocp.args.StandardRestore({"k": wanted}))
                    same(restored, {"k": wanted})

    def test_a_leaf_without_its_like_is_refused_by_both(self, pair, tree):
        for target in (
            {**tree, "extra": jnp.zeros(2)},
            without(tree, "uint8"),
            {**tree, "uint8": jax.ShapeDtypeStruct((255,), jnp.uint8)},
            {**tree, "uint8": 1},
            {**tree, "key": jax.random.key(0, impl="rbg")},
        ):
            for m in pair:
                with pytest.raises(ValueError, match="."):
                    m.restore(0, args=ocp.args.StandardRestore(target))

    def test_memory_kinds(self, tmp_path):
        device = jax.devices()[0]
        kinds = [memory.kind for memory in device.addressable_memories()]
        x = jnp.arange(8.0)
        with manager(tmp_path, "lossless") as m:
            save(m, 0, {"x": x})
            for kind in kinds:
                sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
                target = {"x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
                restored = m.restore(0, args=ocp.args.StandardRestore(target))
                assert restored["x"].sharding.memory_kind == kind
                same(restored["x"], x)


class TestMetadata:
    def test_the_tree_is_that_of_standard(self, pair, tree):
        theirs, ours = (m.item_metadata(0) for m in pair)
        assert type(ours) is type(theirs)
        assert jax.tree.structure(ours.tree) == jax.tree.structure(theirs.tree)
        for a, b in zip(jax.tree.leaves(ours.tree), jax.tree.leaves(theirs.tree), strict=True):
            assert type(a) is type(b)
            for field in ("name", "shape", "dtype", "sharding"):
                assert getattr(a, field) == getattr(b, field), (a, b)

    def test_a_manager_with_item_handlers_knows_it_at_once(self, tmp_path):
        for _ in range(2):
            handler = lcjax.CheckpointHandler(preset="lossless")
            with ocp.CheckpointManager(tmp_path, item_handlers=handler) as m:
                if m.latest_step() is None:
                    m.save(0, args=lcjax.args.Save({"x": jnp.ones((2, 3))}))
                    m.wait_until_finished()
                assert m.item_metadata(0).tree["x"].shape == (2, 3)

    def test_it_serves_as_a_target(self, pair, tree):
        _, ours = pair
        metadata = ours.item_metadata(0)
        for target in (metadata, metadata.tree):
            restored = ours.restore(0, args=ocp.args.StandardRestore(target))
            same(restored["float32_large"], tree["float32_large"])
            same(restored["keys"], tree["keys"])

    @pytest.mark.parametrize("cls", [ocp.args.StandardSave, ocp.args.PyTreeSave, lcjax.args.Save])
    def test_custom_metadata(self, tmp_path, cls):
        with manager(tmp_path, "lossless") as m:
            m.save(0, args=cls({"x": 1}, custom_metadata={"a": [1, "b"]}))
            m.wait_until_finished()
            assert m.item_metadata(0).custom_metadata == {"a": [1, "b"]}

    def test_custom_metadata_of_the_step(self, tmp_path):
        with manager(tmp_path, "lossless") as m:
            save(m, 0, {"x": 1}, custom_metadata={"a": 1})
            assert m.metadata(0).custom_metadata == {"a": 1}
            assert m.metadata(0).item_handlers == {"default": "lcjax.CheckpointHandler"}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """One state saved by Orbax's PyTree handler and by ours, without a manager."""
    root = tmp_path_factory.mktemp("restore_args")
    state = {"w": jnp.linspace(0, 1, 100), "n": np.arange(3), "i": 3, "f": 0.5}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as c:
        c.save(root / "orbax", args=ocp.args.PyTreeSave(state))
    with ocp.Checkpointer(lcjax.CheckpointHandler(preset="lossless")) as c:
        c.save(root / "lcjax", args=lcjax.args.Save(state))
    return root, state


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
class TestSaveAndRestoreArgs:
    def test_save_args_dtype(self, tmp_path):
        state = {"w": jnp.linspace(0, 1, 100), "b": jnp.ones(3), "n": 3}
        args = {
            "w": ocp.SaveArgs(dtype=jnp.bfloat16),
            "b": ocp.SaveArgs(),
            "n": ocp.SaveArgs(dtype=np.int32),
        }
        expected = {**state, "w": state["w"].astype(jnp.bfloat16)}
        with manager(tmp_path, "lossless") as m:
            for step, cls in enumerate(
                [ocp.args.StandardSave, ocp.args.PyTreeSave, lcjax.args.Save]
            ):
                m.save(step, args=cls(state, save_args=args))
                m.wait_until_finished()
                same(m.restore(step), expected)
                assert m.item_metadata(step).tree["w"].dtype == jnp.bfloat16

    def pytree_restore(self, root, *args, ours, **kwargs):
        handler = lcjax.CheckpointHandler() if ours else ocp.PyTreeCheckpointHandler()
        cls = lcjax.args.Restore if ours else ocp.args.PyTreeRestore
        with ocp.Checkpointer(handler) as c:
            return c.restore(root, args=cls(*args, **kwargs))

    def test_restore_args(self, roots):
        root, state = roots
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        everywhere = {
            "plain": ocp.RestoreArgs(),
            "cast": ocp.ArrayRestoreArgs(dtype=jnp.float16, sharding=sharding),
            "numpy": ocp.RestoreArgs(restore_type=np.ndarray),
        }
        for name, arg in everywhere.items():
            for item in (None, state):
                args = jax.tree.map(lambda _: arg, state)  # noqa: B023
                if name != "plain":
                    args = {
                        **args,
                        "i": ocp.RestoreArgs(),
                        "f": ocp.RestoreArgs(restore_type=float),
                    }
                theirs, ours = (
                    self.pytree_restore(root / kind, item, restore_args=args, ours=kind == "lcjax")
                    for kind in ("orbax", "lcjax")
                )
                same(ours, theirs, f"{name}, target {item is not None}")

    def test_constructed_restore_args(self, roots):
        root, state = roots
        args = ocp.checkpoint_utils.construct_restore_args(state)
        theirs, ours = (
            self.pytree_restore(root / kind, state, restore_args=args, ours=kind == "lcjax")
            for kind in ("orbax", "lcjax")
        )
        same(ours, theirs)
        same(ours, state)

    def test_a_global_shape_is_not_ignored(self, roots):
        root, state = roots
        for field in ("global_shape", "shape"):
            args = {**jax.tree.map(lambda _: ocp.RestoreArgs(), state)}
            args["w"] = ocp.ArrayRestoreArgs(**{field: (7,)})
            for kind in ("orbax", "lcjax"):
                with pytest.raises(ValueError, match=r"\(100,\)"):
                    self.pytree_restore(root / kind, restore_args=args, ours=kind == "lcjax")

    def test_partial_restore(self, roots):
        root, state = roots
        for kind in ("orbax", "lcjax"):
            restored = self.pytree_restore(
                root / kind, {"w": state["w"]}, partial_restore=True, ours=kind == "lcjax"
            )
            same(restored, {"w": state["w"]})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Own:
    weights: object
    pair: tuple


class TestContainers:
    def check(self, tmp_path, state, target=None):
        with (
            ocp.CheckpointManager(tmp_path / "orbax") as theirs,
            manager(tmp_path / "lcjax", "lossless") as ours,
        ):
            for m in (theirs, ours):
                save(m, 0, state)
            plain = [m.restore(0) for m in (theirs, ours)]
            same(plain[1], plain[0], "no target")
            target = state if target is None else target
            for wanted in (target, abstract(target)):
                restored = ours.restore(0, args=ocp.args.StandardRestore(wanted))
                assert type(restored) is type(state)
                assert jax.tree.structure(restored) == jax.tree.structure(state)
                same(jax.tree.leaves(restored), jax.tree.leaves(state))
            return restored

    def test_flax_train_state(self, tmp_path):
        model = nn.Dense(5)
        params = model.init(jax.random.key(0), jnp.ones((2, 7)))["params"]
        tx = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
        state = state.replace(step=jnp.asarray(state.step))
        restored = self.check(tmp_path, state)
        assert type(restored.opt_state) is tuple

    def test_nnx_state(self, tmp_path):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.a = nnx.Linear(4, 3, rngs=rngs)
                self.norm = nnx.BatchNorm(3, rngs=rngs)
                self.dropout = nnx.Dropout(0.5, rngs=rngs)

        state = nnx.state(Model(nnx.Rngs(0)))
        restored = self.check(tmp_path, state)
        other = Model(nnx.Rngs(1))
        nnx.update(other, restored)
        same(other.a.kernel[...], state.a.kernel[...])

    def test_registered_dataclass(self, tmp_path):
        state = Own({"x": jnp.ones(2)}, (jnp.zeros(3), [jnp.ones(1)]))
        self.check(tmp_path, state)

    def test_optax_states(self, tmp_path):
        params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
        tx = optax.multi_transform(
            {"x": optax.adam(1e-3), "y": optax.sgd(1e-2, momentum=0.9)}, {"w": "x", "b": "y"}
        )
        self.check(tmp_path, {"params": params, "opt": tx.init(params)})


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_items_beside_ours(tmp_path):
    state = {"w": jnp.linspace(0, 1, 50)}
    with manager(tmp_path, "lossless", keep=2, best_fn=lambda m: m["loss"], best_mode="min") as m:
        for step, loss in enumerate([3.0, 1.0, 2.0]):
            args = ocp.args.Composite(
                params=ocp.args.StandardSave(state),
                train_state=ocp.args.PyTreeSave({"n": step, "s": state}),
                meta=ocp.args.JsonSave({"step": step}),
                array=ocp.args.ArraySave(jnp.arange(3)),
            )
            m.save(step, args=args, metrics={"loss": loss})
            m.wait_until_finished()
        assert m.all_steps() == [1, 2]
        assert m.best_step() == 1
        assert m.metrics(1) == {"loss": 1.0}
        restored = m.restore(1)
        same(restored["params"], state)
        same(restored["train_state"], {"n": 1, "s": state})
        assert restored["meta"] == {"step": 1}
        partly = m.restore(
            1, args=ocp.args.Composite(train_state=ocp.args.StandardRestore({"n": 0, "s": state}))
        )
        assert [*partly.keys()] == ["train_state"]
        assert m.item_metadata(1)["params"].tree["w"].shape == (50,)
    assert "lcjax" in (item_of(tmp_path, 1, "params") / "LCJAX.txt").read_text()
    assert not (item_of(tmp_path, 1, "meta") / "LCJAX.txt").exists()


class TestSixtyFourBitsWithoutX64:
    """JAX would round them; they come back exact, as numpy, also where the target is abstract."""

    STATE: ClassVar = {"big": np.array([2**60, 3]), "third": np.array([1 / 3])}

    @pytest.mark.parametrize("of", ["shapes", "metadata", "restore_args", "nothing"])
    def test_exact(self, tmp_path, of):
        with manager(tmp_path, preset="lossless") as m:
            save(m, 0, self.STATE)
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.STATE)
            args = {
                "shapes": lambda: ocp.args.StandardRestore(abstract),
                "metadata": lambda: ocp.args.StandardRestore(m.item_metadata(0)),
                "restore_args": lambda: ocp.args.PyTreeRestore(
                    abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(self.STATE)
                ),
                "nothing": lcjax.args.Restore,
            }[of]()
            restored = m.restore(0, args=args)
        for name, value in self.STATE.items():
            assert type(restored[name]) is np.ndarray
            assert restored[name].dtype == value.dtype
            assert restored[name].tobytes() == value.tobytes()

    def test_plain_orbax_does_the_same(self, tmp_path):
        with ocp.CheckpointManager(tmp_path) as m:
            m.save(0, args=ocp.args.StandardSave(self.STATE))
            m.wait_until_finished()
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.STATE)
            restored = m.restore(0, args=ocp.args.StandardRestore(abstract))
        assert restored["big"].tolist() == [2**60, 3]

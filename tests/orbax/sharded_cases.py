"""Cases that need eight devices; ``test_orbax_sharded.py`` runs them in a process of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax_helpers import Recorder, item_of, manager, opened, same, save


@pytest.fixture(scope="module")
def mesh():
    assert jax.device_count() == 8
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def state(mesh):
    x = jnp.arange(64 * 48, dtype=jnp.float32).reshape(64, 48) / 1000
    return {
        "both": jax.device_put(x, NamedSharding(mesh, P("data", "model"))),
        "rows": jax.device_put(x, NamedSharding(mesh, P("data"))),
        "merged": jax.device_put(x, NamedSharding(mesh, P(("data", "model"), None))),
        "replicated": jax.device_put(x, NamedSharding(mesh, P())),
        "single": jax.device_put(x, SingleDeviceSharding(jax.devices()[3])),
        "bf16": jax.device_put(x.astype(jnp.bfloat16), NamedSharding(mesh, P(None, "model"))),
        "key": jax.device_put(jax.random.key(1), NamedSharding(mesh, P())),
    }


def check(restored, expected, shardings):
    same(restored, expected)
    for name, sharding in shardings.items():
        found = restored[name].sharding
        assert found.is_equivalent_to(sharding, restored[name].ndim), (name, found, sharding)


def shardings_of(tree):
    return {name: leaf.sharding for name, leaf in tree.items()}


@pytest.mark.parametrize("preset", ["paper", "lossless"])
def test_saved_shardings_come_back(tmp_path, state, preset):
    with manager(tmp_path, preset) as m:
        save(m, 0, state)
        check(m.restore(0), state, shardings_of(state))
    with manager(tmp_path, preset) as m:
        check(m.restore(0), state, shardings_of(state))
        metadata = m.item_metadata(0).tree
    with ocp.CheckpointManager(tmp_path / "orbax") as m:
        save(m, 0, state)
        theirs = m.item_metadata(0).tree
        for name in state:
            assert metadata[name].sharding == theirs[name].sharding, name


def test_the_targets_sharding_wins(tmp_path, state, mesh):
    others = {
        "both": NamedSharding(mesh, P("model", "data")),
        "rows": SingleDeviceSharding(jax.devices()[5]),
        "merged": NamedSharding(mesh, P()),
        "replicated": NamedSharding(mesh, P(None, ("data", "model"))),
        "single": NamedSharding(mesh, P("data", "model")),
        "bf16": NamedSharding(mesh, P("data")),
        "key": SingleDeviceSharding(jax.devices()[2]),
    }
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=others[name])
        for name, leaf in state.items()
    }
    concrete = {name: jax.device_put(leaf, others[name]) for name, leaf in state.items()}
    with manager(tmp_path, "lossless") as m:
        save(m, 0, state)
        for wanted in (target, concrete):
            check(m.restore(0, args=ocp.args.StandardRestore(wanted)), state, others)
        args = {
            name: ocp.ArrayRestoreArgs(sharding=others[name], global_shape=leaf.shape)
            for name, leaf in state.items()
            if name != "key"
        }
        args["both"] = ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=P("model", "data"))
        restored = m.restore(0, args=ocp.args.PyTreeRestore(restore_args=args))
        check(restored, state, {name: others[name] for name in args})


def test_changing_the_sharding_keeps_the_chain(tmp_path, mesh):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((64, 48)).astype(np.float32)
    recorder = Recorder(tmp_path)
    specs = [P("data", "model"), P("model", "data"), P(), P(None, "data")]
    with manager(tmp_path) as m:
        for step, spec in enumerate(specs):
            state = {"w": jax.device_put(values, NamedSharding(mesh, spec))}
            save(m, step, state)
            recorder.note(step, state)
            restored = m.restore(step)
            same(np.asarray(restored["w"]), np.asarray(recorder.expected[step]["w"]))
            assert restored["w"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
            values = values + np.float32(0.01) * rng.standard_normal((64, 48)).astype(np.float32)
    assert recorder.bases == {0: None, 1: 0, 2: 1, 3: 2}


def test_the_same_bytes_however_sharded(tmp_path, mesh):
    x = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    names = set()
    for number, spec in enumerate([P("data", "model"), P(), P(None, "data")]):
        root = tmp_path / str(number)
        with manager(root) as m:
            for step in range(3):
                moved = jnp.asarray(x + np.float32(0.001 * step) * x[::-1])
                save(m, step, {"w": jax.device_put(moved, NamedSharding(mesh, spec))})
        with opened(root, 2) as o:
            names.add(tuple(ref.name for ref in o.refs))
    assert len(names) == 1


def test_donation_of_sharded_buffers(tmp_path, mesh):
    sharding = NamedSharding(mesh, P("data", "model"))
    step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    x = jax.device_put(np.arange(64.0 * 480, dtype=np.float32).reshape(64, 480), sharding)
    with manager(tmp_path, "lossless") as m:
        for k in range(3):
            kept = np.array(x, copy=True)
            m.save(k, args=ocp.args.StandardSave({"x": x}))
            for _ in range(10):
                x = step(x)
            m.wait_until_finished()
            same(np.asarray(m.restore(k)["x"]), kept)


def test_write_for_a_process_with_fewer_devices(state, request):
    """Leaves a checkpoint for the single-device process to restore."""
    import os

    root = os.environ["LCJAX_TEST_SHARDED_ROOT"]
    with manager(root, "lossless") as m:
        save(m, 0, state)
    assert (item_of(root, 0) / "manifest.lcjax").exists()

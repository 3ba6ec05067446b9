"""Import, a round trip, a save and a restore, with whatever is installed."""

import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import lcjax

state = {"w": jnp.arange(10_000, dtype=jnp.float32) / 7, "step": 1}
message, ref = lcjax.encode(state, preset="paper")
moved = {"w": state["w"] + 0.01, "step": 2}
delta, ref2 = lcjax.encode(moved, ref)
read = lcjax.decode(delta, lcjax.decode(message))
assert read.id == ref2.id
assert np.array_equal(read.tree["w"], ref2.tree["w"])

with tempfile.TemporaryDirectory() as root:
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    registry = lcjax.handler_registry(preset="lossless")
    with ocp.CheckpointManager(root, options=options, handler_registry=registry) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.StandardSave({**state, "step": step}))
        manager.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, {**state, "step": 0})
        restored = manager.restore(2, args=ocp.args.StandardRestore(abstract))
    assert restored["step"] == 2
    assert np.array_equal(restored["w"], state["w"])
print(f"smoke run passed: Python {sys.version.split()[0]}, jax {jax.__version__}")

"""Writes the files of the current format version that later releases must decode for ever.

Run once per format version, in an empty folder ``tests/golden/vN``; never again for a
version that was released: ``python tests/golden/make.py``.
"""

import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import lcjax
from lcjax import container

PRESETS = ("paper", "lossless", "balanced")
HERE = pathlib.Path(__file__).parent


def states():
    """Four states of a small run with every kind of leaf; the same on every machine."""
    rng = np.random.default_rng(20)
    weights = rng.standard_normal((40, 30)).astype(np.float32)
    for step in range(4):
        odd = weights.reshape(-1)[:12].copy()
        odd[step : step + 4] = [np.nan, np.inf, -0.0, 1e-41]
        yield {
            "params": {
                "kernel": jnp.asarray(weights),
                "half": jnp.asarray(weights[:5], jnp.bfloat16),
                "odd": jnp.asarray(odd),
                "empty": jnp.zeros((0, 3)),
            },
            "opt_state": {
                "mu": {"kernel": weights * 0.1 + np.float32(0.01)},
                "nu": {"kernel": np.square(weights) * np.float32(1 + step)},
                "count": np.int32(step),
            },
            "fp8": jnp.asarray(weights[0], jnp.float8_e4m3fn),
            "int4": jnp.arange(-8, 8, dtype=jnp.int4),
            "bits": np.array([True, False, True]),
            "wide": np.arange(5) + 2.5j,
            "key": jax.random.key(step),
            "step": step,
            "rate": 0.1,
            "name": "golden",
            "none": [None, {}, (), (1, [2.5])],
        }
        weights = weights + 0.01 * rng.standard_normal(weights.shape).astype(np.float32)


def plain(tree):
    """The tree's arrays and scalars as numpy arrays of bytes, by name."""
    from lcjax import tree as trees

    out = {}
    for leaf in trees.flatten(tree).leaves:
        value = leaf.value if leaf.spec is None else np.asarray(trees.array_of(leaf))
        text = repr(value) if leaf.spec is None else f"{value.dtype.name}{list(value.shape)}"
        data = b"" if leaf.spec is None else value.tobytes()
        out[leaf.name] = np.frombuffer(text.encode() + b"\0" + data, np.uint8)
    return out


def main():
    target = HERE / f"v{container.VERSION}"
    target.mkdir()
    for preset in PRESETS:
        ref = None
        for step, state in enumerate(states()):
            message, ref = lcjax.encode(state, ref, preset=preset)
            (target / f"{preset}-{step}.msg").write_bytes(message)
            np.savez_compressed(target / f"{preset}-{step}.npz", **plain(ref.tree))
        for layout in ("linked", "pooled"):
            with tempfile.TemporaryDirectory() as folder:
                registry = lcjax.handler_registry(
                    preset=preset, chain=lcjax.ChainOptions(layout=layout, delta_budget=1e9)
                )
                options = ocp.CheckpointManagerOptions(max_to_keep=1)
                with ocp.CheckpointManager(
                    folder, options=options, handler_registry=registry
                ) as manager:
                    for step, state in enumerate(states()):
                        manager.save(step, args=ocp.args.StandardSave(state))
                shutil.copytree(folder, target / f"{preset}-{layout}")


if __name__ == "__main__":
    main()

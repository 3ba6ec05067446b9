"""Sharded states, on eight devices in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax_helpers import manager


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the cases once; they leave a checkpoint in the directory that is returned."""
    root = tmp_path_factory.mktemp("sharded")
    here = Path(__file__).parent
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "LCJAX_TEST_SHARDED_ROOT": str(root / "run"),
        "PYTHONPATH": os.pathsep.join([p for p in sys.path if p]),
    }
    cases = [str(here / "sharded_cases.py"), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *cases]
    done = subprocess.run(
        command, env=env, cwd=here, capture_output=True, text=True, timeout=300, check=False
    )
    return root / "run", done


def test_on_eight_devices(run):
    _, done = run
    assert done.returncode == 0, done.stdout[-8000:]
    assert done.stdout.startswith("." * 7), done.stdout


def test_on_fewer_devices_than_were_saved_from(run):
    root, _ = run
    assert jax.device_count() == 1
    x = jnp.arange(64 * 48, dtype=jnp.float32).reshape(64, 48) / 1000
    with manager(root) as m:
        restored = m.restore(0)
        assert np.array_equal(restored["both"], x)
        assert restored["both"].devices() == {jax.devices()[0]}
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in restored.items()
        }
        again = m.restore(0, args=ocp.args.StandardRestore(target))
        assert np.array_equal(again["single"], x)
        assert again["bf16"].dtype == jnp.bfloat16

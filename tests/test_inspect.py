"""``lcjax inspect`` tells what manifests and files hold."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest

import lcjax
from lcjax import cli, inspecting
from tests.test_policy import adam_states


@pytest.fixture(scope="module", params=["linked", "pooled"])
def run(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    options = lcjax.ChainOptions(layout=request.param, delta_budget=1e9)
    registry = lcjax.handler_registry("balanced", chain=options)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step, state in enumerate(adam_states(4)):
            manager.save(10 * step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
    return root, state


def test_steps(run):
    root, _ = run
    steps = inspecting.inspect(root)
    assert [(s.step, s.item, s.preset) for s in steps] == [
        (10 * k, "default", "balanced") for k in range(4)
    ]
    assert [s.key_frame for s in steps] == [True, False, False, False]
    assert all(s.raw == 3 * (1200 + 30) * 4 + 4 + 8 for s in steps)
    item = root / "30" / "default"
    pool = root / "lcjax_segments"
    files = [*item.glob("*.lcx"), *pool.glob("*.lcx"), item / "manifest.lcjax"]
    assert steps[-1].needed == sum(f.stat().st_size for f in files)
    assert steps[0].bytes == steps[0].needed and steps[1].bytes < 0.6 * steps[0].bytes
    assert steps[1].needed > steps[0].needed
    assert all(0.1 < s.relative_error < 0.95 for s in steps[1:])
    assert all(s.odd == 0 and s.zeros >= 1230 for s in steps[1:])


def test_leaves(run):
    root, _ = run
    leaves = {leaf.name: leaf for leaf in inspecting.inspect(root / "30" / "default")[0].leaves}
    assert leaves["step"].codec == "record" and leaves["step"].bits is None
    kernel = leaves["params/kernel"]
    assert (kernel.dtype, kernel.shape, kernel.codec) == ("float32", (40, 30), "step")
    assert kernel.bits == 8 * kernel.bytes / 1200 and 0 < kernel.bits < 3
    assert leaves["opt_state/0/mu/kernel"].lost.zeros == 1200
    assert leaves["opt_state/0/count"].lost is None


def test_command(run, tmp_path, capsys):
    root, _ = run
    out, drawing = tmp_path / "steps.json", tmp_path / "run.png"
    arguments = ["inspect", str(root), "--step", "20", "--json", str(out), "--plot", str(drawing)]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "params/kernel" in shown and "balanced" in shown
    (step,) = json.loads(out.read_text())
    assert step["step"] == 20
    lost = {leaf["name"]: leaf["lost"] for leaf in step["leaves"]}
    assert lost["params/kernel"]["max_error"] > 0 and lost["key"] is None
    assert drawing.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_nothing_there(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "no item that lcjax wrote" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path / "missing")]) == 1


def test_damage_is_named(tmp_path, capsys):
    registry = lcjax.handler_registry("lossless")
    with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.ones(100, np.float32)}))
    (path,) = (tmp_path / "0" / "default").glob("*.lcx")
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert path.name in capsys.readouterr().err

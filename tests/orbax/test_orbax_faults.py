"""Saves that fail, hang half-way or are killed cost that one save, and nothing else."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax_child
import pytest
from orbax_helpers import LAYOUTS, Recorder, Training, manager, same, save

from lcjax import storage

layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Faults:
    """Makes the n-th open, write, fsync, link or replace of ``lcjax.storage`` fail."""

    def __init__(self, monkeypatch):
        self.kind, self.countdown, self.hit = "", 0, False
        monkeypatch.setattr(storage, "os", _Os(self))
        monkeypatch.setattr(storage, "open", self.open, raising=False)

    def arm(self, kind, n):
        self.kind, self.countdown, self.hit = kind, n, False

    def disarm(self):
        self.kind = ""
        return self.hit

    def point(self, kind):
        if kind != self.kind:
            return
        self.countdown -= 1
        if self.countdown < 0 and not self.hit:
            self.hit = True
            raise OSError(errno.EIO, f"injected into {kind}")

    def open(self, path, mode):
        self.point("open")
        return _File(open(path, mode), self)


class _Os:
    def __init__(self, faults):
        self.faults = faults

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in ("fsync", "link", "replace"):
            return real

        def call(*args, **kwargs):
            self.faults.point(name)
            return real(*args, **kwargs)

        return call


class _File:
    """A file whose failing write has written half."""

    def __init__(self, file, faults):
        self.file, self.faults = file, faults

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        try:
            self.faults.point("write")
        except OSError:
            self.file.write(data[: len(data) // 2])
            raise
        return self.file.write(data)


def on_disk(root, recorder):
    """The steps that are there: Orbax lists also the one that failed."""
    return [step for step in recorder.expected if (root / str(step)).exists()]


# How often one save comes to each point; of the many links and writes a few must do.
POINTS = {
    "linked": {"open": 4, "write": 5, "fsync": 6, "link": 4},
    "pooled": {"open": 4, "write": 5, "fsync": 7, "replace": 1},
}


class TestInjectedErrors:
    @layouts
    @pytest.mark.parametrize("mode", ["async", "sync"])
    def test_at_every_point(self, tmp_path, monkeypatch, layout, mode):
        faults = Faults(monkeypatch)
        training, recorder = Training(), Recorder(tmp_path)
        options = {"enable_async_checkpointing": mode == "async"}
        with manager(tmp_path, chain=LAYOUTS[layout], keep=2, **options) as m:
            step = 0

            def go():
                nonlocal step
                step += 1
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
                recorder.check(m, on_disk(tmp_path, recorder))

            go()
            go()
            for kind, times in POINTS[layout].items():
                for n in range(times):
                    before = on_disk(tmp_path, recorder)
                    step += 1
                    faults.arm(kind, n)
                    with pytest.raises(OSError, match=f"injected into {kind}"):
                        save(m, step, training.next())
                    assert faults.disarm()
                    assert on_disk(tmp_path, recorder) == before
                    recorder.check(m, before)
                    go()
                    assert recorder.bases[step] == max(before), "the chain did not go on"
                if kind not in ("link", "write"):
                    faults.arm(kind, times)
                    go()
                    assert not faults.disarm(), f"one save comes to {kind} more often"

    def test_the_error_comes_with_the_next_save_if_nobody_waits(self, tmp_path, monkeypatch):
        faults, training = Faults(monkeypatch), Training()
        recorder = Recorder(tmp_path)
        with manager(tmp_path) as m:
            state = training.next()
            save(m, 0, state)
            recorder.note(0, state)
            faults.arm("write", 3)
            m.save(1, args=ocp.args.StandardSave(training.next()))
            with pytest.raises(OSError, match="injected"):
                m.save(2, args=ocp.args.StandardSave(training.next()))
            faults.disarm()
            state = training.next()
            save(m, 3, state)
            recorder.note(3, state)
            recorder.check(m, on_disk(tmp_path, recorder))
        assert recorder.bases[3] == 0

    def test_an_error_while_encoding(self, tmp_path, monkeypatch):
        training, recorder = Training(), Recorder(tmp_path)
        with manager(tmp_path) as m:
            state = training.next()
            save(m, 0, state)
            recorder.note(0, state)

            def fail(*_):
                raise MemoryError("no room to encode")

            with monkeypatch.context() as patched:
                patched.setattr("lcjax.state.encode", fail)
                with pytest.raises(MemoryError, match="no room"):
                    save(m, 1, training.next())
            state = training.next()
            save(m, 2, state)
            recorder.note(2, state)
            recorder.check(m, on_disk(tmp_path, recorder))
        assert recorder.bases[2] == 0

    def test_a_neighbour_that_fails_takes_the_step_with_it(self, tmp_path):
        training, recorder = Training(), Recorder(tmp_path, "state")

        def args(state, meta):
            return ocp.args.Composite(
                state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
            )

        with manager(tmp_path) as m:
            state = training.next()
            m.save(0, args=args(state, {}))
            m.wait_until_finished()
            recorder.note(0, state)
            with pytest.raises(TypeError):
                m.save(1, args=args(training.next(), {"x": object()}))
                m.wait_until_finished()
            state = training.next()
            m.save(2, args=args(state, {}))
            m.wait_until_finished()
            recorder.note(2, state)
            same(m.restore(2)["state"], recorder.expected[2])
            same(m.restore(0)["state"], recorder.expected[0])
        assert recorder.bases[2] == 0

    def test_leftovers_are_cleaned_up(self, tmp_path, monkeypatch):
        faults, training = Faults(monkeypatch), Training()
        recorder = Recorder(tmp_path)
        with manager(tmp_path) as m:
            for step in range(2):
                state = training.next()
                save(m, step, state)
                recorder.note(step, state)
            faults.arm("write", 3)
            with pytest.raises(OSError, match="injected"):
                save(m, 2, training.next())
            faults.disarm()
        assert len(list(tmp_path.glob("*.orbax-checkpoint-tmp*"))) == 1
        with manager(tmp_path, cleanup_tmp_directories=True) as m:
            assert m.all_steps() == [0, 1]
            recorder.check(m)
            state = training.next()
            save(m, 2, state)  # waits for the clean-up
            assert list(tmp_path.glob("*.orbax-checkpoint-tmp*")) == []
            recorder.note(2, state)
            recorder.check(m)


class TestDonation:
    @pytest.mark.parametrize("preset", ["paper", "lossless"])
    def test_buffers_may_be_donated_right_after_save(self, tmp_path, preset):
        step = jax.jit(lambda t: jax.tree.map(lambda x: x * 1.01 + 1, t), donate_argnums=0)
        state = {"a": jnp.arange(50_000.0), "b": jnp.arange(1000, dtype=jnp.bfloat16)}
        recorder = Recorder(tmp_path, preset=preset)
        with manager(tmp_path, preset) as m:
            for k in range(4):
                kept = jax.tree.map(lambda x: np.array(x, copy=True), state)
                m.save(k, args=ocp.args.StandardSave(state))
                for _ in range(20):
                    state = step(state)
                m.wait_until_finished()
                recorder.note(k, jax.tree.map(jnp.asarray, kept))
                recorder.check(m)

    def test_numpy_arrays_may_be_changed_right_after_save(self, tmp_path):
        state = {"w": np.arange(50_000.0, dtype=np.float32)}
        with manager(tmp_path, "lossless") as m:
            for k in range(3):
                kept = {"w": state["w"].copy()}
                m.save(k, args=ocp.args.StandardSave(state))
                state["w"][:] = -1 - k
                m.wait_until_finished()
                same(m.restore(k), kept)


class TestKilled:
    ROUNDS = 10

    def test_every_listed_step_survives_sigkill(self, tmp_path):
        child = subprocess.Popen(
            [sys.executable, orbax_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])},
        )
        try:
            assert child.stdout.readline() == "ready\n"
            for number in range(self.ROUNDS):
                layout = [*LAYOUTS][number % 2]
                self.kill_one(child, str(tmp_path / layout), layout, random.Random(number))
        finally:
            child.stdin.close()
            child.wait(timeout=60)

    def kill_one(self, child, root, layout, rng):
        before = len(orbax_child.log_of(root))
        print(root, layout, file=child.stdin, flush=True)
        pid = int(child.stdout.readline())
        try:
            for _ in range(6000):
                if len(orbax_child.log_of(root)) > before + rng.randrange(4):
                    break
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1))
        finally:
            os.kill(pid, signal.SIGKILL)
        assert int(child.stdout.readline()) == signal.SIGKILL, "the child died by itself"

        logged = orbax_child.log_of(root)
        assert len(logged) > before
        m = orbax_child.open_manager(root, layout)
        # Orbax deletes what is beyond KEEP file by file, so the kill may leave half of that.
        steps = sorted(m.all_steps())[-orbax_child.KEEP :]
        assert max(logged) in steps
        assert len(steps) == min(orbax_child.KEEP, steps[-1] + 1)
        for step in steps:
            restored = m.restore(step)
            if step in logged:
                assert orbax_child.digest(restored) == logged[step], f"step {step}"
            truth = orbax_child.true_state(step)
            assert int(restored["count"]) == step
            error = np.abs(restored["params"]["kernel"] - truth["params"]["kernel"]).max()
            assert error < 0.1
        m.close()

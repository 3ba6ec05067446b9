"""The training script that the demo runs, kills and starts again.

It is an ordinary Orbax script. With ``--codec lcjax`` it differs from one without lcjax in one
argument: the ``handler_registry`` of its ``CheckpointManager``.
"""

from __future__ import annotations

import argparse
import functools
import logging
import pathlib
import queue
import threading
import time
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx

from lcjax.demo import data
from lcjax.demo.files import Ledger
from lcjax.demo.journal import Journal
from lcjax.demo.model import Transformer, loss_of
from lcjax.demo.settings import Settings

POLL_SECONDS = 0.005


class Commits:
    """Notices from the outside when a save is on disk, and what it wrote.

    Args:
        root: the folder of the checkpoint manager.
        codec: what wrote it, ``lcjax`` or ``orbax``.
        journal: where to report.
    """

    def __init__(self, root: pathlib.Path, codec: str, journal: Journal):
        self._root = root
        self._codec = codec
        self._journal = journal
        self._ledger = Ledger(root)
        self._pending: queue.Queue[tuple[int, float] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def expect(self, step: int, started: float) -> None:
        """Announces a save.

        Args:
            step: its step.
            started: ``time.perf_counter()`` when it was asked for.
        """
        self._pending.put((step, started))

    def close(self) -> None:
        """Waits for the reports of all announced saves, which must be committed by now."""
        self._pending.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while (pending := self._pending.get()) is not None:
            step, started = pending
            while not (self._root / str(step)).exists():
                time.sleep(POLL_SECONDS)
            seconds = time.perf_counter() - started
            written = self._ledger.new_bytes(step)
            delta = self._codec == "lcjax" and is_delta(self._root / str(step) / "params")
            self._journal.write("commit", step=step, save_s=seconds, written=written, delta=delta)


def is_delta(item: pathlib.Path) -> bool:
    """Whether an item that lcjax wrote builds on an earlier one, as its manifest says."""
    from lcjax.session import Opened

    with Opened(epath.Path(item)) as opened:
        return len(opened.chain_refs) > 1


def open_manager(root: pathlib.Path, settings: Settings, codec: str) -> ocp.CheckpointManager:
    """Opens the checkpoint manager; the only place where the codec makes a difference."""
    registry = None
    if codec == "lcjax":
        import lcjax

        registry = lcjax.handler_registry(preset=settings.preset, bits=settings.bits)
    options = ocp.CheckpointManagerOptions(max_to_keep=settings.keep)
    return ocp.CheckpointManager(root, options=options, handler_registry=registry)


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW as Optax has it; the last fifth of the steps takes the learning rate to 0."""
    warmup, cooldown, rate = settings.warmup, settings.steps // 5, settings.learning_rate
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, rate, warmup),
            optax.constant_schedule(rate),
            optax.linear_schedule(rate, 0.0, cooldown),
        ],
        [warmup, settings.steps - cooldown],
    )
    return optax.adamw(schedule)


class Program:
    """The compiled functions of one run.

    Args:
        settings: the settings of the demo.
    """

    def __init__(self, settings: Settings):
        build = functools.partial(Transformer, settings.model)
        graph, _ = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
        tx = optimizer(settings)

        def init() -> tuple[Any, Any]:
            params = nnx.state(build(rngs=nnx.Rngs(settings.seed)), nnx.Param)
            return params, tx.init(params)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            return loss_of(nnx.merge(graph, params), tokens)

        def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
            value, gradient = jax.value_and_grad(loss)(params, tokens)
            updates, opt_state = tx.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        self.init = jax.jit(init)
        self.loss = jax.jit(loss)
        self.step = jax.jit(step, donate_argnums=(0, 1))

    def validation_loss(self, params: Any, sequences: np.ndarray, size: int) -> float:
        """Averages the loss over all sequences, ``size`` at a time."""
        parts = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        losses = [float(self.loss(params, part)) for part in parts]
        return float(np.average(losses, weights=[len(part) for part in parts]))


def _bytes(tree: Any) -> int:
    """Bytes of a tree in memory."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def save(manager: ocp.CheckpointManager, step: int, params: Any, opt_state: Any) -> None:
    """Starts the save of one step."""
    train = {"opt_state": opt_state, "step": step}
    args = ocp.args.Composite(
        params=ocp.args.StandardSave(params), train=ocp.args.StandardSave(train)
    )
    manager.save(step, args=args)


def restore(
    manager: ocp.CheckpointManager, step: int, params: Any, opt_state: Any
) -> tuple[Any, Any]:
    """Restores one step into the structure of the given state."""
    target = (params, {"opt_state": opt_state, "step": step})
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
    args = ocp.args.Composite(
        params=ocp.args.StandardRestore(abstract[0]), train=ocp.args.StandardRestore(abstract[1])
    )
    restored = manager.restore(step, args=args)
    if restored.train["step"] != step:
        raise RuntimeError(f"step {step} holds the state of step {restored.train['step']}")
    return jax.block_until_ready((restored.params, restored.train["opt_state"]))


def train(
    settings: Settings, root: pathlib.Path, codec: str, journal: Journal, restore_only: bool = False
) -> None:
    """Restores the newest step if there is one, and trains to the end.

    Args:
        settings: the settings of the demo.
        root: the folder of the checkpoint manager.
        codec: ``lcjax``, or ``orbax`` for Orbax as it comes.
        journal: told of every step, save and commit.
        restore_only: stop once the newest step is restored, twice to see what the first one
            has to load.
    """
    program = Program(settings)
    params, opt_state = jax.block_until_ready(program.init())
    corpus = data.load_corpus()
    length = settings.model.length
    order = settings.seed if settings.order is None else settings.order
    root.mkdir(parents=True, exist_ok=True)
    with open_manager(root, settings, codec) as manager:
        first = manager.latest_step() or 0
        seconds = []
        for _ in range(0 if not first else 2 if restore_only else 1):
            started = time.perf_counter()
            params, opt_state = restore(manager, first, params, opt_state)
            seconds.append(time.perf_counter() - started)
        raw = {"params": _bytes(params), "train": _bytes(opt_state)}
        journal.write("start", step=first, restore_s=seconds, raw=raw)
        if restore_only:
            return
        commits = Commits(root, codec, journal)
        for step in range(first, settings.steps):
            tokens = data.batch(corpus.train, order, step, settings.batch, length)
            params, opt_state, loss = program.step(params, opt_state, tokens)
            journal.write("step", step=step + 1, loss=float(loss))
            if (step + 1) % settings.save_every == 0:
                started = time.perf_counter()
                commits.expect(step + 1, started)
                save(manager, step + 1, params, opt_state)
                journal.write("save", step=step + 1, blocked_s=time.perf_counter() - started)
        manager.wait_until_finished()
        commits.close()
    sequences = data.validation_set(corpus.validation, settings.validation_sequences, length)
    loss = program.validation_loss(params, sequences, 4 * settings.batch)
    journal.write("done", step=settings.steps, validation_loss=loss)


def main(argv: list[str] | None = None) -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=pathlib.Path, required=True)
    parser.add_argument("--root", type=pathlib.Path, required=True)
    parser.add_argument("--journal", type=pathlib.Path, required=True)
    parser.add_argument("--codec", choices=("lcjax", "orbax"), required=True)
    parser.add_argument("--cache", type=pathlib.Path, required=True, help="compiled programs")
    parser.add_argument("--restore-only", action="store_true")
    options = parser.parse_args(argv)
    logging.getLogger("absl").setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(options.cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    settings = Settings.load(options.settings)
    train(settings, options.root, options.codec, Journal(options.journal), options.restore_only)


if __name__ == "__main__":
    main()

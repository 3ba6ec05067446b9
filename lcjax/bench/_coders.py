"""Ways to store a run's saves, each restoring from what it stored: Orbax and lcjax by files."""

from __future__ import annotations

import pathlib
import shutil
import time
from typing import Any, NamedTuple, Protocol

import jax
import orbax.checkpoint as ocp

from lcjax.bench._tasks import State
from lcjax.demo.files import Ledger


class Saved(NamedTuple):
    """One save.

    Attributes:
      bytes: that it wrote.
      params: those of the parameters' values.
      encode_s: seconds until it was stored.
    """

    bytes: int
    params: int
    encode_s: float


class Coder(Protocol):
    """Stores a run's saves one after the other."""

    def save(self, step: int, state: State) -> Saved:
        """Stores a step; ``state`` has numpy arrays."""

    def restore(self) -> tuple[State, float]:
        """What a reader gets of the last save, and the seconds it took."""

    def close(self) -> None:
        """Removes what was stored."""


class Files:
    """A ``CheckpointManager``, with lcjax's handler or as Orbax comes; bytes are those of files.

    Args:
      folder: where to write.
      preset: of lcjax; None for plain Orbax.
      bits: of preset ``paper``.
    """

    def __init__(self, folder: pathlib.Path, preset: Any = None, bits: int | None = None):
        self._folder, self._preset, self._bits = folder, preset, bits
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._manager = self._open()
        self._ledger = Ledger(folder)
        self._last: tuple[int, Any] | None = None

    def _open(self) -> ocp.CheckpointManager:
        registry = None
        if self._preset is not None:
            import lcjax

            registry = lcjax.handler_registry(preset=self._preset, bits=self._bits)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self._folder, options=options, handler_registry=registry)

    def save(self, step: int, state: State) -> Saved:
        """See ``Coder``."""
        started = time.perf_counter()
        self._manager.save(step, args=ocp.args.StandardSave(state))
        seconds = time.perf_counter() - started
        self._last = step, jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        written = sum(self._ledger.new_bytes(step).values())
        return Saved(written, self._params(step, state), seconds)

    def restore(self) -> tuple[State, float]:
        """By a manager of its own, as after a crash."""
        if self._last is None:
            raise RuntimeError("nothing was saved")
        step, abstract = self._last
        with self._open() as reader:
            started = time.perf_counter()
            restored = reader.restore(step, args=ocp.args.StandardRestore(abstract))
            jax.block_until_ready(restored)
            return restored, time.perf_counter() - started

    def close(self) -> None:
        """See ``Coder``."""
        self._manager.close()
        shutil.rmtree(self._folder)

    def _params(self, step: int, state: State) -> int:
        """Bytes of the parameters: of lcjax by its index, of Orbax by saving them alone."""
        if self._preset is not None:
            from lcjax import inspecting

            (item,) = inspecting.inspect(self._folder / str(step))
            return sum(leaf.bytes for leaf in item.leaves if leaf.name.startswith("params/"))
        alone = self._folder / "lcjax-bench-params"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(alone, state["params"])
        size = sum(file.stat().st_size for file in alone.rglob("*") if file.is_file())
        shutil.rmtree(alone)
        return size

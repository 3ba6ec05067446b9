"""The Orbax v0 handler: ``CheckpointHandler`` and the registry that puts it in charge."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from lcjax import capture, policy, session, tree, warm
from lcjax.chain import MANIFEST_FILE, ChainOptions, collect
from lcjax.orbax import place, values
from lcjax.orbax.args import Restore, Save
from lcjax.orbax.restoring import (
    is_orbax_pytree,
    nothing_here,
    restore_plain,
    restore_tree,
    tree_metadata,
)
from lcjax.policy import Preset


class CheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores pytrees with lcjax; use it with any Orbax v0 checkpointer.

    One instance may serve every item of every step of several managers: chains are kept
    apart by directory and item. Steps that plain Orbax wrote are read by Orbax.

    Args:
      preset: ``"paper"`` or ``"lossless"``; no default, and needed only to save.
      bits: code width of ``paper``, 1 to 8 (3 if not given, as the paper finds enough).
      scope: ``"model"`` (as published) or ``"leaf"``.
      chain: a ``lcjax.ChainOptions``; how chains are laid out and how long they grow.

    Raises:
      PresetError: an unknown preset or option.
    """

    def __init__(
        self,
        preset: str | Preset | None = None,
        *,
        bits: int | None = None,
        scope: str | None = None,
        chain: ChainOptions | None = None,
    ) -> None:
        self._preset = None if preset is None else policy.resolve(preset, bits, scope)
        self._options = chain or ChainOptions()
        self._memory = session.Memory()
        self._told = False
        warm.start()

    @classmethod
    def typestr(cls) -> str:
        """The handler's name in a step's metadata: part of the format, for ever."""
        return "lcjax.CheckpointHandler"

    # --- saving -------------------------------------------------------------------------

    async def async_save(
        self,
        directory: epath.Path,
        item: Any = None,
        save_args: Any = None,
        args: ocp.args.CheckpointArgs | None = None,
    ) -> list[ocp.future.Future] | None:
        """Takes a snapshot, and returns a future that encodes and writes it.

        Args:
          directory: the item's directory, which need not exist yet.
          item: legacy; use ``args``.
          save_args: legacy; use ``args``.
          args: ``lcjax.args.Save``, ``StandardSave`` or ``PyTreeSave``.

        Raises:
          PresetError: no preset was named.
          UnsupportedLeafError: a leaf that cannot be stored.
        """
        request, key = self._request(directory, item, save_args, args)
        if request is None:
            return []

        async def commit() -> None:
            await asyncio.to_thread(self._write, directory, request, key)

        return [ocp.future.CommitFutureAwaitingContractedSignals(commit(), name="lcjax_save")]

    def save(
        self,
        directory: epath.Path,
        item: Any = None,
        save_args: Any = None,
        args: ocp.args.CheckpointArgs | None = None,
    ) -> None:
        """Saves before returning; see ``async_save``."""
        request, key = self._request(directory, item, save_args, args)
        if request is not None:
            self._write(directory, request, key)

    def _request(
        self,
        directory: epath.Path,
        item: Any,
        save_args: Any,
        args: ocp.args.CheckpointArgs | None,
    ) -> tuple[session.Request | None, session.Key]:
        if isinstance(item, ocp.args.CheckpointArgs):
            args, item = item, None
        given = args if args is not None else Save(item, save_args)
        preset = self._preset_of(given)
        pytree = values.cast_for_save(
            getattr(given, "item", None), getattr(given, "save_args", None)
        )
        if pytree is None:
            raise ValueError("nothing to save: the item is None")
        at = place.find(directory, getattr(given, "step", None))
        key = session.Key(str(at.root), at.item)
        if jax.process_index() != 0:
            return None, key
        flat = tree.flatten(pytree)
        texts, numbers = values.sharding_texts(flat.leaves)
        taken = capture.capture(flat, preset, numbers)
        custom = getattr(given, "custom_metadata", None)
        base = None
        if not getattr(given, "key_frame", False):
            base = self._memory.base_for(key, at.step)
        request = session.Request(
            taken,
            preset,
            self._options,
            base,
            at.step,
            at.root,
            at.final,
            at.marker,
            texts,
            None if custom is None else json.dumps(custom),
        )
        return request, key

    def _preset_of(self, given: Any) -> Preset:
        bits, scope = getattr(given, "bits", None), getattr(given, "scope", None)
        preset = getattr(given, "preset", None)
        chosen = policy.resolve(self._preset if preset is None else preset, bits, scope)
        if chosen.is_lossy and not self._told:
            self._told = True
            logging.warning(
                "lcjax: preset %r is lossy: what is restored is close to, not equal to, what was "
                "saved; each step's metadata says how close. Use preset='lossless' for every bit",
                chosen.name,
            )
        return chosen

    def _write(self, directory: epath.Path, request: session.Request, key: session.Key) -> None:
        saved = session.write_item(directory, request)
        self._memory.wrote(key, saved)

    # --- restoring ----------------------------------------------------------------------

    def restore(
        self,
        directory: epath.Path,
        item: Any = None,
        args: ocp.args.CheckpointArgs | None = None,
    ) -> Any:
        """Restores an item.

        Args:
          directory: the item's directory.
          item: legacy; use ``args``.
          args: ``lcjax.args.Restore``, ``StandardRestore`` or ``PyTreeRestore``.

        Returns:
          The tree, in the target's containers where there is a target.

        Raises:
          MissingFileError: a file of the checkpoint is not there.
          CorruptDataError: damaged data.
          TreeMismatchError: the target has other leaves or shapes.
        """
        directory = epath.Path(directory)
        if isinstance(item, ocp.args.CheckpointArgs):
            args, item = item, None
        given = args if args is not None else Restore(item)
        if not (directory / MANIFEST_FILE).exists():
            return restore_plain(directory, given)
        with session.Opened(directory) as opened:
            result = restore_tree(opened, given)
            at = place.find(directory)
            if at.step is not None:
                self._memory.restored(session.Key(str(at.root), at.item), opened.as_saved())
        return result

    def metadata(self, directory: epath.Path) -> Any:
        """What was saved, as Orbax's Standard handler describes it."""
        directory = epath.Path(directory)
        if not (directory / MANIFEST_FILE).exists():
            if not is_orbax_pytree(directory):
                raise nothing_here(directory)
            return ocp.StandardCheckpointHandler().metadata(directory)
        with session.Opened(directory) as opened:
            return tree_metadata(opened.record, directory)

    def finalize(self, directory: epath.Path) -> None:
        """Deletes pooled segments that no step needs any more.

        The files of this step are complete: Orbax calls this when all its items are written,
        so every segment that it needs is named by a manifest now.
        """
        root = place.find(epath.Path(directory)).root
        if root is not None and jax.process_index() == 0:
            collect(root, self._memory.segments_in_use(), self._options.grace_seconds)

    def close(self) -> None:
        """Lets go of the states in memory; a later save reads its base from disk."""
        self._memory.release()


ocp.args.register_with_handler(CheckpointHandler, for_save=True)(Save)
ocp.args.register_with_handler(CheckpointHandler, for_restore=True)(Restore)


def handler_registry(
    preset: str | Preset,
    *,
    bits: int | None = None,
    scope: str | None = None,
    chain: ChainOptions | None = None,
) -> ocp.handlers.CheckpointHandlerRegistry:
    """A registry for ``ocp.CheckpointManager`` that gives every pytree item to lcjax.

    ``StandardSave``, ``PyTreeSave``, their restoring twins and ``lcjax.args`` all reach one
    handler, so a script changes its manager's construction and nothing else. Items with
    other arguments (``JsonSave``, ``ArraySave``, ...) stay with Orbax.

    Args:
      preset: ``"paper"`` or ``"lossless"``; no default.
      bits: see ``CheckpointHandler``.
      scope: see ``CheckpointHandler``.
      chain: see ``CheckpointHandler``.

    Raises:
      PresetError: an unknown preset or option.
    """
    handler = CheckpointHandler(policy.resolve(preset, bits, scope), chain=chain)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for cls in (
        Save,
        Restore,
        ocp.args.StandardSave,
        ocp.args.StandardRestore,
        ocp.args.PyTreeSave,
        ocp.args.PyTreeRestore,
    ):
        registry.add(None, cls, handler)
    return registry

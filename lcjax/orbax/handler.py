"""The Orbax v0 handler: ``CheckpointHandler`` and the registry that puts it in charge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from lcjax import capture, policy, rebuilt, session, tree, warm
from lcjax.chain import MANIFEST_FILE, ChainOptions, collect
from lcjax.errors import PresetError
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

Chosen: TypeAlias = str | Preset | Callable[[int | None, str], str | Preset]
"""A preset, or a function of the step and the item's name that chooses one."""


class CheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores pytrees with lcjax; use it with any Orbax v0 checkpointer.

    One instance may serve every item of every step of several managers: chains are kept
    apart by directory and item. Steps that plain Orbax wrote are read by Orbax.

    Args:
      preset: ``"lossless"``, ``"balanced"``, ``"extreme"``, ``"paper"``, an ``lcjax.Preset``,
        or a function of the step (or None) and the item's name that returns one, so that
        every tenth save, or the last, can be exact. No default, and needed only to save.
      bits: code width of ``paper``, 1 to 8 (3 if not given, as the paper finds enough).
      scope: ``"model"`` (as published) or ``"leaf"``.
      items: presets of single items by name, before ``preset``.
      chain: a ``lcjax.ChainOptions``; how chains are laid out and how long they grow.

    Raises:
      PresetError: an unknown preset or option.
    """

    def __init__(
        self,
        preset: Chosen | None = None,
        *,
        bits: int | None = None,
        scope: str | None = None,
        items: Mapping[str, str | Preset] | None = None,
        chain: ChainOptions | None = None,
    ) -> None:
        self._bits, self._scope = bits, scope
        self._preset = preset
        if not callable(preset) and preset is not None:
            self._preset = policy.resolve(preset, bits, scope)
        self._items = {name: policy.resolve(p) for name, p in (items or {}).items()}
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
        everywhere: bool = False,
    ) -> tuple[session.Request | None, session.Key]:
        if isinstance(item, ocp.args.CheckpointArgs):
            args, item = item, None
        given = args if args is not None else Save(item, save_args)
        pytree = values.cast_for_save(
            getattr(given, "item", None), getattr(given, "save_args", None)
        )
        if pytree is None:
            raise ValueError("nothing to save: the item is None")
        at = place.find(directory, getattr(given, "step", None))
        preset = self._preset_of(given, at)
        key = session.Key(str(at.root), at.item)
        if jax.process_index() != 0 and not everywhere:
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

    def _preset_of(self, given: Any, at: place.Place) -> Preset:
        bits, scope = getattr(given, "bits", None), getattr(given, "scope", None)
        preset = getattr(given, "preset", None)
        if preset is None:
            preset = self._items.get(at.item, self._preset)
        if callable(preset):
            preset = policy.resolve(preset(at.step, at.item), self._bits, self._scope)
        chosen = policy.resolve(preset, bits, scope)
        if chosen.is_lossy and not self._told:
            self._told = True
            logging.warning(
                "lcjax: preset %r is lossy: what is restored is close to, not equal to, what was "
                "saved; each step's metadata says how close. Use preset='lossless' for every bit",
                chosen.name,
            )
        return chosen

    def reconstruction(
        self,
        item: Any,
        directory: epath.PathLike | None = None,
        *,
        step: int | None = None,
        name: str = "default",
        preset: str | Preset | None = None,
    ) -> Any:
        """What a restore will return of a save that is about to be made; writes nothing.

        Metrics that a manager ranks steps by describe the live state, unless they are taken
        from this.

        Args:
          item: the pytree that will be saved.
          directory: the manager's directory; with it, deltas build on what was saved there.
          step: the step that will be saved.
          name: the item's name in the manager, ``"default"`` where it has no other.
          preset: as ``lcjax.args.Save`` has it.

        Returns:
          The same containers; arrays as they would be restored.
        """
        root = epath.Path("/") if directory is None else epath.Path(directory)
        given = Save(item, preset=preset, step=step, key_frame=directory is None)
        request, _ = self._request(root / str(step or 0) / name, None, None, given, everywhere=True)
        assert request is not None
        found = rebuilt.values_of(request.taken, session.encode(request).encoded)
        flat = request.taken.flat

        def get(_: tree.Leaf, number: int) -> Any:
            leaf = request.taken.leaves[number]
            return rebuilt.as_leaf(found[number], leaf.kind, leaf.spec.impl if leaf.spec else None)

        return tree.build_like(item, flat.skeleton, get)

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
    preset: Chosen | None = None,
    *,
    bits: int | None = None,
    scope: str | None = None,
    items: Mapping[str, str | Preset] | None = None,
    chain: ChainOptions | None = None,
    handler: CheckpointHandler | None = None,
) -> ocp.handlers.CheckpointHandlerRegistry:
    """A registry for ``ocp.CheckpointManager`` that gives every pytree item to lcjax.

    ``StandardSave``, ``PyTreeSave``, their restoring twins and ``lcjax.args`` all reach one
    handler, so a script changes its manager's construction and nothing else. Items with
    other arguments (``JsonSave``, ``ArraySave``, ...) stay with Orbax.

    Args:
      preset: see ``CheckpointHandler``; no default.
      bits: see ``CheckpointHandler``.
      scope: see ``CheckpointHandler``.
      items: see ``CheckpointHandler``.
      chain: see ``CheckpointHandler``.
      handler: a ``CheckpointHandler`` made before, in place of all other arguments.

    Raises:
      PresetError: an unknown preset or option.
    """
    if handler is None:
        chosen = preset if callable(preset) else policy.resolve(preset, bits, scope)
        if not callable(preset):
            bits = scope = None
        handler = CheckpointHandler(chosen, bits=bits, scope=scope, items=items, chain=chain)
    elif (preset, bits, scope, items, chain) != (None,) * 5:
        raise PresetError("give either a handler or the options to make one")
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

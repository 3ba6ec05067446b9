"""The Orbax v0 handler: ``CheckpointHandler`` and the registry that puts it in charge."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from lcjax import capture, policy, session, tree, warm
from lcjax.chain import MANIFEST_FILE, ChainOptions, collect
from lcjax.errors import LcjaxError, MissingFileError
from lcjax.orbax import place, values
from lcjax.orbax.args import Restore, Save
from lcjax.policy import Preset
from lcjax.record import Record, memory_limit


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
            return _orbax_restore(directory, given)
        with session.Opened(directory) as opened:
            result = _restore_tree(opened, given)
            at = place.find(directory)
            if at.step is not None:
                self._memory.restored(session.Key(str(at.root), at.item), opened.as_saved())
        return result

    def metadata(self, directory: epath.Path) -> Any:
        """What was saved, as Orbax's Standard handler describes it."""
        directory = epath.Path(directory)
        if not (directory / MANIFEST_FILE).exists():
            if not _is_orbax_pytree(directory):
                raise _nothing_here(directory)
            return ocp.StandardCheckpointHandler().metadata(directory)
        with session.Opened(directory) as opened:
            return _tree_metadata(opened.record, directory)

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


# --- restoring, in parts ----------------------------------------------------------------


def _restore_tree(opened: session.Opened, given: Any) -> Any:
    record = opened.record
    if getattr(given, "transforms", None) or getattr(given, "legacy_transform_fn", None):
        raise NotImplementedError(
            "lcjax does not apply PyTreeRestore's transforms; restore without them and change the "
            "tree afterwards"
        )
    target = getattr(given, "item", None)
    target = getattr(target, "tree", target) if _is_tree_metadata(target) else target
    args = getattr(given, "restore_args", None)
    fallback = getattr(given, "fallback_sharding", None)
    limit = getattr(given, "max_bytes", None)
    limit = memory_limit() if limit is None else limit
    shardings = [values.to_jax_sharding(values.sharding_from_text(t)) for t in record.shardings]

    def saved_sharding(k: int) -> Any:
        number = record.leaves[k].sharding
        return None if number is None else shardings[number]

    arguments = _arguments_by_number(args, record)
    if target is None:
        wanted: list[tuple[int, tree.Leaf | None]] = [(k, None) for k in range(len(record.leaves))]
    else:
        matched = tree.match(
            target, record.skeleton, partial=bool(getattr(given, "partial_restore", False))
        )
        wanted = [(pair.saved, pair.target) for pair in matched.pairs]
    names = record.names
    for k, leaf in wanted:
        values.check_fits(names[k], record.leaves[k], leaf, arguments.get(k))
    found = opened.leaves([k for k, _ in wanted], limit if target is None else None)
    made = [
        values.restored(
            names[k],
            value,
            record.leaves[k],
            leaf,
            arguments.get(k),
            saved_sharding(k),
            fallback,
        )
        for (k, leaf), value in zip(wanted, found, strict=True)
    ]
    return tree.build(record.skeleton, made) if target is None else matched.rebuild(made)


def _arguments_by_number(args: Any, record: Record) -> dict[int, Any]:
    """``restore_args`` by leaf; matched by name like a target."""
    if args is None:
        return {}
    index = {path: k for k, path in enumerate(record.skeleton.paths)}
    found: dict[int, Any] = {}
    leaves = jax.tree_util.tree_flatten_with_path(
        args, is_leaf=lambda x: isinstance(x, ocp.RestoreArgs)
    )[0]
    for path, arg in leaves:
        parts = tuple(_key_text(key) for key in path)
        if isinstance(arg, ocp.RestoreArgs) and parts in index:
            found[index[parts]] = arg
    return found


def _key_text(key: Any) -> str:
    for field in ("key", "name", "idx"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


def _is_tree_metadata(target: Any) -> bool:
    return type(target).__name__ in ("_TreeMetadataImpl", "TreeMetadata")


def _is_orbax_pytree(directory: epath.Path) -> bool:
    names = ("_METADATA", "manifest.ocdbt", "_sharding", "checkpoint", "d")
    return any((directory / name).exists() for name in names)


def _nothing_here(directory: epath.Path) -> LcjaxError:
    return MissingFileError(
        f"{directory / MANIFEST_FILE}: missing, and {directory} does not hold an Orbax pytree "
        "either; the checkpoint is incomplete or the path is not an item of one"
    )


def _orbax_restore(directory: epath.Path, given: Any) -> Any:
    """Restores what plain Orbax wrote."""
    if not _is_orbax_pytree(directory):
        raise _nothing_here(directory)
    if isinstance(given, ocp.args.PyTreeRestore):
        return ocp.PyTreeCheckpointHandler().restore(directory, args=given)
    if isinstance(given, Restore):
        if given.restore_args is not None or given.partial_restore:
            return ocp.PyTreeCheckpointHandler().restore(
                directory,
                args=ocp.args.PyTreeRestore(
                    given.item,
                    restore_args=given.restore_args,
                    partial_restore=given.partial_restore,
                ),
            )
        given = ocp.args.StandardRestore(given.item, fallback_sharding=given.fallback_sharding)
    return ocp.StandardCheckpointHandler().restore(directory, args=given)


def _tree_metadata(record: Record, directory: epath.Path) -> Any:
    from orbax.checkpoint._src.metadata import tree as orbax_tree

    descriptions = []
    for path, leaf in zip(record.skeleton.paths, record.leaves, strict=True):
        name = ".".join(path)
        if leaf.spec is None:
            if leaf.kind in ("str", "bytes"):
                descriptions.append(ocp.metadata.StringMetadata(name, directory))
            else:
                dtype = np.asarray(leaf.value).dtype
                descriptions.append(ocp.metadata.ScalarMetadata(name, directory, dtype=dtype))
            continue
        sharding = None
        if leaf.sharding is not None:
            sharding = values.sharding_from_text(record.shardings[leaf.sharding])
        descriptions.append(
            ocp.metadata.ArrayMetadata(
                name,
                directory,
                values.stored_shape(leaf.spec),
                sharding,
                np.dtype(leaf.spec.dtype),
            )
        )
    return orbax_tree.build_default_tree_metadata(
        tree.build(record.skeleton, descriptions),
        custom_metadata=record.custom_json,
    )

"""Restoring: what a target and the caller's arguments make of a saved item."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from lcjax import session, tree
from lcjax.chain import MANIFEST_FILE
from lcjax.errors import LcjaxError, MissingFileError
from lcjax.orbax import values
from lcjax.orbax.args import Restore
from lcjax.record import Record, memory_limit


def restore_tree(opened: session.Opened, given: Any) -> Any:
    """Restores an opened item as ``given`` (any kind of restore arguments) asks for it."""
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


def is_orbax_pytree(directory: epath.Path) -> bool:
    """Whether plain Orbax wrote a pytree there."""
    names = ("_METADATA", "manifest.ocdbt", "_sharding", "checkpoint", "d")
    return any((directory / name).exists() for name in names)


def nothing_here(directory: epath.Path) -> LcjaxError:
    """The error for a directory that holds no item of either kind."""
    return MissingFileError(
        f"{directory / MANIFEST_FILE}: missing, and {directory} does not hold an Orbax pytree "
        "either; the checkpoint is incomplete or the path is not an item of one"
    )


def restore_plain(directory: epath.Path, given: Any) -> Any:
    """Restores what plain Orbax wrote, by Orbax's own handlers."""
    if not is_orbax_pytree(directory):
        raise nothing_here(directory)
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


def tree_metadata(record: Record, directory: epath.Path) -> Any:
    """What was saved, as Orbax's Standard handler describes it."""
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

"""Restoring: what a target and the caller's arguments make of a saved item."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from lcjax import session, tree
from lcjax.chain import MANIFEST_FILE
from lcjax.errors import LcjaxError, MissingFileError, TreeMismatchError
from lcjax.orbax import values
from lcjax.orbax.args import Restore
from lcjax.record import Record, memory_limit

_SHOWN = 10  # names in a message


class _Wanted(NamedTuple):
    """A leaf to restore.

    Attributes:
      saved: its number.
      target: the target's leaf; None where the target gives no more than a name, or is not there.
      arg: its ``RestoreArgs``, or None.
    """

    saved: int
    target: tree.Leaf | None
    arg: ocp.RestoreArgs | None


def restore_tree(opened: session.Opened, given: Any) -> Any:
    """Restores an opened item as ``given`` (any kind of restore arguments) asks for it.

    Only the leaves that are returned are read.

    Raises:
      TreeMismatchError: the target, or the tree of ``RestoreArgs``, has other leaves or shapes.
      MissingFileError: a file of the checkpoint is not there.
      CorruptDataError: damaged data.
    """
    record = opened.record
    if getattr(given, "transforms", None) or getattr(given, "legacy_transform_fn", None):
        raise NotImplementedError(
            "lcjax does not apply PyTreeRestore's transforms; restore without them and change the "
            "tree afterwards"
        )
    matched, wanted = _select(record, given)
    fallback = getattr(given, "fallback_sharding", None)
    strict = bool(getattr(given, "strict", True))
    shardings = [values.to_jax_sharding(values.sharding_from_text(t)) for t in record.shardings]
    names = record.names
    for w in wanted:
        values.check_fits(names[w.saved], record.leaves[w.saved], w.target, w.arg, strict=strict)
    limit = getattr(given, "max_bytes", None)
    limit = memory_limit() if limit is None else limit
    bounded = strict and matched is not None and not isinstance(given, ocp.args.PyTreeRestore)
    found = opened.leaves([w.saved for w in wanted], None if bounded else limit)
    made = []
    for w, value in zip(wanted, found, strict=True):
        saved = record.leaves[w.saved]
        sharding = None if saved.sharding is None else shardings[saved.sharding]
        made.append(
            values.restored(
                names[w.saved],
                value,
                saved,
                w.target,
                w.arg,
                sharding,
                fallback,
                strict=strict,
            )
        )
    return tree.build(record.skeleton, made) if matched is None else matched.rebuild(made)


def _select(record: Record, given: Any) -> tuple[tree.Match | None, list[_Wanted]]:
    """The leaves to restore, and how they fill the target; no match where there is none."""
    target = getattr(given, "item", None)
    target = getattr(target, "tree", target) if _is_tree_metadata(target) else target
    args = _arguments(getattr(given, "restore_args", None))
    partial = bool(getattr(given, "partial_restore", False))
    paths = record.skeleton.paths
    if target is None:
        _refuse_unknown(args, {*paths})
        return None, [_Wanted(k, None, args.get(path)) for k, path in enumerate(paths)]
    if isinstance(given, ocp.args.PyTreeRestore):
        matched = tree.match_names(target, record.skeleton, partial=partial)
        if matched.kept:
            logging.warning(
                "lcjax: %d leaves of the target are not in the checkpoint and stay as they are: %s",
                len(matched.kept),
                ", ".join(map(tree.join_name, matched.kept[:_SHOWN])),
            )
        return matched, [_by_name(pair, record, args) for pair in matched.pairs]
    matched = tree.match(target, record.skeleton, partial=partial)
    return matched, [_Wanted(p.saved, p.target, _argument(p, paths, args)) for p in matched.pairs]


def _arguments(args: Any) -> dict[tree.Parts, ocp.RestoreArgs]:
    """``restore_args`` by leaf name."""
    if args is None:
        return {}
    leaves = tree.flatten_names(args).leaves
    return {leaf.parts: leaf.value for leaf in leaves if isinstance(leaf.value, ocp.RestoreArgs)}


def _refuse_unknown(args: Mapping[tree.Parts, Any], known: Set[tree.Parts]) -> None:
    unknown = [tree.join_name(parts) for parts in args if parts not in known]
    if unknown:
        raise TreeMismatchError(
            f"restore_args name leaves that were not saved: {', '.join(unknown[:_SHOWN])}; "
            "build them from the saved tree or from its metadata"
        )


def _argument(
    pair: tree.Pair, paths: Sequence[tree.Parts], args: Mapping[tree.Parts, ocp.RestoreArgs]
) -> ocp.RestoreArgs | None:
    """The arguments of a pair, in a tree like the target or like what was saved."""
    return args.get(pair.target.parts, args.get(paths[pair.saved]))


def _by_name(
    pair: tree.Pair, record: Record, args: Mapping[tree.Parts, ocp.RestoreArgs]
) -> _Wanted:
    """A leaf of a target of which only the names count.

    As in Orbax, an array's shape and dtype still complete ``ArrayRestoreArgs`` that have none.
    Unlike there, an array of another shape is refused whatever the arguments, if they are strict.
    """
    arg, item = _argument(pair, record.skeleton.paths, args), pair.target.value
    shape, dtype = getattr(item, "shape", None), getattr(item, "dtype", None)
    if shape is None or dtype is None or not getattr(arg, "strict", True):
        return _Wanted(pair.saved, None, arg)
    name = tree.join_name(record.skeleton.paths[pair.saved])
    values.check_shape(name, record.leaves[pair.saved], tuple(shape))
    if shape and isinstance(arg, ocp.ArrayRestoreArgs) and not tree.is_key_dtype(dtype):
        arg = dataclasses.replace(
            arg,
            global_shape=arg.global_shape or tuple(shape),
            dtype=dtype if arg.dtype is None else arg.dtype,
        )
    return _Wanted(pair.saved, None, arg)


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

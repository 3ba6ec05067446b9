"""Restoring through Orbax v1: its abstract trees, and its kind of metadata."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import ArrayMetadata
from orbax.checkpoint.experimental.v1._src.serialization.numpy_leaf_handler import NumpyMetadata

from lcjax import session, tree
from lcjax.errors import UnsupportedLeafError
from lcjax.orbax import values
from lcjax.orbax.args import Restore
from lcjax.orbax.restoring import restore_tree
from lcjax.record import LeafRecord, Record, memory_limit

_PYTHON = (bool, int, float, complex, str, bytes)


class Wanted(NamedTuple):
    """What an abstract leaf asks for, in the terms of v0.

    Attributes:
      target: an array, a ``jax.ShapeDtypeStruct`` or a Python scalar; None to take the saved
        shape and dtype.
      arg: ``ocp.RestoreArgs`` that say whether it shall be a jax or a numpy array, or None.
    """

    target: Any
    arg: ocp.RestoreArgs | None


def wanted(abstract: Any) -> Wanted:
    """Reads an abstract leaf as Orbax v1 does.

    Args:
      abstract: a leaf or its type: anything with a shape, a dtype and a sharding (restored as
        jax array), with a shape and a dtype (as numpy array), or a Python or numpy scalar. A
        type alone, and a shape or dtype of None, ask for what was saved.

    Raises:
      UnsupportedLeafError: something else.
    """
    cls = abstract if isinstance(abstract, type) else type(abstract)
    if issubclass(cls, np.generic):
        dtype = None if cls is np.generic else np.dtype(cls)
        return Wanted(None, ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype))
    if issubclass(cls, _PYTHON):
        return Wanted(cls() if abstract is cls else abstract, None)
    if not _has(abstract, cls, "shape") or not _has(abstract, cls, "dtype"):
        raise UnsupportedLeafError(
            f"{abstract!r} of {cls.__module__}.{cls.__qualname__} does not describe a leaf to "
            "restore; give a jax.ShapeDtypeStruct, a Python scalar, one of their types, or "
            "ocp.PLACEHOLDER to leave the leaf out"
        )
    shape = dtype = None
    if not isinstance(abstract, type):
        shape, dtype = abstract.shape, abstract.dtype
    if not _has(abstract, cls, "sharding"):
        arg = ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
        if shape is None or dtype is None:
            return Wanted(None, arg)
        # An array without memory of its own.
        return Wanted(np.broadcast_to(np.zeros((), dtype), shape), arg)
    sharding = None if isinstance(abstract, type) else _sharding(abstract)
    if isinstance(abstract, jax.Array):
        return Wanted(abstract, ocp.ArrayRestoreArgs(sharding=sharding))
    if shape is None or dtype is None:
        return Wanted(None, ocp.ArrayRestoreArgs(dtype=dtype, sharding=sharding))
    target = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return Wanted(target, ocp.ArrayRestoreArgs(sharding=sharding))


def _has(abstract: Any, cls: type, field: str) -> bool:
    # Without asking the object itself: a sharding may be a property that fails.
    annotated = any(field in getattr(c, "__annotations__", ()) for c in cls.__mro__)
    return annotated or hasattr(cls, field) or field in getattr(abstract, "__dict__", ())


def _sharding(abstract: Any) -> Any:
    described = getattr(abstract, "sharding_metadata", None)
    return abstract.sharding if described is None else values.to_jax_sharding(described)


def is_abstract(pytree: Any) -> bool:
    """Whether every leaf of an abstract tree describes a leaf to restore."""
    try:
        for leaf in jax.tree.leaves(pytree):
            if leaf is not ...:
                wanted(leaf)
    except (UnsupportedLeafError, TypeError, ValueError):
        return False
    return True


def restore(opened: session.Opened, abstract: Any, *, partial: bool, strict: bool) -> Any:
    """Restores an opened item.

    Args:
      opened: the item.
      abstract: the abstract tree; None restores plain containers.
      partial: allow an abstract tree that leaves out saved leaves.
      strict: refuse other shapes, where arrays would else be cut or padded with zeros.

    Returns:
      The tree, in the abstract tree's containers; ``ocp.PLACEHOLDER`` stays in its place.

    Raises:
      TreeMismatchError: the abstract tree has other leaves or shapes.
      MissingFileError: a file of the checkpoint is not there.
      CorruptDataError: damaged data.
    """
    if abstract is None:
        return restore_tree(opened, Restore())
    record = opened.record
    leaves, treedef = jax.tree.flatten(abstract)
    # Orbax's abstract leaves can be classes, which lcjax.tree does not take: numbers stand in.
    numbers = [... if leaf is ... else k for k, leaf in enumerate(leaves)]
    matched = tree.match(jax.tree.unflatten(treedef, numbers), record.skeleton, partial=partial)
    asked = [wanted(leaves[pair.target.value]) for pair in matched.pairs]
    targets = [None if w.target is None else _leaf(w.target) for w in asked]
    numbers_saved = [pair.saved for pair in matched.pairs]
    names = record.names
    for k, leaf, w in zip(numbers_saved, targets, asked, strict=True):
        values.check_fits(names[k], record.leaves[k], leaf, w.arg, strict=strict)
    shardings = [values.to_jax_sharding(values.sharding_from_text(t)) for t in record.shardings]
    bounded = strict and None not in targets
    found = opened.leaves(numbers_saved, None if bounded else memory_limit())
    made = []
    for k, leaf, w, value in zip(numbers_saved, targets, asked, found, strict=True):
        saved = record.leaves[k]
        sharding = None if saved.sharding is None else shardings[saved.sharding]
        made.append(
            values.restored(names[k], value, saved, leaf, w.arg, sharding, None, strict=strict)
        )
    return matched.rebuild(made)


def _leaf(target: Any) -> tree.Leaf:
    return tree.flatten(target, target=True).leaves[0]


def metadata(record: Record) -> Any:
    """What was saved, as Orbax v1's PyTreeHandler describes it: a tree of abstract leaves.

    Arrays are ``ArrayMetadata`` or ``NumpyMetadata``, Python scalars the zero of their type,
    strings ``"string"``.
    """
    shardings = [values.sharding_from_text(text) for text in record.shardings]
    return tree.build(record.skeleton, [_described(leaf, shardings) for leaf in record.leaves])


def _described(leaf: LeafRecord, shardings: list[Any]) -> Any:
    if leaf.spec is None:
        return "string" if leaf.kind == "str" else type(leaf.value)()
    shape, dtype = values.stored_shape(leaf.spec), np.dtype(leaf.spec.dtype)
    if leaf.kind == "numpy":
        return NumpyMetadata(shape, dtype, None)
    sharding = None if leaf.sharding is None else shardings[leaf.sharding]
    return ArrayMetadata(shape, dtype, sharding, None)

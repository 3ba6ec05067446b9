"""A stored value into the leaf that the caller wants: dtype, device, sharding, kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from lcjax import tree
from lcjax.errors import TreeMismatchError
from lcjax.record import LeafRecord

_CASTS: dict[str, Any] = {"int": int, "float": float, "bool": bool, "complex": complex}


def restored(
    value: Any,
    saved: LeafRecord,
    target: tree.Leaf | None,
    arg: ocp.RestoreArgs | None,
    saved_sharding: Any,
    fallback: Any,
) -> Any:
    """Makes the leaf to return.

    Args:
      value: as ``record.read_leaves`` gives it.
      saved: the saved leaf's record.
      target: the target's leaf, or None.
      arg: its ``RestoreArgs``, or None; they win over the target.
      saved_sharding: the sharding at save, if it exists here, or None.
      fallback: the sharding to use where there is none.
    """
    name = "" if target is None else target.name
    if saved.kind == "key":
        return _key(value, saved, target, arg, saved_sharding, fallback)
    if target is not None and target.kind in _CASTS and arg is None:
        if np.shape(value) != ():
            raise TreeMismatchError(
                f"leaf {name!r} was saved with shape {np.shape(value)}, but the target is a "
                f"Python {target.kind}"
            )
        return _CASTS[target.kind](np.asarray(value).item() if saved.spec else value)
    if isinstance(value, (str, bytes)):
        return value
    dtype = getattr(arg, "dtype", None)
    if dtype is None and target is not None and target.spec is not None:
        dtype = np.dtype(target.spec.dtype)
    if saved.spec is None and target is None and dtype is None:
        return value
    array = np.asarray(value)
    if dtype is not None and array.dtype != np.dtype(dtype):
        array = array.astype(np.dtype(dtype))
    wants_numpy = (
        target.kind == "numpy" if target is not None else saved.kind != "jax"
    ) and not isinstance(arg, ocp.ArrayRestoreArgs)
    if getattr(arg, "restore_type", None) is np.ndarray or (
        wants_numpy and getattr(arg, "restore_type", None) is None
    ):
        return array
    sharding = _sharding(target, arg)
    if sharding is None:
        sharding = saved_sharding if saved_sharding is not None else fallback
    if target is None and arg is None and _loses_bits(array.dtype):
        return array  # exact as numpy; jax without 64 bits would round it
    return jax.device_put(array, sharding)


def _key(
    value: Any,
    saved: LeafRecord,
    target: tree.Leaf | None,
    arg: ocp.RestoreArgs | None,
    saved_sharding: Any,
    fallback: Any,
) -> Any:
    if target is not None and target.spec is not None and target.spec.impl is None:
        # The target wants raw key data, as ``jax.random.key_data`` gives them.
        plain = LeafRecord("jax", saved.codec, saved.spec)
        return restored(value, plain, target, arg, saved_sharding, fallback)
    assert saved.spec is not None
    key = jax.random.wrap_key_data(jnp.asarray(value), impl=saved.spec.impl)
    sharding = _sharding(target, arg)
    if sharding is None:
        sharding = saved_sharding if saved_sharding is not None else fallback
    return key if sharding is None else jax.device_put(key, sharding)


def _sharding(target: tree.Leaf | None, arg: ocp.RestoreArgs | None) -> Any:
    sharding = getattr(arg, "sharding", None)
    if sharding is None and getattr(arg, "mesh", None) is not None:
        axes = getattr(arg, "mesh_axes", None)
        if axes is not None:
            sharding = jax.sharding.NamedSharding(arg.mesh, axes)  # type: ignore[union-attr]
    if sharding is None and target is not None:
        sharding = getattr(target.value, "sharding", None)
    if sharding is not None and hasattr(sharding, "to_jax_sharding"):
        sharding = sharding.to_jax_sharding()
    return sharding


def _loses_bits(dtype: np.dtype) -> bool:
    return jax.dtypes.canonicalize_dtype(dtype) != dtype


def cast_for_save(item: Any, save_args: Any) -> Any:
    """The tree with the ``dtype`` of ``ocp.SaveArgs`` applied."""
    if save_args is None:
        return item

    def cast(leaf: Any, arg: Any) -> Any:
        dtype = getattr(arg, "dtype", None)
        if dtype is None:
            return leaf
        if isinstance(leaf, (bool, int, float)):
            return type(leaf)(np.asarray(leaf).astype(dtype).item())
        return leaf.astype(dtype)

    return jax.tree.map(cast, item, save_args, is_leaf=lambda x: x is None)


def sharding_texts(leaves: tuple[tree.Leaf, ...]) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Every distinct sharding as text, and per leaf the number of its text."""
    from orbax.checkpoint._src.metadata import sharding as orbax_sharding

    texts: dict[str, int] = {}
    numbers: list[int | None] = []
    cache: dict[Any, str | None] = {}
    for leaf in leaves:
        sharding = getattr(leaf.value, "sharding", None)
        if leaf.kind not in ("jax", "key") or sharding is None:
            numbers.append(None)
            continue
        if sharding not in cache:
            meta = orbax_sharding.from_jax_sharding(sharding)
            cache[sharding] = None if meta is None else meta.to_serialized_string()
        text = cache[sharding]
        numbers.append(None if text is None else texts.setdefault(text, len(texts)))
    return tuple(texts), tuple(numbers)


def sharding_from_text(text: str) -> Any:
    """Orbax's description of a sharding; None where the text is not one."""
    from orbax.checkpoint._src.metadata import sharding as orbax_sharding

    try:
        return orbax_sharding.from_serialized_string(text)
    except (ValueError, KeyError, TypeError, NotImplementedError):
        return None


def to_jax_sharding(meta: Any) -> Any:
    """The sharding, None where its devices are not here."""
    if meta is None:
        return None
    try:
        return meta.to_jax_sharding()
    except (ValueError, KeyError, TypeError):
        return None

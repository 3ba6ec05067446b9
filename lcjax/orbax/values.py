"""A stored value into the leaf that the caller wants: dtype, device, sharding, kind."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from lcjax import tree
from lcjax.errors import TreeMismatchError, UnsupportedLeafError
from lcjax.record import LeafRecord

_CASTS: dict[str, Any] = {"int": int, "float": float, "bool": bool, "complex": complex}
_TEXTS = ("str", "bytes")


def check_fits(
    name: str, saved: LeafRecord, target: tree.Leaf | None, arg: ocp.RestoreArgs | None
) -> None:
    """Refuses a leaf that cannot become what the caller wants, before anything is read.

    Raises:
      TreeMismatchError: another shape, another kind of PRNG key, or text against numbers.
      UnsupportedLeafError: PRNG keys of a kind that this jax does not have.
    """
    try:
        shape = () if saved.spec is None else stored_shape(saved.spec)
    except UnsupportedLeafError as e:
        raise UnsupportedLeafError(f"leaf {name!r}: {e}") from e
    given = getattr(arg, "global_shape", None)
    if given is not None:
        seen = () if saved.spec is None else saved.spec.shape
        tree.check_shape(name, shape if len(given) == len(shape) else seen, given)
    scalar = _scalar_wanted(target, arg)
    if scalar is not None and shape != ():
        raise TreeMismatchError(
            f"leaf {name!r} was saved with shape {shape}, but the target is a Python {scalar}"
        )
    if target is None:
        return
    if (saved.kind in _TEXTS or target.kind in _TEXTS) and saved.kind != target.kind:
        raise TreeMismatchError(
            f"leaf {name!r} was saved as {_called(saved.kind)}, but the target is "
            f"{_called(target.kind)}"
        )
    if target.spec is None:
        return
    wanted = target.spec
    if saved.spec is not None and saved.spec.impl is not None and wanted.impl is not None:
        if saved.spec.impl != wanted.impl:
            raise TreeMismatchError(
                f"leaf {name!r} was saved as a PRNG key of {saved.spec.impl}, but the target's is "
                f"{wanted.impl or 'unknown'}"
            )
        tree.check_shape(name, saved.spec.shape, wanted.shape)
    else:
        tree.check_shape(name, shape, stored_shape(wanted))
        if wanted.impl is not None and (saved.spec is None or saved.spec.dtype != "uint32"):
            raise TreeMismatchError(
                f"leaf {name!r} was saved as {_called(saved.kind)}, but the target is a PRNG key"
            )


def restored(
    name: str,
    value: Any,
    saved: LeafRecord,
    target: tree.Leaf | None,
    arg: ocp.RestoreArgs | None,
    saved_sharding: Any,
    fallback: Any,
) -> Any:
    """Makes the leaf to return, of a pair that ``check_fits`` has let through.

    Args:
      name: the leaf's name.
      value: as ``record.read_leaves`` gives it.
      saved: the saved leaf's record.
      target: the target's leaf, or None.
      arg: its ``RestoreArgs``, or None; they win over the target.
      saved_sharding: the sharding at save, if it exists here, or None.
      fallback: the sharding to use where there is none.

    Raises:
      TreeMismatchError: the value cannot be a Python scalar of the target's type.
    """
    sharding = _sharding(target, arg)
    if sharding is None and saved_sharding is not None:
        sharding = _placing(saved_sharding, np.shape(value))
    if sharding is None:
        sharding = fallback
    impl = _key_wanted(saved, target)
    if impl is not None:
        # The sharding may be meant for the keys or for their data; the data take both.
        data = jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)
        return jax.random.wrap_key_data(data, impl=impl)
    if isinstance(value, (str, bytes)):
        return value
    scalar = _scalar_wanted(target, arg)
    if scalar is not None:
        number = np.asarray(value).item() if saved.spec else value
        try:
            return _CASTS[scalar](number)
        except (TypeError, ValueError, OverflowError) as e:
            raise TreeMismatchError(
                f"leaf {name!r} was saved as {number!r}, but the target is a Python {scalar}"
            ) from e
    dtype = getattr(arg, "dtype", None)
    if dtype is None and target is not None and target.spec is not None:
        dtype = np.dtype(target.spec.dtype)
    for_jax = isinstance(arg, ocp.ArrayRestoreArgs)
    if saved.spec is None and target is None and dtype is None and not for_jax:
        return value
    array = np.asarray(value)
    if dtype is not None and array.dtype != np.dtype(dtype):
        array = array.astype(np.dtype(dtype))
    like = saved.kind if target is None else target.kind
    if like == "abstract" and getattr(target.value, "sharding", None) is None:  # type: ignore[union-attr]
        like = saved.kind  # what Orbax makes of a shape and a dtype alone
    wants_numpy = like not in ("jax", "abstract", "key") and not for_jax
    if getattr(arg, "restore_type", None) is np.ndarray or (
        wants_numpy and getattr(arg, "restore_type", None) is None
    ):
        return array
    if _loses_bits(array.dtype):
        return array  # exact as numpy; jax without 64 bits would round it
    return jax.device_put(array, sharding)


def _key_wanted(saved: LeafRecord, target: tree.Leaf | None) -> str | None:
    """The PRNG of the typed keys that the leaf shall be, None where it is no key.

    Keys come back as keys where an abstract target describes their data, as
    ``ocp.utils.to_shape_dtype_struct`` and Orbax's metadata do; raw data that a target holds
    come back raw.
    """
    impl = None if saved.spec is None else saved.spec.impl
    if target is None or target.spec is None:
        return impl
    if target.spec.impl is None and target.kind != "abstract":
        return None
    return target.spec.impl or impl


def _scalar_wanted(target: tree.Leaf | None, arg: ocp.RestoreArgs | None) -> str | None:
    """The Python type that the leaf shall have, None where it is to be an array."""
    restore_type = getattr(arg, "restore_type", None)
    if isinstance(restore_type, type) and restore_type.__name__ in _CASTS:
        return restore_type.__name__
    if target is None or target.kind not in _CASTS or getattr(arg, "dtype", None) is not None:
        return None
    return None if isinstance(arg, ocp.ArrayRestoreArgs) else target.kind


def stored_shape(spec: tree.ArraySpec) -> tuple[int, ...]:
    """Shape of what is stored: of PRNG keys, their raw data, as Orbax's metadata give it."""
    return spec.shape if spec.impl is None else spec.shape + _words(spec.impl)


@functools.lru_cache(maxsize=16)
def _words(impl: str) -> tuple[int, ...]:
    if not impl:  # an abstract key of a PRNG without a name
        return ()
    try:
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    except ValueError as e:
        raise UnsupportedLeafError(
            f"PRNG keys of {impl!r} were saved, which this jax does not have"
        ) from e
    return tuple(key.shape)


def _called(kind: str) -> str:
    return {"key": "a PRNG key", "abstract": "an array"}.get(
        kind, f"a Python {kind}" if kind in (*_CASTS, *_TEXTS) else "an array"
    )


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
        is_jax = leaf.kind in ("jax", "key")
        sharding = getattr(tree.array_of(leaf), "sharding", None) if is_jax else None
        if sharding is None:
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
    except Exception:  # whatever a damaged text provokes, it only costs the placement
        return None


def to_jax_sharding(meta: Any) -> Any:
    """The sharding, None where its devices are not here."""
    if meta is None:
        return None
    try:
        return meta.to_jax_sharding()
    except Exception:  # as above; and the devices may simply not be here
        return None


def _placing(sharding: Any, shape: tuple[int, ...]) -> Any:
    """A saved sharding if it can place an array of this shape, else None."""
    try:
        sharding.check_compatible_aval(shape)
        sharding.shard_shape(shape)
    except Exception:  # a damaged text can name a sharding of another rank
        return None
    return sharding

"""A stored value into the leaf that the caller wants: dtype, device, sharding, kind."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from lcjax import tree
from lcjax.errors import TreeMismatchError, UnsupportedLeafError
from lcjax.record import LeafRecord

_CASTS: dict[str, Any] = {"int": int, "float": float, "bool": bool, "complex": complex}
_TEXTS = ("str", "bytes")


class _Form(NamedTuple):
    """What a leaf is to become.

    Attributes:
      kind: ``key``, ``text``, ``scalar``, ``numpy`` or ``jax``.
      dtype: to cast to, None to keep the saved one.
      impl: of keys, their PRNG.
      python: of scalars, the type's name; None for whatever type the value has.
    """

    kind: str
    dtype: np.dtype | None = None
    impl: str | None = None
    python: str | None = None


def _form(saved: LeafRecord, target: tree.Leaf | None, arg: ocp.RestoreArgs | None) -> _Form:
    """What the arguments ask for, else the target, else as it was saved."""
    asked, python = _asked(arg)
    given = getattr(arg, "dtype", None)
    own = None if given is None or tree.is_key_dtype(given) else np.dtype(given)
    dtype = own
    if dtype is None and target is not None and target.spec is not None:
        dtype = np.dtype(target.spec.dtype)
    if asked is None and own is None and target is not None and target.kind in _CASTS:
        return _Form("scalar", python=target.kind)
    impl = _key_wanted(saved, target)
    if impl is not None and asked in (None, "jax"):
        return _Form("key", impl=impl)
    if saved.kind in _TEXTS or asked == "text":
        return _Form("text")
    if asked == "scalar":
        return _Form(asked, own, python=python)
    if asked is not None:
        return _Form(asked, dtype)
    if saved.spec is None and (target is None or target.kind in _CASTS):
        return _Form("scalar", own)
    like = saved.kind if target is None or target.kind in _CASTS else target.kind
    if like == "abstract" and getattr(target.value, "sharding", None) is None:  # type: ignore[union-attr]
        like = saved.kind  # what Orbax makes of a shape and a dtype alone
    return _Form("jax" if like in ("jax", "abstract", "key") else "numpy", dtype)


def _asked(arg: ocp.RestoreArgs | None) -> tuple[str | None, str | None]:
    """The kind of form, and the Python type, that ``restore_type`` names."""
    restore_type = getattr(arg, "restore_type", None)
    if not isinstance(restore_type, type):
        return None, None
    if issubclass(restore_type, jax.Array):
        return "jax", None
    if issubclass(restore_type, np.ndarray):
        return "numpy", None
    name = restore_type.__name__
    return ("scalar" if name in _CASTS else "text" if name in _TEXTS else None), name


def check_fits(
    name: str,
    saved: LeafRecord,
    target: tree.Leaf | None,
    arg: ocp.RestoreArgs | None,
    *,
    strict: bool = True,
) -> None:
    """Refuses a leaf that cannot become what the caller wants, before anything is read.

    Args:
      name: the leaf's name.
      saved: its record.
      target: the target's leaf, or None.
      arg: its ``RestoreArgs``, or None.
      strict: whether the target's shape must be the saved one; see ``restored``.

    Raises:
      TreeMismatchError: another shape, another kind of PRNG key, or text against numbers.
      UnsupportedLeafError: PRNG keys of a kind that this jax does not have.
    """
    try:
        shape = () if saved.spec is None else stored_shape(saved.spec)
    except UnsupportedLeafError as e:
        raise UnsupportedLeafError(f"leaf {name!r}: {e}") from e
    form = _form(saved, target, arg)
    _check_kinds(name, saved, target, arg)
    if form.kind == "scalar" and shape != ():
        raise TreeMismatchError(
            f"leaf {name!r} was saved with shape {shape}, but the target is a Python "
            f"{form.python or 'scalar'}"
        )
    fitted = _fitted_shape(target, arg, strict)
    if form.kind in ("jax", "numpy") and fitted is not None:
        if len(fitted) != len(shape):
            tree.check_shape(name, shape, fitted)
        return
    wanted = getattr(arg, "global_shape", None)
    if wanted is not None:
        check_shape(name, saved, tuple(wanted))
    if target is None or target.spec is None:
        return
    spec = target.spec
    if saved.spec is not None and saved.spec.impl is not None and spec.impl is not None:
        if saved.spec.impl != spec.impl:
            raise TreeMismatchError(
                f"leaf {name!r} was saved as a PRNG key of {saved.spec.impl}, but the target's is "
                f"{spec.impl or 'unknown'}"
            )
        tree.check_shape(name, saved.spec.shape, spec.shape)
    else:
        tree.check_shape(name, shape, stored_shape(spec))
        if spec.impl is not None and (saved.spec is None or saved.spec.dtype != "uint32"):
            raise TreeMismatchError(
                f"leaf {name!r} was saved as {_called(saved.kind)}, but the target is a PRNG key"
            )


def check_shape(name: str, saved: LeafRecord, wanted: tuple[int, ...]) -> None:
    """Refuses a shape that is neither the leaf's nor, of PRNG keys, that of their data.

    Raises:
      TreeMismatchError: another shape.
    """
    shape = () if saved.spec is None else stored_shape(saved.spec)
    seen = () if saved.spec is None else saved.spec.shape
    tree.check_shape(name, shape if len(wanted) == len(shape) else seen, wanted)


def _check_kinds(
    name: str, saved: LeafRecord, target: tree.Leaf | None, arg: ocp.RestoreArgs | None
) -> None:
    """Refuses text where numbers are wanted, and numbers where text is."""
    asked, python = _asked(arg)
    wanted = {"jax": "jax", "numpy": "numpy"}.get(asked or "", python)
    if wanted is None:
        wanted = None if target is None else target.kind
    if wanted is not None and wanted != saved.kind and {wanted, saved.kind} & {*_TEXTS}:
        raise TreeMismatchError(
            f"leaf {name!r} was saved as {_called(saved.kind)}, but what is asked for is "
            f"{_called(wanted)}"
        )


def _fitted_shape(
    target: tree.Leaf | None, arg: ocp.RestoreArgs | None, strict: bool
) -> tuple[int, ...] | None:
    """The shape to cut or pad to, None where the saved shape must be the wanted one."""
    if not getattr(arg, "strict", True):
        wanted = getattr(arg, "global_shape", None)
        return None if wanted is None else tuple(wanted)
    if strict or target is None or target.spec is None:
        return None
    return stored_shape(target.spec)


def restored(
    name: str,
    value: Any,
    saved: LeafRecord,
    target: tree.Leaf | None,
    arg: ocp.RestoreArgs | None,
    saved_sharding: Any,
    fallback: Any,
    *,
    strict: bool = True,
) -> Any:
    """Makes the leaf to return, of a pair that ``check_fits`` has let through.

    Args:
      name: the leaf's name.
      value: as ``record.read_leaves`` gives it.
      saved: the saved leaf's record.
      target: the target's leaf, or None.
      arg: its ``RestoreArgs``, or None; they win over the target. With ``strict=False`` in
        them, the array is cut or padded with zeros to their ``global_shape``.
      saved_sharding: the sharding at save, if it exists here, or None.
      fallback: the sharding to use where there is none.
      strict: False to cut or pad to the target's shape.

    Raises:
      TreeMismatchError: the value cannot be a Python scalar of the target's type.
    """
    form = _form(saved, target, arg)
    if form.kind == "text":
        return value
    if form.kind == "scalar":
        return _scalar(name, np.asarray(value).item() if saved.spec else value, form)
    array = np.asarray(value)
    shape = None if form.kind == "key" else _fitted_shape(target, arg, strict)
    if shape is not None and shape != array.shape:
        array = _fit(array, shape)
    sharding = _sharding(target, arg)
    if sharding is None and saved_sharding is not None:
        sharding = _placing(saved_sharding, np.shape(array))
    if sharding is None:
        sharding = fallback
    if form.kind == "key":
        # The sharding may be meant for the keys or for their data; the data take both.
        data = jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)
        return jax.random.wrap_key_data(data, impl=form.impl)
    if form.dtype is not None and array.dtype != form.dtype:
        array = _cast(array, form.dtype)
    if form.kind == "numpy":
        return array
    if saved.spec is None and form.dtype is None:
        array = _as_jax_would(array)
    if _loses_bits(array.dtype):
        return array  # exact as numpy; jax without 64 bits would round it
    return jax.device_put(array, sharding)


def _scalar(name: str, number: Any, form: _Form) -> Any:
    """A Python scalar, of the wanted type."""
    try:
        if form.dtype is not None:
            number = _cast(np.asarray(number), form.dtype).item()
        return number if form.python is None else _CASTS[form.python](number)
    except (TypeError, ValueError, OverflowError) as e:
        raise TreeMismatchError(
            f"leaf {name!r} was saved as {number!r}, but the target is a Python "
            f"{form.python or form.dtype}"
        ) from e


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in another dtype, as asked for: without warnings of what does not fit."""
    if array.dtype.kind == "c" and dtype.kind != "c":
        array = array.real
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def _as_jax_would(scalar: np.ndarray) -> np.ndarray:
    """A Python scalar's value in the dtype that jax gives it, if an integer fits there."""
    dtype = jax.dtypes.canonicalize_dtype(scalar.dtype)
    cast = scalar.astype(dtype)
    return scalar if dtype.kind in "iu" and cast != scalar else cast


def _fit(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array cut or padded with zeros at the end of each axis, to a shape of the same rank."""
    kept = tuple(slice(0, min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    out = np.zeros(shape, array.dtype)
    out[kept] = array[kept]
    return out


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
    """The tree with the ``dtype`` of ``ocp.SaveArgs`` applied.

    As in Orbax, a Python scalar becomes one of the dtype's own kind (an int with a float dtype is
    saved as float); PRNG keys and text have no dtype to change.
    """
    if save_args is None:
        return item

    def cast(leaf: Any, arg: Any) -> Any:
        dtype = getattr(arg, "dtype", None)
        if dtype is None:
            return leaf
        if type(leaf) in (bool, int, float, complex):
            return np.asarray(leaf).astype(dtype).item()
        if not hasattr(leaf, "astype") or tree.is_key_dtype(leaf.dtype):
            return leaf
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

"""What one leaf is: its kind, shape and dtype, and the part it plays in training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from lcjax._tree_names import Parts, is_text, join_name
from lcjax._tree_scalars import SCALAR_KINDS
from lcjax.dtypes import is_storable
from lcjax.errors import UnsupportedLeafError

ARRAY_KINDS = ("jax", "numpy", "key", "abstract")
"""Kinds of leaves that have a `spec`; ``abstract`` occurs only in targets."""


@dataclass(frozen=True)
class ArraySpec:
    """The shape and type of an array leaf.

    Attributes:
        shape: as the user sees it (for PRNG keys without the trailing axes of the key data).
        dtype: numpy's name, byte order aside, such as ``bfloat16`` or ``int4``. For PRNG keys, the
            dtype of the key data, ``uint32``.
        weak_type: whether JAX may still promote it as a Python scalar.
        impl: the PRNG of a typed key array, such as ``threefry2x32``; else None. An abstract key
            of an unregistered PRNG has the empty string.
    """

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool = False
    impl: str | None = None


@dataclass(frozen=True, eq=False)
class Leaf:
    """A leaf with its name.

    Attributes:
        parts: the path components; `name` joins them.
        value: the leaf itself (a numpy scalar as an array of no dimensions).
        kind: ``jax``, ``numpy``, ``key``, or the name of a Python type: ``int``, ``float``,
            ``bool``, ``complex``, ``str``, ``bytes``. In a target also ``abstract`` (anything
            with a shape and a dtype) and ``placeholder`` (``...``, do not load).
        role: see `role_of`.
        spec: shape and dtype of array leaves; None for the others.
    """

    parts: Parts
    value: Any
    kind: str
    role: str
    spec: ArraySpec | None

    @property
    def name(self) -> str:
        """The leaf's name, such as ``params/Dense_0/kernel``."""
        return join_name(self.parts)


class Hint(NamedTuple):
    """What the class of a node says about all leaves below it.

    Attributes:
        role: the role.
        root: for an optimizer state, how deep its outermost node lies; None where the class wraps
            a single leaf (an nnx variable), which tells no such thing.
    """

    role: str
    root: int | None = None


_OPTIMIZER_NAMES = frozenset({"opt_state", "optimizer", "optimizer_state", "opt"})
_OPTIMIZER_CLASSES = frozenset({"OptState", "OptVariable", "OptArray"})
_RNG_CLASSES = frozenset({"RngState", "RngKey", "RngCount"})
# The fields of optimizer states whose leaves deserve a codec of their own.
_SLOTS = frozenset({"mu", "nu", "nu_max", "trace", "count", "acc_grads"})
# The last component of leaves below a flax.nnx.Variable.
VARIABLE_FIELDS = ("value", "raw_value")


def hint_of(cls: type, depth: int) -> Hint | None:
    """What the class of a node at some depth says about the leaves below, judged by names alone.

    optax and flax are not imported: whoever has such a node has the package, nobody else needs it.
    """
    if cls.__module__.partition(".")[0] == "optax":
        return Hint("optimizer", depth)
    names = {c.__name__ for c in cls.__mro__}
    if names & _OPTIMIZER_CLASSES:
        return Hint("optimizer")
    if "Variable" in names and names & _RNG_CLASSES:
        return Hint("rng")
    if "Variable" in names and "BatchStat" in names:
        return Hint("batch_stats")
    return None


def role_of(parts: Parts, kind: str, dtype: str | None, hint: Hint | None = None) -> str:
    """Guesses what a leaf is for, so that a policy can choose its codec without help.

    Args:
        parts: the path components.
        kind: see `Leaf`.
        dtype: the dtype's name for arrays, else None.
        hint: what the class of an enclosing node says (optax states, nnx variables).

    Returns:
        The first that fits: ``rng`` (typed keys, nnx ``RngKey`` and ``RngCount``); inside an
        optimizer the field of its state that holds the leaf (``mu``, ``nu``, ``nu_max``,
        ``trace``, ``count``, ``acc_grads``), else ``optimizer``; ``batch_stats``; ``step`` (an
        integer leaf named so); ``param`` (real and complex floating arrays, averages of parameters
        too); ``other``.
    """
    if kind == "key" or (hint and hint.role == "rng"):
        return "rng"
    starts = [i + 1 for i, part in enumerate(parts) if part in _OPTIMIZER_NAMES]
    in_optimizer = bool(starts) or (hint is not None and hint.role == "optimizer")
    if in_optimizer:
        if hint and hint.root is not None:
            starts.append(hint.root)
        # The outermost one: a parameter may be called "mu" too, but lies below the field.
        inside = parts[min(starts, default=0) :]
        return next((part for part in inside if part in _SLOTS), "optimizer")
    if (hint and hint.role == "batch_stats") or "batch_stats" in parts:
        return "batch_stats"
    if dtype is not None and jax.dtypes.issubdtype(np.dtype(dtype), np.inexact):
        return "param"
    own = parts[:-1] if len(parts) > 1 and parts[-1] in VARIABLE_FIELDS else parts
    return "step" if own[-1:] == ("step",) and kind != "float" else "other"


def leaf_at(parts: Parts, value: Any, hint: Hint | None, *, target: bool) -> Leaf:
    """Classifies a leaf, of a tree to save or (`target`) of one to restore into.

    Raises:
        UnsupportedLeafError: lcjax does not store such a leaf; the message names it.
    """
    scalar = SCALAR_KINDS.get(type(value))
    if scalar is not None:
        if scalar == "str" and not is_text(value):
            raise _unsupported(parts, value, "it has a lone surrogate; store its bytes instead")
        return Leaf(parts, value, scalar, role_of(parts, scalar, None, hint), None)
    if target and value is ...:
        return Leaf(parts, value, "placeholder", role_of(parts, "placeholder", None, hint), None)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    kind, spec = _inspect(parts, value, target)
    role_kind = "key" if spec.impl is not None else kind
    return Leaf(parts, value, kind, role_of(parts, role_kind, spec.dtype, hint), spec)


_Inspected: TypeAlias = tuple[str, ArraySpec]


def _inspect(parts: Parts, value: Any, target: bool) -> _Inspected:
    if isinstance(value, jax.core.Tracer):
        raise _unsupported(parts, value, "save and restore outside jit, grad and vmap")
    if isinstance(value, jax.Array):
        return _inspect_jax(parts, value)
    if isinstance(value, np.ndarray):
        # A masked array's mask, a matrix's class would be lost in silence.
        if type(value) not in (np.ndarray, np.memmap):
            raise _unsupported(parts, value, "convert it with np.asarray(...)")
        return "numpy", ArraySpec(value.shape, _dtype_name(parts, value, value.dtype))
    if _is_abstract(value):
        if target:
            return "abstract", _abstract_spec(parts, value)
        raise _unsupported(
            parts, value, "it has a shape but no data JAX can read; convert it with np.asarray(...)"
        )
    raise _unsupported(
        parts,
        value,
        "convert it to an array or to a Python scalar (bool, int, float, complex, str, bytes), "
        "leave it out of the saved tree, or register its class with jax.tree_util",
    )


def _inspect_jax(parts: Parts, value: jax.Array) -> _Inspected:
    if not is_key_dtype(value.dtype):
        name = _dtype_name(parts, value, value.dtype)
        return "jax", ArraySpec(value.shape, name, bool(getattr(value, "weak_type", False)))
    impl = jax.random.key_impl(value)
    if not isinstance(impl, str):
        raise _unsupported(
            parts, value, f"its PRNG {impl} has no registered name; save jax.random.key_data(...)"
        )
    return "key", ArraySpec(value.shape, "uint32", impl=impl)


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of a typed PRNG key array."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _is_abstract(value: Any) -> bool:
    # A class has its instances' attributes as descriptors; it is no leaf of any kind.
    return not isinstance(value, type) and hasattr(value, "shape") and hasattr(value, "dtype")


def _abstract_spec(parts: Parts, value: Any) -> ArraySpec:
    try:
        shape = tuple(map(int, value.shape))
        dtype = value.dtype if is_key_dtype(value.dtype) else np.dtype(value.dtype)
    except (TypeError, ValueError):
        raise _unsupported(
            parts, value, "its shape or dtype is not one of an array; pass a jax.ShapeDtypeStruct"
        ) from None
    if is_key_dtype(dtype):
        return ArraySpec(shape, "uint32", impl=_key_impls().get(dtype, ""))
    name = _dtype_name(parts, value, dtype)
    return ArraySpec(shape, name, bool(getattr(value, "weak_type", False)))


@lru_cache(maxsize=1)
def _key_impls() -> dict[Any, str]:
    # An abstract key tells its PRNG only by its dtype; jax.random.key_impl wants a real one.
    def make(impl: str) -> Callable[[], jax.Array]:
        return lambda: jax.random.key(0, impl=impl)

    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {jax.eval_shape(make(name)).dtype: name for name in names}


_DTYPE_ADVICE = {
    "O": "store each object as a leaf of its own",
    "U": "store each string as a leaf of its own, or its bytes as uint8",
    "S": "store each string as a leaf of its own, or its bytes as uint8",
    "M": "store value.view('int64')",
    "m": "store value.view('int64')",
    "V": "store each field as a leaf of its own",
}


def _dtype_name(parts: Parts, value: Any, dtype: np.dtype) -> str:
    name = _storable_name(dtype)
    if name is None:
        advice = _DTYPE_ADVICE.get(dtype.kind, "convert it to a dtype that JAX has")
        raise _unsupported(parts, value, f"its dtype is {dtype}; {advice}")
    return name


@lru_cache(maxsize=256)  # numpy builds the name anew each time, slower than the rest of a leaf
def _storable_name(dtype: np.dtype) -> str | None:
    return dtype.name if is_storable(dtype) else None


def _unsupported(parts: Parts, value: Any, advice: str) -> UnsupportedLeafError:
    cls = type(value)
    return UnsupportedLeafError(
        f"leaf {join_name(parts)!r} is a {cls.__module__}.{cls.__qualname__}, "
        f"which lcjax does not store: {advice}"
    )


def array_of(leaf: Leaf) -> jax.Array | np.ndarray:
    """The array to store for an array leaf: its value, or the key data of a typed PRNG key.

    Args:
        leaf: a leaf of kind ``jax``, ``numpy`` or ``key``.

    Returns:
        A jax or numpy array; numpy arrays may have swapped bytes.

    Raises:
        TypeError: the leaf holds no array.
    """
    if leaf.kind == "key":
        return jax.random.key_data(leaf.value)
    if leaf.kind in ("jax", "numpy"):
        return leaf.value
    raise TypeError(f"leaf {leaf.name!r} of kind {leaf.kind!r} holds no array")

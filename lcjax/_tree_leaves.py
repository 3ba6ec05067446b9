"""What one leaf is: its kind, shape and dtype, and the part it plays in training."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
        role: see `role_of`, and `lcjax.roles` for a table.
        spec: shape and dtype of array leaves; None for the others.
        slot: position in `parts` of the optimizer's field that holds the leaf, where there is one.
    """

    parts: Parts
    value: Any
    kind: str
    role: str
    spec: ArraySpec | None
    slot: int | None = None

    @cached_property
    def name(self) -> str:
        """The leaf's name, such as ``params/Dense_0/kernel``."""
        return join_name(self.parts)


class Hint(NamedTuple):
    """What the class of a node says about all leaves below it.

    Attributes:
        role: the role.
        root: for an optimizer state, how deep its outermost node lies; None where the class wraps
            a single leaf (an nnx variable), which tells no such thing.
        centered: whether one of the classes is the state of a centered RMSProp that counts.
    """

    role: str
    root: int | None = None
    centered: bool = False


_OPTIMIZER_CLASSES = frozenset({"OptState", "OptVariable", "OptArray"})
_RNG_CLASSES = frozenset({"RngState", "RngKey", "RngCount"})
# Fields of optimizer states whose name alone tells what they hold.
_TELLING = {name: name for name in ("mu", "nu", "nu_max", "trace", "count", "acc_grads", "ema")} | {
    "exp_avg": "mu",  # Prodigy, DAdapt
    "m1": "mu",  # AdEMAMix; its m2 remembers thousands of steps, so it is no first moment to drop
    "exp_avg_sq": "nu",
    "sum_of_squares": "nu",  # AdaGrad
    "grad_sum_sq": "nu",  # MADGRAD
    "e_g": "nu",  # AdaDelta
    "v_row": "nu",  # AdaFactor
    "v_col": "nu",
}
# Fields that hold something else, or whose meaning takes the fields beside them to see. They are
# listed so that a parameter called "mu" below them is not taken for a first moment.
_OTHER_FIELDS = """
    m m2 n v g s t r z x0 e_x step_sizes prev_updates previous_gradient grad_sum params0 init_params
    init_particles cumulative_gradients subgradients reward projector hessian_fn_state hyperparams
    diff_params_memory diff_updates_memory weights_memory adv_state avg_grad mean_grads
    sum_sq_diff_grads mean_grads_ema variance_grads_ema found_nan measurements ns_coeffs
    mini_step gradient_step step_count count_m2 steps_since_sync barf
"""
FIELD_ROLES = dict.fromkeys(_OTHER_FIELDS.split(), "optimizer") | _TELLING
"""The fields of optimizer states, and the role that each has by its name alone."""

# Below these come names that users choose: labels of groups, names of hyperparameters.
_LABELLED = ("inner_states", "hyperparams_states")
INNER_STATES = ("inner_state", "inner_states", "inner_opt_state")
"""Fields of optax's wrappers that hold another optimizer's state."""

_OPTIMIZER_NAME = re.compile(
    r"(.*[_\-. ])?(opt|optim|optimizer)([_\-. ]?state)?s?|inner_states?", re.IGNORECASE
)
_RNG_WORDS = frozenset({"rng", "rngs", "prng"})
# The last component of leaves below a flax.nnx.Variable.
VARIABLE_FIELDS = ("value", "raw_value")


@lru_cache(maxsize=4096)
def words(part: str) -> tuple[str, ...]:
    """The words of a path component, in lower case: ``target_params`` has two."""
    return tuple(word for word in re.split(r"[_\-. ]", part.lower()) if word)


@lru_cache(maxsize=4096)
def _names_optimizer(part: str) -> bool:
    return _OPTIMIZER_NAME.fullmatch(part) is not None


def stem(parts: Parts) -> Parts:
    """A path without the last component that nnx variables add."""
    return parts[:-1] if len(parts) > 1 and parts[-1] in VARIABLE_FIELDS else parts


def average_at(parts: Parts) -> int | None:
    """Position of the component that names an average of parameters, such as ``ema_params``.

    Below ``params`` nothing does: a layer may be called so.
    """
    for i, part in enumerate(parts):
        if part == "params":
            return None
        if "ema" in words(part):
            return i
    return None


def hint_of(cls: type, depth: int) -> Hint | None:
    """What the class of a node at some depth says about the leaves below, judged by names alone.

    optax and flax are not imported: whoever has such a node has the package, nobody else needs it.
    """
    if cls.__module__.partition(".")[0] == "optax":
        # The one class of optax that holds the trained parameters themselves.
        return (
            None
            if cls.__name__ == "LookaheadParams"
            else Hint("optimizer", depth, cls.__name__ == "ScaleByRStdDevWithCountState")
        )
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

    `lcjax.roles.found` knows more, because it sees the other leaves too.

    Args:
        parts: the path components.
        kind: see `Leaf`.
        dtype: the dtype's name for arrays, else None.
        hint: what the class of an enclosing node says (optax states, nnx variables).

    Returns:
        The first that fits: ``rng`` (typed keys, nnx ``RngKey`` and ``RngCount``, uint32 arrays
        named so); inside an optimizer what `FIELD_ROLES` says of the field that holds the leaf,
        else ``optimizer``; ``batch_stats``; for real and complex floating arrays ``ema`` or
        ``param``; ``step`` (an integer leaf named so); ``other``. `lcjax.roles` has a table.
    """
    return _place(parts, kind, dtype, hint)[0]


def _place(parts: Parts, kind: str, dtype: str | None, hint: Hint | None) -> tuple[str, int | None]:
    """The role, and the position of the optimizer's field."""
    start = _optimizer_start(parts, hint)
    slot = None if start is None else field_at(parts, start)
    if kind == "key" or (hint and hint.role == "rng") or (dtype == "uint32" and _names_key(parts)):
        return "rng", slot
    if start is not None:
        role = "optimizer" if slot is None else FIELD_ROLES[parts[slot]]
        if hint and hint.centered and role in ("mu", "nu"):
            role = "optimizer"  # nu - mu^2 must stay positive, see `lcjax.roles.found`
        return role, slot
    if (hint and hint.role == "batch_stats") or any(p.endswith("batch_stats") for p in parts):
        return "batch_stats", None
    if dtype is not None and jax.dtypes.issubdtype(np.dtype(dtype), np.inexact):
        return ("param" if average_at(parts) is None else "ema"), None
    return ("step" if stem(parts)[-1:] == ("step",) and kind != "float" else "other"), None


def _optimizer_start(parts: Parts, hint: Hint | None) -> int | None:
    """Where the path enters an optimizer state, None if it does not."""
    hinted = hint is not None and hint.role == "optimizer"
    start = hint.root if hint is not None and hinted else None
    for i, part in enumerate(parts[:start]):
        if part == "params":
            break  # a layer may be called "opt"
        # nnx.ModelAndOptimizer holds the model beside its state.
        if _names_optimizer(part) and parts[i + 1 : i + 2] != ("model",):
            return i
    return 0 if hinted and start is None else start


def field_at(parts: Parts, start: int) -> int | None:
    """Position of the field that holds a leaf of the optimizer state at `start`.

    The outermost one: a parameter may be called "mu" too, but lies below the field.
    """
    i = start
    while i < len(parts):
        if parts[i] in _LABELLED:
            i += 1
        elif parts[i] in FIELD_ROLES:
            return i
        i += 1
    return None


def _names_key(parts: Parts) -> bool:
    own = stem(parts)
    return any(not _RNG_WORDS.isdisjoint(words(part)) for part in own) or (
        bool(own) and words(own[-1])[-1:] == ("key",)
    )


def leaf_at(parts: Parts, value: Any, hint: Hint | None, *, target: bool) -> Leaf:
    """Classifies a leaf, of a tree to save or (`target`) of one to restore into.

    Raises:
        UnsupportedLeafError: lcjax does not store such a leaf; the message names it.
    """
    scalar = SCALAR_KINDS.get(type(value))
    if scalar is not None:
        if scalar == "str" and not is_text(value):
            raise _unsupported(parts, value, "it has a lone surrogate; store its bytes instead")
        role, slot = _place(parts, scalar, None, hint)
        return Leaf(parts, value, scalar, role, None, slot)
    if target and value is ...:
        role, slot = _place(parts, "placeholder", None, hint)
        return Leaf(parts, value, "placeholder", role, None, slot)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    kind, spec = _inspect(parts, value, target)
    role_kind = "key" if spec.impl is not None else kind
    role, slot = _place(parts, role_kind, spec.dtype, hint)
    return Leaf(parts, value, kind, role, spec, slot)


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

"""Containers, partial targets and arguments to compare lcjax and Orbax on."""

import collections
import dataclasses
from typing import NamedTuple

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

X, Y = jnp.arange(8.0), np.arange(3)
ARRAYS = ocp.ArrayRestoreArgs
ARGS = ocp.RestoreArgs


class Two(NamedTuple):
    a: object
    b: object


class NoFields(NamedTuple):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    weights: object
    pair: tuple


@flax.struct.dataclass
class Struct:
    first: object
    second: object
    name: str = flax.struct.field(pytree_node=False, default="x")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def containers():
    """Name -> a tree with containers of one kind."""
    return {
        "dict": {"x": X, "deep": {"er": {"y": Y}}},
        "list_and_tuple": {"l": [X, [Y]], "t": (X, (Y,)), "lt": [(X,)], "tl": ([Y],)},
        "namedtuple": {"n": Two(X, Two(Y, 1))},
        "dataclass": {"d": Plain({"x": X}, (Y, [X]))},
        "flax_struct": {"s": Struct(X, Struct(Y, 2))},
        "nnx_state": nnx.state(Model(nnx.Rngs(0))),
        "ordered_dict": {"o": collections.OrderedDict(b=X, a=Y)},
        "frozen_dict": {"f": flax.core.freeze({"a": X, "b": {"c": Y}})},
        "optax": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init({"w": X}),
        "empties": {
            "x": 1,
            "all": [None, {}, [], (), optax.EmptyState(), NoFields()],
            "in": {"a": ({},), "b": [()], "c": Two(None, [])},
        },
        "names": {"a.b": X, "c/d": Y, "e f": 1, "~": X, "ü": 2},
        "one_leaf": [X],
    }


def base():
    """What the partial cases restore from."""
    return {
        "x": X,
        "n": {"y": Y, "z": jnp.ones(2)},
        "l": [X, Y, X + 1],
        "t": (X, {"q": Y}),
        "nt": Two(X, Y),
        "none": None,
        "ed": {},
        "el": [],
        "s": 3,
        "es": optax.EmptyState(),
    }


def changed(**leaves):
    return {**base(), **leaves}


def without(*names):
    return {k: v for k, v in base().items() if k not in names}


def partial_cases():
    """Name -> target and arguments of a ``PyTreeRestore`` of ``base()``."""
    fifth = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    part = {"partial_restore": True}
    numpy = jax.tree.map(lambda _: ARGS(restore_type=np.ndarray), base())
    return {
        "everything": (base(), {}),
        "one leaf": ({"x": 0}, part),
        "values say nothing": ({"x": object(), "s": "?", "nt": Two(None, 1.5)}, part),
        "its dtype says nothing": ({"x": jax.ShapeDtypeStruct((8,), jnp.float16)}, part),
        "a new leaf stays": ({"x": 0, "new": 5}, part),
        "a new leaf in a dict stays": ({"x": 0, "n": {"w": 7}}, part),
        "a new leaf in an empty dict stays": ({"x": 0, "ed": {"w": 7}}, part),
        "only a new leaf": ({"new": 5}, part),
        "a list by its beginning": ({"l": [0]}, part),
        "a tuple by its beginning": ({"t": (0,)}, part),
        "a longer list": ({"l": [0, 0, 0, 4]}, part),
        "namedtuple": ({"nt": Two(0, 0)}, part),
        "namedtuple as dict": ({"nt": {"a": 0}}, part),
        "none": ({"x": 0, "none": None}, part),
        "none for a leaf": ({"x": None, "s": 0}, part),
        "a leaf for none": ({"x": 0, "none": 3}, part),
        "a leaf for a dict": ({"x": 0, "n": 3}, part),
        "a leaf for an empty dict": ({"x": 0, "ed": 3}, part),
        "a dict for a leaf": ({"x": {"a": 0}}, part),
        "nothing": ({}, part),
        "nothing of a dict": ({"n": {}, "x": 0}, part),
        "placeholder and partial": ({"x": ..., "s": 0}, part),
        "arguments": (
            {"x": 0, "s": 0},
            {**part, "restore_args": {"x": ARRAYS(sharding=fifth), "s": ARGS()}},
        ),
        "arguments for all": ({"x": 0, "s": 0}, {**part, "restore_args": numpy}),
        "arguments for some": (
            {"x": 0, "s": 0},
            {**part, "restore_args": {"x": ARRAYS(sharding=fifth)}},
        ),
        "no target": (None, part),
        "placeholder": (changed(x=...), {}),
        "placeholders in a list": (changed(l=[..., 0, ...]), {}),
        "placeholder in a namedtuple": (changed(nt=Two(..., 0)), {}),
        "placeholder for a dict": (changed(n=...), {}),
        "placeholder for a new leaf": (changed(new=...), {}),
        "placeholder for a new leaf in a dict": (changed(n={**base()["n"], "w": ...}), {}),
        "placeholder for none": (changed(none=...), {}),
        "placeholder for an empty dict": (changed(ed=...), {}),
        "placeholder, and a leaf missing": ({**without("s"), "x": ...}, {}),
        "placeholders only": (jax.tree.map(lambda _: ..., base()), {}),
        "a leaf missing": (without("x"), {}),
        "a leaf too many": (changed(new=1), {}),
        "none for a leaf of all": (changed(x=None), {}),
        "a leaf for none of all": (changed(none=1), {}),
        "a dict for an empty dict": (changed(ed={"a": 1}), {}),
        "none for an empty dict": (changed(ed=None), {}),
        "an empty dict for none": (changed(none={}), {}),
        "none missing": (without("none"), {}),
        "an empty dict missing": (without("ed"), {}),
        "none too many": (changed(nn=None), {}),
        "an empty dict too many": (changed(nn={}), {}),
        "a list as tuple": (changed(l=tuple(base()["l"])), {}),
        "a list as dict": (changed(l={"0": 0, "1": 0, "2": 0}), {}),
        "a namedtuple as dict of all": (changed(nt={"a": 0, "b": 0}), {}),
        "a shorter list": (changed(l=base()["l"][:2]), {}),
        "another shape": (changed(x=jnp.zeros(9)), {}),
    }


BY_NAME = "leaves pair by name alone, and what is not asked for is left out"
EMPTY_IS_NOTHING = "None and empty containers hold no data, so one on only one side is no mismatch"
LOST = "Orbax quietly gives back None, or the empty dict, where the target has a leaf"
# Case -> why lcjax differs, and what it gives; None where it refuses.
PARTIAL_DIFFERENCES = {
    "a list by its beginning": (BY_NAME, {"l": [X]}),
    "a tuple by its beginning": (BY_NAME, {"t": (X,)}),
    "arguments for some": (BY_NAME, {"x": X, "s": 3}),
    "nothing": (BY_NAME, {}),
    "nothing of a dict": (BY_NAME, {"n": {}, "x": X}),
    "a new leaf in an empty dict stays": (
        "an empty dict has room for new leaves as another dict has",
        {"x": X, "ed": {"w": 7}},
    ),
    "a list as dict": (BY_NAME, changed(l={"0": X, "1": Y, "2": X + 1})),
    "placeholder and partial": (
        "Orbax loads the leaf in a placeholder's place if the restore is partial",
        {"x": ..., "s": 3},
    ),
    "none missing": (EMPTY_IS_NOTHING, without("none")),
    "an empty dict missing": (EMPTY_IS_NOTHING, without("ed")),
    "none too many": (EMPTY_IS_NOTHING, changed(nn=None)),
    "an empty dict too many": (EMPTY_IS_NOTHING, changed(nn={})),
    "a leaf for none": (LOST, None),
    "a leaf for none of all": (LOST, None),
    "a leaf for an empty dict": (LOST, None),
    "another shape": ("Orbax ignores the target's shape, and gives an array of another", None),
}


def restore_args():
    """Name -> arguments of one leaf, made for it."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pinned = here.with_memory_kind("pinned_host")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))

    def sized(by, **kwargs):
        return lambda leaf: ARRAYS(
            sharding=here, global_shape=(leaf.shape[0] + by, *leaf.shape[1:]), **kwargs
        )

    def always(arg):
        return lambda leaf: arg

    return {
        "nothing": always(ARGS()),
        "dtype": always(ARGS(dtype=np.dtype(np.float16))),
        "dtype bfloat16": always(ARGS(dtype=jnp.bfloat16)),
        "numpy": always(ARGS(restore_type=np.ndarray)),
        "numpy and dtype": always(ARGS(restore_type=np.ndarray, dtype=jnp.float16)),
        "jax": always(ARGS(restore_type=jax.Array)),
        "float": always(ARGS(restore_type=float)),
        "int": always(ARGS(restore_type=int)),
        "bool": always(ARGS(restore_type=bool)),
        "str": always(ARGS(restore_type=str)),
        "array": always(ARRAYS()),
        "array of no type": always(ARRAYS(restore_type=None)),
        "array as numpy": always(ARRAYS(restore_type=np.ndarray)),
        "sharding": always(ARRAYS(sharding=here)),
        "mesh": always(ARRAYS(mesh=mesh, mesh_axes=jax.sharding.PartitionSpec())),
        "memory kind": always(ARRAYS(sharding=pinned)),
        "sharding and dtype": always(ARRAYS(sharding=here, dtype=jnp.bfloat16)),
        "same shape": sized(0),
        "larger, strict": sized(3),
        "larger": sized(3, strict=False),
        "smaller": sized(-3, strict=False),
        "another rank": lambda leaf: ARRAYS(
            sharding=here, global_shape=(*leaf.shape, 1), strict=False
        ),
    }


def argument_targets():
    """Name -> the target's leaf, made for a saved one; None for no target at all."""
    return {
        "no target": lambda leaf: None,
        "itself": lambda leaf: leaf,
        "an object": lambda leaf: object(),
        "a number": lambda leaf: 0,
        "float16": lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float16),
    }


ARGUMENT_LEAVES = (
    "float32",
    "bfloat16",
    "zero_d",
    "key",
    "keys_2d",
    "py_int",
    "py_float",
    "py_str",
    "np_float32",
    "np_float64",
)

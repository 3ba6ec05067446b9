"""The table of odd leaves: what they are, how they can be asked for, where lcjax differs."""

import contextlib
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax_helpers import same

import lcjax

NO_CELL = object()
GRID = np.arange(16)


def leaves():
    """Name -> leaf, with values that are easily lost."""
    odd = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1, 0x807FFFFF, 0, 3], np.uint32)
    sixteen = np.array([1, 0x8000, 0x7FC1, 0xFF81, 0x7F80, 0x0080, 0x3F80, 0x4049], np.uint16)
    return {
        "float32": jnp.asarray(odd.view(np.float32)),
        "bfloat16": jnp.asarray(sixteen.view(ml_dtypes.bfloat16)),
        "float16": jnp.asarray(sixteen.view(np.float16)),
        "float8_e4m3fn": jnp.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)),
        "float8_e5m2": jnp.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2)),
        "float4_e2m1fn": jnp.asarray(GRID % 4, jnp.float4_e2m1fn),
        "int2": jnp.asarray(GRID % 4 - 2, jnp.int2),
        "int4": jnp.asarray(GRID - 8, jnp.int4),
        "uint2": jnp.asarray(GRID % 4, jnp.uint2),
        "uint4": jnp.asarray(GRID, jnp.uint4),
        "int8": jnp.asarray(GRID - 8, jnp.int8),
        "uint8": jnp.arange(256, dtype=jnp.uint8),
        "int32": jnp.asarray([-(2**31), 2**31 - 1] * 4, jnp.int32),
        "bool": jnp.asarray(GRID % 3 == 0),
        "complex64": jnp.asarray([1 - 2j, complex("nan"), -0.0j, 0] * 2, jnp.complex64),
        "two_d": jnp.arange(32.0).reshape(8, 4),
        "zero_d": jnp.asarray(-0.0, jnp.float32),
        "zero_d_int": jnp.asarray(7, jnp.int32),
        "empty": jnp.zeros((0, 8), jnp.float32),
        "weak": jnp.asarray(3.0),
        "weak_1d": jnp.broadcast_to(jnp.asarray(2.0), (16,)),
        "key": jax.random.key(7),
        "key_rbg": jax.random.key(7, impl="rbg"),
        "key_unsafe_rbg": jax.random.key(7, impl="unsafe_rbg"),
        "keys": jax.random.split(jax.random.key(8), 8),
        "keys_2d": jax.random.split(jax.random.key(8, impl="rbg"), (8, 2)),
        "py_int": -5,
        "py_int_64": 2**40 + 1,
        "py_int_huge": 10**30,
        "py_float": 0.1,
        "py_bool": True,
        "py_complex": 1 - 0.5j,
        "py_str": "schön",
        "py_bytes": b"\x00\xff",
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
        "np_float32": odd.view(np.float32),
        "np_float64": np.array([1 / 3, -0.0, np.nan, 5e-324, 1, 2, 3, 4]),
        "np_int64": np.array([-(2**63), 2**63 - 1] * 4),
        "np_bfloat16": sixteen.view(ml_dtypes.bfloat16),
        "np_int4": (GRID - 8).astype(ml_dtypes.int4),
        "np_bool": GRID > 3,
        "np_complex128": GRID * 1j / 3,
        "np_swapped": (GRID / 3).astype(">f4"),
        "np_transposed": (np.arange(12.0) / 3).reshape(3, 4).T,
        "np_strided": np.arange(32, dtype=np.int32)[::-2],
        "np_read_only": np.broadcast_to(np.float32(0.1), (16,)),
        "np_empty": np.zeros((0, 8)),
        "np_zero_d": np.array(1 / 3),
        "scalar_float32": np.float32(0.1),
        "scalar_float64": np.float64(0.1),
        "scalar_int64": np.int64(2**40),
        "scalar_bool": np.bool_(True),
    }


def is_jax(leaf):
    return isinstance(leaf, jax.Array)


def is_key(leaf):
    return is_jax(leaf) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_array(leaf):
    return is_jax(leaf) or isinstance(leaf, np.ndarray)


def struct(leaf, sharding=None, dtype=None):
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)


def first():
    return SingleDeviceSharding(jax.devices()[0])


def memory(kind):
    return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def other_dtype(leaf):
    return jnp.bfloat16 if leaf.dtype == jnp.float32 else jnp.float32


def _for(accepted, make):
    return lambda leaf: make(leaf) if accepted(leaf) else NO_CELL


def _numbers(leaf):
    return is_array(leaf) and not is_key(leaf)


def _one_number(leaf):
    if isinstance(leaf, bool | int | float):
        return True
    return _numbers(leaf) and leaf.shape == () and leaf.dtype.kind != "c"


COLUMNS = {
    "without": lambda leaf: None,
    "target": lambda leaf: leaf,
    "shape_only": _for(is_array, struct),
    "sharding": _for(is_array, lambda leaf: struct(leaf, first())),
    "dtype": _for(_numbers, lambda leaf: struct(leaf, first(), other_dtype(leaf))),
    "dtype_shape_only": _for(_numbers, lambda leaf: struct(leaf, None, other_dtype(leaf))),
    "dtype_jax": _for(_numbers, lambda leaf: jnp.zeros(leaf.shape, jnp.float16)),
    "dtype_numpy": _for(_numbers, lambda leaf: np.zeros(leaf.shape, np.float64)),
    "python_float": _for(_one_number, lambda leaf: 0.0),
    "python_int": _for(_one_number, lambda leaf: 0),
    "pinned_host": _for(is_jax, lambda leaf: struct(leaf, memory("pinned_host"))),
    "unpinned_host": _for(is_jax, lambda leaf: struct(leaf, memory("unpinned_host"))),
    "pinned_target": _for(is_jax, lambda leaf: jax.device_put(leaf, memory("pinned_host"))),
}


@functools.cache
def eight(*axes):
    """A mesh of eight devices, in as many axes as are named."""
    shape = {1: (8,), 2: (4, 2)}[len(axes)]
    return Mesh(np.array(jax.devices()).reshape(shape), axes)


def _spread(spec, *axes):
    sharding = NamedSharding(eight(*axes), spec)

    def accepted(leaf):
        if not is_array(leaf):
            return False
        try:
            sharding.shard_shape(leaf.shape)
        except (IndexError, ValueError):  # of fewer axes, or not divisible
            return False
        return True

    return accepted, sharding


def sharded_columns():
    """Columns that need eight devices."""
    made = {}
    for name, spec, axes in (
        ("rows", P("x"), ("x",)),
        ("replicated", P(), ("x",)),
        ("grid", P("a", "b"), ("a", "b")),
        ("both_axes", P(("b", "a")), ("a", "b")),
    ):
        accepted, sharding = _spread(spec, *axes)
        made[name] = _for(accepted, functools.partial(struct, sharding=sharding))
        made[f"{name}_target"] = _for(
            lambda leaf, accepted=accepted: is_jax(leaf) and accepted(leaf),
            functools.partial(jax.device_put, device=sharding),
        )
    fifth = SingleDeviceSharding(jax.devices()[5])
    made["fifth"] = _for(is_array, functools.partial(struct, sharding=fifth))
    return made


def sharded_leaves():
    """Leaves that were spread over eight devices when they were saved."""
    plain = leaves()
    rows, grid = NamedSharding(eight("x"), P("x")), NamedSharding(eight("a", "b"), P("a", "b"))
    made = {f"{n}_rows": jax.device_put(plain[n], rows) for n in ("float32", "int4", "keys")}
    made["two_d_grid"] = jax.device_put(plain["two_d"], grid)
    made["bfloat16_replicated"] = jax.device_put(
        plain["bfloat16"], NamedSharding(eight("x"), P(None))
    )
    made["fifth"] = jax.device_put(plain["two_d"], SingleDeviceSharding(jax.devices()[5]))
    made["pinned"] = jax.device_put(plain["two_d"], rows.with_memory_kind("pinned_host"))
    return made


# Leaves that Orbax's Standard handler does not save -> why lcjax does.
SAVED_BY_US_ALONE = {
    "uint2": "Orbax has no name for it; jax has the dtype",
    "uint4": "Orbax has no name for it; jax has the dtype",
    "empty": "Orbax refuses arrays of no elements, which users asked for",
    "np_empty": "as above",
    "py_int_huge": "Orbax stores ints of 64 bits at most",
    "py_complex": "a Python scalar like the others",
    "py_str": "Standard refuses text, which Orbax's PyTree handler saves",
    "py_bytes": "as above",
}

NO_SCALAR_TARGETS = "numpy scalars are allowed in a target, and come back as they do without one"
EXACT = "without 64 bits in jax the array would be rounded; it comes back exact, as numpy"
BYTE_ORDER = "Orbax refuses a target of swapped bytes; jax arrays have one byte order"
PLACED = ("sharding", "rows", "replicated", "grid", "both_axes", "fifth")


class Difference(NamedTuple):
    """A cell in which lcjax differs from Orbax on purpose.

    Attributes:
      reason: why.
      expected: the target's leaf -> what lcjax gives.
    """

    reason: str
    expected: Callable[[Any], Any]


@functools.cache
def differences():
    """(leaf, column) -> what lcjax gives instead, and why."""
    plain = leaves()
    native = plain["np_swapped"].astype(np.float32)
    made = {}
    for name in plain:
        if name.startswith("scalar_"):
            made[name, "target"] = Difference(NO_SCALAR_TARGETS, np.asarray)
    for column in PLACED:
        for name in ("np_float64", "np_int64", "np_complex128", "np_transposed", "np_zero_d"):
            made[name, column] = Difference(EXACT, lambda _, leaf=plain[name]: leaf)
        made["np_swapped", column] = Difference(
            BYTE_ORDER, lambda target: jax.device_put(native, target.sharding)
        )
    return made


def expected_alone(name, leaf, column, target):
    """What the cells of a leaf that Orbax does not save must be: the rule in words.

    The target's type, dtype and sharding win; without them the leaf comes back as it was.
    """
    if column in ("without", "target") or not is_array(target):
        if column.startswith("python_"):
            return type(target)(leaf)
        if not isinstance(target, jax.ShapeDtypeStruct):
            return leaf
    if isinstance(target, np.ndarray):
        return np.asarray(leaf).astype(target.dtype)
    sharding = target.sharding
    if sharding is None and isinstance(leaf, np.ndarray):
        return leaf.astype(target.dtype)
    if jax.dtypes.canonicalize_dtype(target.dtype) != target.dtype:
        return leaf  # EXACT
    cast = np.asarray(leaf).astype(target.dtype)
    return jax.device_put(cast, first() if sharding is None else sharding)


def one_nan(leaf):
    """The leaf with every NaN made the same: what a cast makes of a NaN's bits is nobody's rule."""
    if not is_array(leaf) or is_key(leaf):
        return leaf
    values = np.array(leaf)
    if jax.dtypes.issubdtype(values.dtype, np.floating):
        with np.errstate(all="ignore"):
            values[np.isnan(values.astype(np.float64))] = np.nan
    return values


def alike(found, expected, where, *, cast=False):
    """Asserts that two restored leaves are the same in every respect.

    Args:
      found: what lcjax gave.
      expected: what it should be.
      where: for the message.
      cast: whether they were cast, so that the bits of a NaN do not count.
    """
    assert type(found) is type(expected) or (is_jax(found) and is_jax(expected)), (found, expected)
    if cast:
        same(one_nan(found), one_nan(expected), where)
    else:
        same(found, expected, where)
    if is_jax(expected):
        assert found.sharding == expected.sharding, f"{where}: {found.sharding}"
        assert found.sharding.memory_kind == expected.sharding.memory_kind, where
        assert getattr(found, "weak_type", False) == getattr(expected, "weak_type", False), where


class Pair:
    """Two checkpointers with Orbax's Standard handler and ours, and what they saved."""

    def __init__(self, theirs=None, saving=ocp.args.StandardSave, restoring=None):
        self.root = Path(tempfile.mkdtemp())
        self.theirs = ocp.Checkpointer(theirs or ocp.StandardCheckpointHandler())
        self.ours = ocp.Checkpointer(lcjax.CheckpointHandler("lossless"))
        self.saving = saving
        self.restoring = restoring or ocp.args.StandardRestore
        self.saved = {}

    def save(self, name, tree, **kwargs):
        """Saves a tree once with each; the two outcomes."""
        if name not in self.saved:
            self.saved[name] = tuple(
                outcome(lambda c=c, k=k: c.save(self.path(name, k), self.saving(tree, **kwargs)))
                for k, c in (("orbax", self.theirs), ("lcjax", self.ours))
            )
        return self.saved[name]

    def path(self, name, kind):
        return self.root / f"{name}-{kind}"

    def restore(self, name, *args, **kwargs):
        """Restores it with each; the two outcomes."""
        return tuple(
            outcome(lambda c=c, k=k: c.restore(self.path(name, k), self.restoring(*args, **kwargs)))
            for k, c in (("orbax", self.theirs), ("lcjax", self.ours))
        )

    def close(self):
        for c in (self.theirs, self.ours):
            with contextlib.suppress(Exception):
                c.close()


def outcome(call):
    """A call's result or its error."""
    try:
        return call()
    except Exception as e:
        return e


def refused(found):
    """Asserts that lcjax refused, by an error that a caller of Orbax would expect too."""
    assert isinstance(found, lcjax.LcjaxError) and isinstance(found, ValueError | TypeError), found


def check_cell(pair, name, leaf, column, make):
    """One cell of the table."""
    target = make(leaf)
    if target is NO_CELL:
        pytest.skip("the column does not apply to this kind of leaf")
    where, cast = f"{name}, {column}", column.startswith("dtype")
    theirs, ours = pair.save(name, {"leaf": leaf, "other": 1})
    assert ours is None, (where, ours)
    given = None if column == "without" else {"leaf": target, "other": 0}
    if name in SAVED_BY_US_ALONE:
        assert isinstance(theirs, Exception), f"{where}: Orbax saves it now"
        _, found = pair.restore(name, given)
        assert not isinstance(found, Exception), (where, found)
        expected = expected_alone(name, leaf, column, target)
        alike(found["leaf"], expected, where, cast=cast)
        return
    assert theirs is None, (where, theirs)
    theirs, found = pair.restore(name, given)
    different = differences().get((name, column))
    if different is not None:
        expected = different.expected(target)
        alike(found["leaf"], expected, where)
        with pytest.raises((AssertionError, TypeError)):  # else the table is out of date
            alike(theirs["leaf"], expected, where)
    elif isinstance(theirs, Exception):
        refused(found)
    else:
        assert not isinstance(found, Exception), (where, found)
        alike(found["leaf"], theirs["leaf"], where, cast=cast)
        assert found["other"] == theirs["other"] == 1


def cells(leaf_names, column_names, made_leaves, made_columns):
    """The cells that exist."""
    return [
        (name, column)
        for name in leaf_names
        for column in column_names
        if made_columns[column](made_leaves[name]) is not NO_CELL
    ]

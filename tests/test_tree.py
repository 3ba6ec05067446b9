"""Trees <-> named leaves: every container, against Orbax Standard where lcjax imitates it."""

import ast
import collections
import dataclasses
import enum
import json
import math
import pathlib
import re
import sys
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax import tree
from lcjax.errors import CorruptDataError, TreeMismatchError, UnsupportedLeafError

A = jnp.arange(3.0)
B = np.ones((2, 2), np.float32)
PARAMS = {"Dense_0": {"kernel": A, "bias": jnp.zeros(2)}}


class Point(NamedTuple):
    x: Any
    y: Any


class Nothing(NamedTuple):
    pass


@flax.struct.dataclass
class Struct:
    w: Any
    static: int = flax.struct.field(pytree_node=False, default=3)


@flax.struct.dataclass
class EmptyStruct:
    static: int = flax.struct.field(pytree_node=False, default=3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    p: Any
    q: Any


class Plain:
    """Registered without keys: its children are known by position only."""

    def __init__(self, u, v):
        self.u, self.v = u, v


class Keyed(Plain):
    """Registered with attribute names, as equinox does."""


class Mixed(Plain):
    """Registered with an attribute and a dict key."""


ATTR = jax.tree_util.GetAttrKey
jax.tree_util.register_pytree_node(Plain, lambda o: ((o.u, o.v), None), lambda _, c: Plain(*c))
jax.tree_util.register_pytree_with_keys(
    Keyed, lambda o: (((ATTR("u"), o.u), (ATTR("v"), o.v)), None), lambda _, c: Keyed(*c)
)
jax.tree_util.register_pytree_with_keys(
    Mixed,
    lambda o: (((ATTR("u"), o.u), (jax.tree_util.DictKey(3), o.v)), None),
    lambda _, c: Mixed(*c),
)


class Level(enum.IntEnum):
    LOW = 1


class MyVariable(nnx.Variable):
    pass


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
        self.lora = nnx.LoRAParam(jnp.ones((2, 1)))
        self.cache = nnx.Cache(jnp.zeros(2))
        self.seen = nnx.Intermediate(jnp.zeros(1))
        self.own = MyVariable(jnp.ones(1))


NET = Net(nnx.Rngs(0))
NNX_STATE = nnx.state(NET)
NNX_OPTIMIZER = nnx.state(nnx.Optimizer(NET, optax.adam(1e-3), wrt=nnx.Param))
CHAIN = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
TRAIN_STATE = TrainState.create(apply_fn=None, params=PARAMS, tx=CHAIN)

# Trees that Orbax Standard saves too; build() must agree with its restore without a target.
SHARED = {
    "dict": {"a": A, "b": B},
    "int_keys": {1: A, 2: B, -3: A},
    "float_keys": {1.5: A},
    "tuple_keys": {(1, 2): A},
    "bool_keys": {True: A},
    "enum_keys": {Level.LOW: A},
    "list": [A, B],
    "tuple": (A, B),
    "nested": {"t": (A, [B, {"z": A}], (A,))},
    "none": {"a": None, "b": A},
    "empties": {"a": {}, "b": [], "c": (), "d": A},
    "empties_in_list": [{}, None, A, (), [(), A]],
    "empty_namedtuple": {"e": Nothing(), "d": A},
    "namedtuple": {"n": Point(A, B)},
    "namedtuple_of_empties": {"n": Point({}, None), "a": A},
    "ordered_dict": collections.OrderedDict(b=A, a=B),
    "defaultdict": collections.defaultdict(int, {"b": A, "a": B}),
    "frozen_dict": FrozenDict({"a": {"b": A}}),
    "empty_frozen_dict": {"x": FrozenDict({}), "y": A},
    "struct": {"s": Struct(A), "t": Struct(None), "u": Struct({})},
    "empty_struct": {"s": EmptyStruct(), "a": A},
    "register_dataclass": Registered(A, B),
    "plain_node": {"p": Plain(A, B)},
    "keyed_node": {"p": Keyed(A, B)},
    "mixed_node": {"p": Mixed(A, B)},
    "scalars": {"i": 3, "f": 1.5, "b": True, "inf": math.inf, "zero": -0.0, "big": 2**40},
    "numpy_scalar": {"n": np.float32(3)},
    "typed_keys": {"k": jax.random.key(0), "ks": jax.random.split(jax.random.key(1), 2)},
    "low_precision": {n: jnp.ones(4, n) for n in ("bfloat16", "float8_e4m3fn", "int4", "bool")},
    "nnx_state": NNX_STATE,
    "nnx_empty_state": {"s": nnx.State({}), "a": A},
    "nnx_optimizer": NNX_OPTIMIZER,
    "adamw": optax.adamw(1e-3).init(PARAMS),
    "chain": CHAIN.init(PARAMS),
    "train_state": TRAIN_STATE,
    "multi_steps": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).init(PARAMS),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(1e-3).init(PARAMS),
    "masked": optax.masked(optax.adam(1e-3), {"Dense_0": False}).init(PARAMS),
    "slash_key": {"a/b": A, "a": {"b": B}},
    "dot_and_empty_key": {"a.b": A, "": B},
}

# Trees that Orbax Standard refuses, or saves wrongly.
OWN = {
    "bare_array": A,
    "bare_scalar": 5,
    "nothing": None,
    "empty": {},
    "other_scalars": {"c": 1 - 0.0j, "s": "hi ☃", "b": b"\x00\xff", "i": 1 << 20000},
    "zero_size": {"z": jnp.zeros((0, 3))},
    "dots": {"a": {"b": A}, "a.b": B},
    "swapped_bytes": {"x": np.arange(3, dtype=">f4")},
    "memmap_like_view": {"x": np.arange(9.0).reshape(3, 3).T[::2]},
    "nnx_module": NET,
    "ordered_int_keys": collections.OrderedDict([(2, A), (1, B)]),
    "big_int_key": {1 << 64: A},
    "rbg_key": jax.random.key(3, impl="rbg"),
    "deep": None,
}
for _ in range(tree.MAX_DEPTH):
    OWN["deep"] = [OWN["deep"]]

ALL = SHARED | OWN


def through_json(skeleton, num_leaves=None):
    text = json.dumps(tree.to_json_skeleton(skeleton), allow_nan=False)
    return tree.validate_skeleton(json.loads(text), num_leaves)


def assert_same_leaf(got, want):
    assert type(got) is type(want) or isinstance(want, np.generic)
    if isinstance(want, jax.Array | np.ndarray | np.generic):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    else:
        assert repr(got) == repr(want) if isinstance(want, float | complex) else got == want


def assert_same_tree(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_leaf(g, w)


def str_keys(node):
    """Orbax has no int keys; everything else must agree."""
    if isinstance(node, dict):
        return {str(k): str_keys(v) for k, v in node.items()}
    return [*map(str_keys, node)] if isinstance(node, list) else node


def values_of(flat):
    return [leaf.value for leaf in flat.leaves]


# --- round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
def test_target_gives_every_container_back(case):
    original = ALL[case]
    flat = tree.flatten(original)
    skeleton = through_json(flat.skeleton, len(flat.leaves))
    assert skeleton == flat.skeleton
    assert len({*skeleton.names}) == len(flat.leaves)
    got = tree.build_like(original, skeleton, lambda _, i: flat.leaves[i].value)
    assert_same_tree(got, original)


@pytest.mark.parametrize("case", ALL)
def test_leaves_are_in_the_order_of_jax(case):
    for leaf, want in zip(tree.flatten(ALL[case]).leaves, jax.tree.leaves(ALL[case]), strict=True):
        assert_same_leaf(leaf.value, want)


@pytest.mark.parametrize("case", SHARED)
def test_build_agrees_with_orbax_standard(case, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", SHARED[case])
        checkpointer.wait_until_finished()
        theirs = checkpointer.restore(tmp_path / "c")
    flat = tree.flatten(SHARED[case])
    ours = tree.build(through_json(flat.skeleton), values_of(flat))
    assert_same_tree(str_keys(ours), str_keys(theirs))


@pytest.mark.parametrize(
    ("original", "want"),
    [
        ({1: 1, 2: 2}, {1: 1, 2: 2}),
        ({"a": {(1, 2): 1}}, {"a": {"(1, 2)": 1}}),
        ({np.int64(7): 1}, {7: 1}),
        ({1 << 64: 1}, {str(1 << 64): 1}),
        (Point(1, (2, ())), {"x": 1, "y": [2, ()]}),
        (Plain(1, Nothing()), [1, None]),
        (nnx.State({"a": nnx.Param(1.0)}), {"a": {"value": 1.0}}),
        (3, 3),
        (None, None),
        ({}, {}),
        ((), ()),
        (Nothing(), None),
    ],
)
def test_build_without_target(original, want):
    flat = tree.flatten(original)
    got = tree.build(through_json(flat.skeleton), values_of(flat))
    assert got == want
    assert repr(got) == repr(want)  # == takes 1, 1.0 and True for the same


def test_build_keeps_the_order_of_ordered_dict():
    flat = tree.flatten(collections.OrderedDict(b=1, a=2))
    assert list(tree.build(flat.skeleton, [1, 2])) == ["b", "a"]


def test_build_counts_values():
    with pytest.raises(ValueError, match="expected 2 values, one per leaf; got 1"):
        tree.build(tree.flatten([1, 2]).skeleton, [1])


# --- names -----------------------------------------------------------------------------------

part = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.text("/~e01", max_size=4)


@given(st.lists(part, max_size=5).map(tuple))
def test_split_undoes_join(parts):
    assert tree.split_name(tree.join_name(parts)) == parts


@given(st.text("/~e01a", max_size=8))
def test_a_name_has_one_spelling(text):
    try:
        parts = tree.split_name(text)
    except CorruptDataError:
        assert re.search("//|^/|/$|~(?![01e])|[^/]~e|~e[^/]", text)
    else:
        assert tree.join_name(parts) == text


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ((), ""),
        (("",), "~e"),
        (("params", "Dense_0", "kernel"), "params/Dense_0/kernel"),
        (("a/b", "", "~"), "a~1b/~e/~0"),
    ],
)
def test_names_as_documented(parts, name):
    assert tree.join_name(parts) == name
    assert tree.split_name(name) == parts


@pytest.mark.parametrize("name", ["/", "a//b", "a/", "~", "~2", "a~e", "a~"])
def test_other_names_are_refused(name):
    with pytest.raises(CorruptDataError, match="leaf name"):
        tree.split_name(name)


def test_attributes_and_keys_give_the_same_names():
    by_attribute = tree.flatten(TRAIN_STATE).skeleton.names
    assert "opt_state/1/0/mu/Dense_0/kernel" in by_attribute
    as_dict = tree.build(tree.flatten(TRAIN_STATE).skeleton, values_of(tree.flatten(TRAIN_STATE)))
    assert sorted(tree.flatten(as_dict).skeleton.names) == sorted(by_attribute)


keys = part | st.integers()
scalars = st.integers() | st.floats(allow_nan=False) | st.booleans() | part | st.binary(max_size=3)


def containers(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(part, children, max_size=3),
        st.dictionaries(st.integers(-5, 5), children, max_size=3),
        st.dictionaries(part, children, max_size=3).map(FrozenDict),
        st.tuples(children, children).map(lambda c: Point(*c)),
        st.tuples(children, children).map(lambda c: Registered(*c)),
        st.tuples(children, children).map(lambda c: Plain(*c)),
        st.just(optax.EmptyState()),
    )


trees = st.recursive(scalars | st.none(), containers, max_leaves=12)


@settings(deadline=None)
@given(trees)
def test_any_nesting_round_trips(original):
    flat = tree.flatten(original)
    skeleton = through_json(flat.skeleton, len(flat.leaves))
    stored = json.loads(json.dumps([tree.scalar_to_json(v) for v in values_of(flat)]))
    loaded = [tree.scalar_from_json(s) for s in stored]
    assert_same_tree(tree.build_like(original, skeleton, lambda _, i: loaded[i]), original)
    # What comes back without a target has the same leaves by name, so it is a target too.
    without = tree.build(skeleton, loaded)
    again = tree.build_like(without, skeleton, lambda _, i: loaded[i])
    assert_same_tree(again, without)
    assert {*tree.flatten(without).skeleton.names} == {*skeleton.names}


# --- leaves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "spec"),
    [
        (A, "jax", tree.ArraySpec((3,), "float32")),
        (jnp.ones((2, 0), "bfloat16"), "jax", tree.ArraySpec((2, 0), "bfloat16")),
        (jnp.asarray(2.0), "jax", tree.ArraySpec((), "float32", weak_type=True)),
        (B, "numpy", tree.ArraySpec((2, 2), "float32")),
        (np.zeros(2, ">i2"), "numpy", tree.ArraySpec((2,), "int16")),
        (np.zeros(2, "int4"), "numpy", tree.ArraySpec((2,), "int4")),
        (np.zeros(2, "uint2"), "numpy", tree.ArraySpec((2,), "uint2")),
        (np.float64(3), "numpy", tree.ArraySpec((), "float64")),
        (np.bool_(True), "numpy", tree.ArraySpec((), "bool")),
        (ml_dtypes.bfloat16(1), "numpy", tree.ArraySpec((), "bfloat16")),
        (jax.random.key(0), "key", tree.ArraySpec((), "uint32", impl="threefry2x32")),
        (jax.random.key(0, impl="rbg"), "key", tree.ArraySpec((), "uint32", impl="rbg")),
        (jax.random.PRNGKey(0), "jax", tree.ArraySpec((2,), "uint32")),
        (True, "bool", None),
        (3, "int", None),
        (0.5, "float", None),
        (1j, "complex", None),
        ("x", "str", None),
        (b"x", "bytes", None),
    ],
)
def test_kinds(value, kind, spec):
    (leaf,) = tree.flatten({"a": value}).leaves
    assert (leaf.name, leaf.kind, leaf.spec) == ("a", kind, spec)
    assert (leaf.kind in tree.ARRAY_KINDS) == (spec is not None)


def test_numpy_scalars_become_arrays():
    (leaf,) = tree.flatten(np.float32(3)).leaves
    assert type(leaf.value) is np.ndarray
    assert leaf.value == np.float32(3)


def test_array_of_a_key_is_its_data():
    key_leaf, array_leaf, int_leaf = tree.flatten([jax.random.key(7), B, 3]).leaves
    np.testing.assert_array_equal(tree.array_of(key_leaf), jax.random.PRNGKey(7))
    assert tree.array_of(array_leaf) is B
    with pytest.raises(TypeError, match="'2' of kind 'int' holds no array"):
        tree.array_of(int_leaf)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array(["a"], object), "dtype is object; store each object as a leaf of its own"),
        (np.array(["a"]), "dtype is <U1; store each string"),
        (np.zeros(2, "S3"), "or its bytes as uint8"),
        (np.zeros(2, "M8[s]"), "dtype is datetime64.s.; store value.view"),
        (np.zeros(2, [("x", "f4")]), "store each field as a leaf of its own"),
        (np.str_("a"), "dtype is <U1"),
        (np.ma.masked_array([1, 2], [0, 1]), "MaskedArray.*np.asarray"),
        (len, "builtin_function_or_method.*leave it out"),
        (object(), "builtins.object.*register its class"),
        (Level.LOW, "Level.*Python scalar"),
        (np.float32, "builtins.type.*convert it"),
        (..., "ellipsis.*leave it out"),
        ({1, 2}, "builtins.set"),
        ("\ud800", "lone surrogate"),
        (jax.ShapeDtypeStruct((2,), "float32"), "ShapeDtypeStruct.*has a shape but no data"),
    ],
)
def test_unsupported_leaves_are_named(value, message):
    with pytest.raises(UnsupportedLeafError, match=f"leaf 'm/a~1b' is a .*{message}"):
        tree.flatten({"m": {"a/b": value}})


@pytest.mark.skipif(np.dtype("longdouble") == np.float64, reason="no wide float here")
def test_wide_floats_are_refused():
    with pytest.raises(UnsupportedLeafError, match="convert it to a dtype that JAX has"):
        tree.flatten(np.longdouble(1))


def test_tracers_are_refused():
    with pytest.raises(UnsupportedLeafError, match=r"leaf 'x' .* outside jit, grad and vmap"):
        jax.jit(lambda x: len(tree.flatten({"x": x}).leaves))(A)


def test_keys_that_are_no_text_are_refused():
    with pytest.raises(UnsupportedLeafError, match=r"the str key '\\ud800' in 'a' cannot"):
        tree.flatten({"a": {"\ud800": 1}})
    with pytest.raises(UnsupportedLeafError, match=r"the int key .* use another key"):
        tree.flatten({1 << 20000: 1})


@pytest.mark.parametrize("shape", ["chain", "loop"])
def test_too_deep_is_refused(shape):
    deep = [] if shape == "loop" else 1
    if shape == "loop":
        deep.append(deep)
    else:
        for _ in range(100_000):
            deep = {"k": deep}
    with pytest.raises(UnsupportedLeafError, match="nested more than 256 deep"):
        tree.flatten(deep)


@pytest.mark.parametrize(
    ("original", "message"),
    [
        (
            {"m": collections.OrderedDict([(1, A), ("1", B)])},
            "share the name 'm/1': the int key 1 and the str key '1' of 'm'; rename",
        ),
        # No leaf would be lost here, but build() could not keep both.
        (collections.OrderedDict([(True, A), ("True", None)]), "the bool key True and the str"),
    ],
)
def test_equal_names_are_refused(original, message):
    with pytest.raises(TreeMismatchError, match=message):
        tree.flatten(original)


def test_unsortable_keys_are_refused_with_their_place():
    with pytest.raises(TreeMismatchError, match=r"the dict at 'm/0': .*keys of a dict must all"):
        tree.flatten({"m": [{1: A, "1": B}]})


# --- roles -----------------------------------------------------------------------------------


def roles(value):
    return {leaf.name: leaf.role for leaf in tree.flatten(value).leaves}


def test_roles_of_a_train_state():
    assert roles(TRAIN_STATE) == {
        "step": "step",
        "params/Dense_0/bias": "param",
        "params/Dense_0/kernel": "param",
        "opt_state/1/0/count": "count",
        "opt_state/1/0/mu/Dense_0/bias": "mu",
        "opt_state/1/0/mu/Dense_0/kernel": "mu",
        "opt_state/1/0/nu/Dense_0/bias": "nu",
        "opt_state/1/0/nu/Dense_0/kernel": "nu",
    }


def test_roles_of_optax_states_without_a_telling_name():
    # A parameter called "mu" (a VAE's) must not be taken for the optimizer's.
    state = optax.MultiSteps(optax.adam(1e-3), 2).init({"mu": A, "nu": A})
    got = roles({"mine": {"mu": state}, "mu": A})
    assert got["mu"] == "param"
    assert got["mine/mu/acc_grads/nu"] == "acc_grads"
    assert got["mine/mu/inner_opt_state/0/mu/nu"] == "mu"
    assert got["mine/mu/inner_opt_state/0/nu/mu"] == "nu"
    assert got["mine/mu/mini_step"] == "optimizer"


def test_roles_of_nnx():
    got = roles(NNX_STATE)
    assert got["linear/kernel/value"] == got["lora/value"] == got["own/value"] == "param"
    assert got["norm/mean/value"] == "batch_stats"
    assert got["norm/scale/value"] == "param"
    assert got["drop/rngs/key/value"] == got["drop/rngs/count/value"] == "rng"
    got = roles({"whatever": NNX_OPTIMIZER})
    assert got["whatever/opt_state/0/mu/linear/kernel/value"] == "mu"
    assert got["whatever/step/value"] == "optimizer"
    assert roles(NNX_OPTIMIZER["opt_state"])["0/nu/norm/bias/value"] == "nu"


@pytest.mark.parametrize(
    ("original", "role"),
    [
        ({"batch_stats": {"mean": A}}, "batch_stats"),
        ({"ema": A}, "ema"),
        ({"params": {"ema": A}}, "param"),
        ({"c": jnp.ones(2, "complex64")}, "param"),
        ({"low": jnp.ones(2, "float8_e5m2")}, "param"),
        ({"ids": np.arange(3)}, "other"),
        ({"lr": 0.1}, "other"),
        ({"step": 3}, "step"),
        ({"step": jnp.ones(2)}, "param"),
        ({"k": jax.random.key(0)}, "rng"),
        ({"opt_state": {"k": jax.random.key(0)}}, "rng"),
        ({"opt": {"0": {"trace": {"w": A}}}}, "trace"),
        ({"optimizer": {"0": {"sum_of_squares": {"w": A}}}}, "nu"),
        ({"optimizer": {"0": {"momenta": {"w": A}}}}, "optimizer"),
        ({"adopt": {"w": A}}, "param"),
    ],
)
def test_role(original, role):
    assert [*roles(original).values()] == [role]


# --- targets ---------------------------------------------------------------------------------


def restored(saved, target, **kwargs):
    flat = tree.flatten(saved)
    skeleton = through_json(flat.skeleton)
    return tree.build_like(target, skeleton, lambda _, i: flat.leaves[i].value, **kwargs)


class Metadata:
    """Like Orbax's array metadata: no array, but it knows the shape and the dtype."""

    shape = (3,)
    dtype = np.dtype("float32")


def test_abstract_targets():
    abstract_key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    target = {"a": Metadata(), "k": abstract_key, "s": jax.ShapeDtypeStruct((2, 2), "bfloat16")}
    saved = {"a": A, "k": jax.random.key(0, impl="rbg"), "s": B}
    seen = {}

    def getter(leaf, index):
        seen[leaf.name] = (leaf.kind, leaf.spec)
        return index

    got = tree.build_like(target, tree.flatten(saved).skeleton, getter)
    assert got == {"a": 0, "k": 1, "s": 2}
    assert seen == {
        "a": ("abstract", tree.ArraySpec((3,), "float32")),
        "k": ("abstract", tree.ArraySpec((), "uint32", impl="rbg")),
        "s": ("abstract", tree.ArraySpec((2, 2), "bfloat16")),
    }
    assert tree.flatten(target, target=True).leaves[1].role == "rng"


def test_abstract_train_state():
    abstract = jax.eval_shape(lambda: TRAIN_STATE)
    got = restored(TRAIN_STATE, abstract)
    assert jax.tree.structure(got) == jax.tree.structure(TRAIN_STATE)
    assert got.params["Dense_0"]["kernel"] is A


@pytest.mark.parametrize(
    "target", [np.zeros(2, object), len, {1, 2}, type("T", (), {"shape": "ab", "dtype": 3})()]
)
def test_targets_of_unknown_type_are_refused(target):
    with pytest.raises(UnsupportedLeafError, match="leaf 'a' is a"):
        tree.match({"a": target}, [("a",)])


@pytest.mark.parametrize(
    ("saved", "target", "want"),
    [
        ([1, 2], {"0": 0, "1": 0}, {"0": 1, "1": 2}),
        ({0: 1, 1: 2}, (0, 0), (1, 2)),
        (Point(1, 2), {"y": 0, "x": 0}, {"x": 1, "y": 2}),
        ({"x": 1, "y": 2}, Point(0, 0), Point(1, 2)),
        (collections.OrderedDict(b=1, a=2), {"a": 0, "b": 0}, {"a": 2, "b": 1}),
        # Empty nodes hold no data, wherever they are.
        ({"a": 1}, {"a": 0, "n": None, "e": {}, "o": optax.EmptyState()}, None),
        ({"a": 1, "n": None, "e": (), "o": optax.EmptyState()}, {"a": 0}, {"a": 1}),
        ({"a": 1, "n": None}, {"a": 0, "n": []}, {"a": 1, "n": []}),
        # None, an empty node or ... in a leaf's place leaves it out, as in Orbax.
        ({"a": 1, "n": 2}, {"a": 0, "n": None}, {"a": 1, "n": None}),
        ({"a": 1, "n": 2}, {"a": 0, "n": optax.MaskedNode()}, {"a": 1, "n": optax.MaskedNode()}),
        ({"a": 1, "n": 2}, {"a": ..., "n": 0}, {"a": ..., "n": 2}),
    ],
)
def test_containers_may_differ(saved, target, want):
    got = restored(saved, target)
    assert jax.tree.structure(got) == jax.tree.structure(target)
    assert got == (target | {"a": 1} if want is None else want)


def test_pure_dict_and_nnx_state_are_interchangeable():
    pure = nnx.to_pure_dict(NNX_STATE)
    assert_same_tree(restored(pure, NNX_STATE), NNX_STATE)
    assert_same_tree(restored(NNX_STATE, pure), pure)
    assert restored({"a": {"raw_value": 1}}, {"a": {"value": 0}}) == {"a": {"value": 1}}


def test_exact_names_go_before_variables():
    saved = {"a": {"value": 1, "raw_value": 2}}
    assert restored(saved, {"a": {"raw_value": 0, "value": 0}}) == saved
    with pytest.raises(TreeMismatchError, match=r"1 leaf of the target missing.*\n  'a'"):
        restored(saved, {"a": 0})
    with pytest.raises(TreeMismatchError, match="2 leaves of the target missing"):
        restored({"a": 1}, saved)


def test_missing_leaves():
    with pytest.raises(TreeMismatchError) as err:
        restored(
            {"params": {"Dense_0": {"kernel": 1, "bias": 1}}, "n": None},
            {"params": {"Dense_1": {"kernel": 1}, "Dense_0": {"bias": 1}}, "n": 1},
        )
    assert str(err.value).splitlines() == [
        "the checkpoint and the target do not have the same leaves.",
        "2 leaves of the target missing from the checkpoint:",
        "  'n' (saved as None or as an empty container)",
        "  'params/Dense_1/kernel' (nearest saved: 'params/Dense_0/kernel')",
        "1 leaf of the checkpoint missing from the target:",
        "  'params/Dense_0/kernel' (nearest in the target: 'params/Dense_1/kernel')",
        "Build the target with the model and optimizer that were saved, or restore without a "
        "target and move the leaves by hand.",
    ]


def test_extra_leaves_need_partial():
    saved = {"a": 1, **{f"x{i:02}": i for i in range(30)}}
    with pytest.raises(TreeMismatchError) as err:
        restored(saved, {"a": 0})
    message = str(err.value)
    assert "30 leaves (the first 10 shown) of the checkpoint missing from the target" in message
    assert "'x09'" in message
    assert "'x10'" not in message
    assert "partial=True" in message
    assert restored(saved, {"a": 0}, partial=True) == {"a": 1}
    with pytest.raises(TreeMismatchError, match="1 leaf of the target missing"):
        restored(saved, {"b": 0}, partial=True)


@pytest.mark.parametrize("target", [{"a": 0, "n": None}, {"a": 0, "n": ...}, {"a": 0, "n": {}}])
def test_skipped_leaves_are_reported(target):
    matched = tree.match(target, [("n",), ("a",)])
    assert [(p.target.name, p.saved) for p in matched.pairs] == [("a", 1)]
    assert matched.skipped == (0,)
    assert matched.rebuild([5]) == target | {"a": 5}
    with pytest.raises(ValueError, match="expected 1 values, one per pair; got 2"):
        matched.rebuild([5, 6])


def test_none_stands_for_one_leaf_not_for_a_subtree():
    with pytest.raises(TreeMismatchError, match="'n/x'"):
        restored({"a": 1, "n": {"x": 2}}, {"a": 0, "n": None})


def test_a_placeholder_must_have_been_saved():
    with pytest.raises(TreeMismatchError, match=r"1 leaf of the target missing.*\n  'n'"):
        restored({"a": 1}, {"a": 0, "n": ...})


def test_suggestions_stay_quick_and_small_for_huge_trees():
    saved = [(f"layer{i}", "w" * 2000 if i % 2 else "kernel") for i in range(50_000)]
    with pytest.raises(TreeMismatchError, match="nearest saved: 'layer4/kernel'"):
        tree.match({"layer4": {"kernels": 0}}, saved, partial=True)


def test_check_shape():
    tree.check_shape("w", (2, 3), [2, 3])
    with pytest.raises(
        TreeMismatchError, match=r"leaf 'w' was saved with shape \(2, 3\).*has shape \(3, 2\)"
    ):
        tree.check_shape("w", (2, 3), (3, 2))


# --- hostile skeletons -----------------------------------------------------------------------


def nested(depth, kind="list"):
    obj = 0
    for _ in range(depth):
        obj = [kind, ["k"], obj] if kind == "dict" else [kind, obj]
    return obj


def wide_and_deep():
    """Few bytes that spell very long names: one long key above many leaves."""
    return ["dict", ["k" * 100_000], ["list", *range(1000)]]


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ("x", "at '' expected an index, null or a list"),
        (1.0, "found a float"),
        (True, "found a bool"),
        ({}, "found a dict"),
        ([], "found a list"),
        (["set", 0], "expected an index, null or a list"),
        ([["list"], 0], "expected an index, null or a list"),
        (["list", "0"], "at '0' expected"),
        (["list", 1], "leaf '0' has index 1, expected 0 <= index < 1"),
        (["list", -1], "index -1"),
        (["list", 10**30], "index of more than 64 bits"),
        (["list", 0, ["list", 0]], "'0' and '1/0' both claim leaf 0"),
        (["list", 10**30, 10**30], "both claim leaf of more than 64 bits"),
        (["dict"], "'' has no list of keys"),
        (["dict", 0], "has no list of keys"),
        (["dict", ["a"]], "1 keys and 0 children"),
        (["dict", [], 0], "0 keys and 1 children"),
        (["dict", ["a", "a"], 0, 1], "same key twice"),
        (["dict", ["1", 1], 0, 1], "same key twice"),
        (["dict", [{"other": "True"}, "True"], None, 0], "same key twice"),
        (["dict", [1.5], 0], "a key that no dict node has, a float"),
        (["dict", [True], 0], "a bool"),
        (["dict", [None], 0], "a NoneType"),
        (["dict", [1 << 63], 0], "a key that no dict node has, a int"),
        (["dict", [{"other": 3}], 0], "a dict"),
        (["dict", [{"other": "a", "b": 1}], 0], "a dict"),
        (["dict", ["\ud800"], 0], "a key that no dict node has, a str"),
        (["fields", [1], 0], "a key that no fields node has, a int"),
        (["fields", [{"other": "a"}], 0], "a key that no fields node has"),
        (nested(257), "nested more than 256 deep"),
        (nested(100_000), "nested more than 256 deep"),
        (nested(100_000, "dict"), "nested more than 256 deep"),
        (wide_and_deep(), "leaf names pass 67108864 characters"),
    ],
)
def test_hostile_skeletons(obj, message):
    with pytest.raises(CorruptDataError, match="skeleton: .*" + message):
        tree.validate_skeleton(obj)


def test_skeleton_knows_its_number_of_leaves():
    assert tree.validate_skeleton(["list", 1, 0], 2).paths == (("1",), ("0",))
    with pytest.raises(CorruptDataError, match="it has 2 leaves, the file's index has 3"):
        tree.validate_skeleton(["list", 1, 0], 3)
    with pytest.raises(CorruptDataError, match="has index 1, expected 0 <= index < 1"):
        tree.validate_skeleton(["list", 1, 0], 1)


def test_deepest_skeleton_is_read():
    assert tree.validate_skeleton(nested(256)).names == ("/".join("0" * 256),)


def test_the_deepest_tree_leaves_room_on_the_stack():
    """Notebooks and trainers call from some hundred frames down; Python allows 1000 in all."""

    def from_below(frames):
        if frames:
            return from_below(frames - 1)
        flat = tree.flatten(OWN["deep"])
        skeleton = through_json(flat.skeleton)
        return tree.build(skeleton, []), tree.build_like(OWN["deep"], skeleton, getter=None)

    assert from_below(300) == (OWN["deep"], OWN["deep"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1) | st.floats() | st.sampled_from("abk"),
    lambda c: (
        st.lists(c, max_size=3)
        | st.dictionaries(st.sampled_from(["other", "x"]), c, max_size=2)
        | st.tuples(st.sampled_from(["dict", "fields"]), st.lists(c, max_size=2), c).map(list)
        | st.tuples(st.sampled_from(["list", "tuple"]), c, c).map(list)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(json_values)
def test_a_skeleton_is_refused_or_read_as_it_is(obj):
    try:
        skeleton = tree.validate_skeleton(obj)
    except CorruptDataError:
        return
    assert tree.to_json_skeleton(skeleton) == obj
    assert len({*skeleton.names}) == len(skeleton.names)
    # Not one value is lost on the way into a tree.
    indices = list(range(len(skeleton.names)))
    assert sorted(jax.tree.leaves(tree.build(skeleton, indices))) == indices


def test_skeleton_json_as_documented():
    original = {"b": Point(1, None), "a": [(), {(2, 3): {}}, (2,)], "c": {7: optax.EmptyState()}}
    assert tree.to_json_skeleton(tree.flatten(original).skeleton) == [
        "dict",
        ["a", "b", "c"],
        ["list", ["tuple"], ["dict", [{"other": "(2, 3)"}], ["dict", []]], ["tuple", 0]],
        ["fields", ["x", "y"], 1, None],
        ["dict", [7], ["fields", []]],
    ]


# --- Python scalars --------------------------------------------------------------------------


@given(
    st.booleans()
    | st.integers()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
def test_scalars_come_back_exactly(value):
    text = json.dumps(tree.scalar_to_json(value), allow_nan=False)
    got = tree.scalar_from_json(json.loads(text))
    assert type(got) is type(value)
    assert repr(got) == repr(value)


@pytest.mark.parametrize(
    "value", [1 << 100_000, -(1 << 100_000), 10**4299, -(10**4400)], ids=["2", "-2", "10", "-10"]
)
def test_ints_beyond_pythons_digit_limit(value):
    got = tree.scalar_from_json(json.loads(json.dumps(tree.scalar_to_json(value))))
    assert (got - value).bit_length() == 0


@pytest.mark.parametrize(
    ("value", "obj"),
    [
        (True, {"bool": True}),
        (-3, {"int": "-3"}),
        (1 << 65, {"int": "0x20000000000000000"}),
        (-0.0, {"float": "-0.0"}),
        (-math.inf, {"float": "-inf"}),
        (math.nan, {"float": "nan"}),
        (complex(-0.0, 1e300), {"complex": ["-0.0", "1e+300"]}),
        ("é", {"str": "é"}),
        (b"\x00\xff", {"bytes": "AP8="}),
    ],
)
def test_scalar_json_as_documented(value, obj):
    assert tree.scalar_to_json(value) == obj


@pytest.mark.parametrize("value", [np.float64(1), Level.LOW, None, [1], "\ud800"])
def test_other_scalars_are_refused(value):
    with pytest.raises(UnsupportedLeafError, match=r"not a Python scalar|lone surrogate"):
        tree.scalar_to_json(value)


@pytest.mark.parametrize(
    "obj",
    [
        None,
        3,
        [],
        {},
        {"int": 3},
        {"int": ""},
        {"int": "1_0"},
        {"int": " 1"},
        {"int": "٣"},
        {"int": "9" * 5000},
        {"int": "0xg"},
        {"int": "1", "float": "1.0"},
        {"bool": 1},
        {"float": 1.5},
        {"float": "1e999"},
        {"float": "1"},
        {"float": "infinity"},
        {"float": "0x1p3"},
        {"float": "1" * 5000},
        {"complex": "1j"},
        {"complex": ["1.0"]},
        {"complex": ["1.0", 2]},
        {"str": 1},
        {"str": "\ud800"},
        {"bytes": "AP8"},
        {"bytes": "A*8="},
        {"bytes": "é"},
        {"bytes": 3},
        {"function": "len"},
        {"x" * 1000: ["y"] * 1000},
    ],
)
def test_hostile_scalars(obj):
    with pytest.raises(CorruptDataError, match=r"expected|not a stored Python scalar") as err:
        tree.scalar_from_json(obj)
    assert len(str(err.value)) < 200


# --- imports ---------------------------------------------------------------------------------


def test_neither_flax_nor_orbax_is_needed():
    package = pathlib.Path(tree.__file__).parent
    roots = set()
    for file in (package / "tree.py", *package.glob("_tree_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add((node.module or "").partition(".")[0])
    assert roots - {*sys.stdlib_module_names} == {"jax", "numpy", "lcjax"}

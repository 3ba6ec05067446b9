"""Roles of leaves and partners of parameters, on states made by real optimizers."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from optax import contrib

from lcjax import policy, roles, tree
from lcjax.errors import PresetError

PARAMS = {"a": np.ones((4, 4), np.float32), "b": np.ones(4, np.float32)}
NONE = roles.Partners(None, None, None)


def plain(state):
    """The same leaves in dicts and lists, as restored without a target."""
    flat = tree.flatten(state)
    return tree.build(flat.skeleton, [leaf.value for leaf in flat.leaves])


def found(state):
    return roles.found(tree.flatten(state).leaves)


def roles_of(state):
    return {leaf.name: leaf.role for leaf in found(state)}


def partners_of(state):
    return roles.partners(found(state))


# --- real optimizers ---------------------------------------------------------------------------


class Case(NamedTuple):
    """An optimizer and what its state holds.

    Attributes:
        make: the transformation.
        trees: fields with a leaf for each of the parameters a and b, and their role.
        single: the other leaves.
        mu: the field that holds the parameters' first moments.
        nu: the field that holds their second moments.
    """

    make: Any
    trees: dict[str, str]
    single: dict[str, str]
    mu: str | None = None
    nu: str | None = None


ADAM = {"0/mu": "mu", "0/nu": "nu"}
COUNT = {"0/count": "count"}


def adam_like(make, **more):
    return Case(make, ADAM | more, COUNT, "0/mu", "0/nu")


def inside(prefix, names):
    return {prefix + name: role for name, role in names.items()}


CASES = {
    name: adam_like(getattr(optax, name)(1e-3))
    for name in (
        "adam adamw adamax adamaxw nadam nadamw radam lamb adabelief yogi".split()  # noqa: SIM905
    )
} | {
    "amsgrad": adam_like(optax.amsgrad(1e-3), **{"0/nu_max": "nu_max"}),
    "acprop": adam_like(contrib.acprop(1e-3)),
    # One second moment per leaf, so that no parameter has its shape.
    "novograd": Case(optax.novograd(1e-3), ADAM, COUNT, "0/mu", None),
    "lion": Case(optax.lion(1e-3), {"0/mu": "mu"}, COUNT, "0/mu"),
    "sgd": Case(optax.sgd(0.1), {}, {}),
    "momentum": Case(optax.sgd(0.1, momentum=0.9), {"0/trace": "trace"}, {}, "0/trace"),
    "lars": Case(optax.lars(0.1), {"3/trace": "trace"}, {}, "3/trace"),
    "rmsprop": Case(optax.rmsprop(1e-3), {"0/nu": "nu"}, {}, None, "0/nu"),
    "rmsprop_momentum": Case(
        optax.rmsprop(1e-3, momentum=0.9),
        {"0/nu": "nu", "2/trace": "trace"},
        {},
        "2/trace",
        "0/nu",
    ),
    # The root of nu - mu^2 must exist, so this average is not one to lose precision.
    "rmsprop_centered": Case(
        optax.rmsprop(1e-3, centered=True, momentum=0.9),
        {"0/mu": "optimizer", "0/nu": "optimizer", "2/trace": "trace"},
        {},
        "2/trace",
        None,
    ),
    "adagrad": Case(optax.adagrad(1e-3), {"0/sum_of_squares": "nu"}, {}, None, "0/sum_of_squares"),
    "adadelta": Case(
        optax.adadelta(1e-3), {"1/e_g": "nu", "1/e_x": "optimizer"}, {}, None, "1/e_g"
    ),
    "adafactor": Case(
        optax.adafactor(1e-3, momentum=0.9),
        {"0/v_row": "nu", "0/v_col": "nu", "0/v": "nu", "4/ema": "mu"},
        COUNT | {"4/count": "count"},
        "4/ema",
        "0/v",
    ),
    # Here v averages differences of gradients, with signs.
    "adan": Case(
        optax.adan(1e-3),
        {"0/m": "mu", "0/n": "nu", "0/v": "optimizer", "0/g": "optimizer"},
        {"0/t": "optimizer"},
        "0/m",
        "0/n",
    ),
    "rprop": Case(
        optax.rprop(1e-3), {"0/step_sizes": "optimizer", "0/prev_updates": "optimizer"}, {}
    ),
    # The names are the other way round: "mu" holds one accumulator of squares per axis.
    "sm3": Case(
        optax.sm3(1e-3),
        {"0/nu": "mu"},
        {"0/mu/a/0": "nu", "0/mu/a/1": "nu", "0/mu/b/0": "nu"},
        "0/nu",
    ),
    # An estimate of the curvature's diagonal, with signs.
    "sophia": Case(
        contrib.sophia(1e-3),
        {"0/mu": "mu", "0/nu": "optimizer"},
        COUNT | {"0/hessian_fn_state/key": "rng"},
        "0/mu",
    ),
    "ademamix": Case(
        contrib.ademamix(1e-3),
        {"0/m1": "mu", "0/m2": "optimizer", "0/nu": "nu"},
        COUNT | {"0/count_m2": "optimizer"},
        "0/m1",
        "0/nu",
    ),
    "simplified_ademamix": Case(
        contrib.simplified_ademamix(1e-3),
        {"0/m": "mu", "0/n": "nu"},
        {"0/t": "optimizer"},
        "0/m",
        "0/n",
    ),
    "prodigy": Case(
        contrib.prodigy(),
        {
            "exp_avg": "mu",
            "exp_avg_sq": "nu",
            "grad_sum": "optimizer",
            "params0": "optimizer",
        },
        {"estim_lr": "optimizer", "numerator_weighted": "optimizer", "count": "count"},
        "exp_avg",
        "exp_avg_sq",
    ),
    "madgrad": Case(
        contrib.madgrad(1e-3),
        {"1/grad_sum_sq": "nu", "1/s": "optimizer", "1/x0": "optimizer"},
        {"1/count": "count"},
        None,
        "1/grad_sum_sq",
    ),
    "dog": Case(
        contrib.dog(),
        {"1/init_params": "optimizer"},
        {
            "1/is_init_step": "optimizer",
            "1/max_dist": "optimizer",
            "1/sum_sq_norm_grads": "optimizer",
        },
    ),
    "schedule_free": Case(
        contrib.schedule_free_adamw(1e-3),
        {"base_optimizer_state/0/nu": "nu", "z": "optimizer"},
        {
            "base_optimizer_state/0/count": "count",
            "b1": "optimizer",
            "max_lr": "optimizer",
            "step_count": "optimizer",
            "weight_sum": "optimizer",
        },
        None,
        "base_optimizer_state/0/nu",
    ),
    "mechanic": Case(
        contrib.mechanize(optax.adam(1e-3)),
        inside("base_optimizer_state/", ADAM) | {"x0": "optimizer"},
        inside("base_optimizer_state/", COUNT)
        | {"count": "count", **dict.fromkeys("rmvs", "optimizer")},
        "base_optimizer_state/0/mu",
        "base_optimizer_state/0/nu",
    ),
    "chain": Case(
        optax.chain(
            optax.clip(1.0),
            optax.scale_by_adam(),
            optax.scale_by_schedule(optax.constant_schedule(1e-3)),
        ),
        {"1/mu": "mu", "1/nu": "nu"},
        {"1/count": "count", "2/count": "count"},
        "1/mu",
        "1/nu",
    ),
    "named_chain": Case(
        optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.scale_by_adam())),
        {"adam/mu": "mu", "adam/nu": "nu"},
        {"adam/count": "count"},
        "adam/mu",
        "adam/nu",
    ),
    # Two first moments of one parameter: which of them is meant, nobody can tell.
    "two_first_moments": Case(
        optax.chain(optax.scale_by_adam(), optax.trace(0.9)),
        ADAM | {"1/trace": "trace"},
        COUNT,
        None,
        "0/nu",
    ),
    "ema": Case(
        optax.ema(0.9),
        {"ema": "ema"},
        {"count": "count"},
    ),
    "multi_steps": Case(
        optax.MultiSteps(optax.adam(1e-3), 2),
        inside("inner_opt_state/", ADAM) | {"acc_grads": "acc_grads"},
        inside("inner_opt_state/", COUNT)
        | {"mini_step": "optimizer", "gradient_step": "optimizer"},
        "inner_opt_state/0/mu",
        "inner_opt_state/0/nu",
    ),
    "apply_if_finite": Case(
        optax.apply_if_finite(optax.adam(1e-3), 3),
        inside("inner_state/", ADAM),
        inside("inner_state/", COUNT)
        | {
            "last_finite": "optimizer",
            "notfinite_count": "optimizer",
            "total_notfinite": "optimizer",
        },
        "inner_state/0/mu",
        "inner_state/0/nu",
    ),
    "inject_hyperparams": Case(
        optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
        {"inner_state/0/trace": "trace"},
        {
            "count": "count",
            "hyperparams/learning_rate": "optimizer",
            "hyperparams/momentum": "optimizer",
        },
        "inner_state/0/trace",
    ),
}


def expected_roles(case):
    state = {f"{field}/{p}": role for field, role in case.trees.items() for p in PARAMS}
    return inside("opt_state/", state | case.single) | dict.fromkeys(
        ("params/a", "params/b"), "param"
    )


@pytest.mark.parametrize("keep", [lambda state: state, plain], ids=["classes", "names_only"])
@pytest.mark.parametrize("name", CASES)
def test_real_optimizers(name, keep):
    case = CASES[name]
    state = keep({"params": PARAMS, "opt_state": case.make.init(PARAMS)})
    assert roles_of(state) == expected_roles(case)
    got = partners_of(state)
    for p in PARAMS:
        mu, nu = (f and f"opt_state/{f}/{p}" for f in (case.mu, case.nu))
        assert got[f"params/{p}"] == (None, mu, nu)
        if mu:
            assert got[mu] == (f"params/{p}", None, nu)
        if nu and name != "two_first_moments":
            assert got[nu] == (f"params/{p}", mu, None)


def test_two_first_moments_keep_what_is_certain():
    make = CASES["two_first_moments"].make
    got = partners_of({"params": PARAMS, "opt_state": make.init(PARAMS)})
    assert got["opt_state/0/nu/a"] == ("params/a", "opt_state/0/mu/a", None)
    assert got["opt_state/1/trace/a"] == ("params/a", None, "opt_state/0/nu/a")


def test_factored_second_moments_are_no_partners():
    # Rows and columns of a leaf that is not factored have one element, as the bias "b" here.
    params = {"a": np.ones((4, 8), np.float32), "b": np.ones(1, np.float32)}
    state = optax.adafactor(1e-3, min_dim_size_to_factor=2).init(params)
    got = partners_of({"params": params, "opt_state": state})
    assert got["params/b"] == (None, None, "opt_state/0/v/b")
    assert got["opt_state/0/v_row/b"] == got["opt_state/0/v_col/a"] == NONE
    assert got["params/a"] == NONE


def test_centered_rmsprop_that_counts_is_known_by_its_class():
    state = optax.scale_by_stddev(bias_correction=True).init(PARAMS)
    assert roles_of({"opt_state": (state,)})["opt_state/0/mu/a"] == "optimizer"
    assert roles_of({"opt_state": (state,)})["opt_state/0/nu/a"] == "optimizer"


@pytest.mark.parametrize("wrap", ["multi_steps", "inject", "chain", "masked", "multi_transform"])
def test_centered_rmsprop_that_counts_is_known_by_its_class_in_a_wrapper(wrap):
    def inner(learning_rate=1e-3):
        return optax.chain(optax.scale_by_stddev(bias_correction=True), optax.scale(-learning_rate))

    optimizer = {
        "multi_steps": lambda: optax.MultiSteps(inner(), 4),
        "inject": lambda: optax.inject_hyperparams(inner)(learning_rate=1e-3),
        "chain": lambda: optax.chain(optax.clip(1.0), inner()),
        "masked": lambda: optax.masked(inner(), {"a": True, "b": False}),
        "multi_transform": lambda: optax.multi_transform({"x": inner()}, {"a": "x", "b": "x"}),
    }[wrap]()
    held = roles_of({"opt_state": optimizer.init(PARAMS)})
    fields = {name: role for name, role in held.items() if {"mu", "nu"} & set(name.split("/"))}
    assert fields
    assert set(fields.values()) == {"optimizer"}


def test_the_moment_that_momo_multiplies_with_parameters_stays_exact():
    for optimizer in (contrib.momo(), contrib.momo_adam()):
        held = roles_of({"opt_state": optimizer.init(PARAMS)})
        assert {role for name, role in held.items() if "exp_avg/" in name} == {"optimizer"}
        second = {role for name, role in held.items() if "exp_avg_sq/" in name}
        assert second <= {"nu"}


def test_muon_masks_and_groups():
    state = {"params": PARAMS, "opt_state": contrib.muon(1e-3).init(PARAMS)}
    adam, muon = (f"opt_state/inner_states/{n}/inner_state/0/" for n in ("adam", "muon"))
    assert roles_of(state) == {
        adam + "count": "count",
        adam + "mu/b": "mu",
        adam + "nu/b": "nu",
        muon + "count": "count",
        muon + "mu/a": "mu",
        muon + "ns_coeffs": "optimizer",
        "params/a": "param",
        "params/b": "param",
    }
    assert roles_of(plain(state)) == roles_of(state)
    assert partners_of(state) == {
        "params/a": (None, muon + "mu/a", None),
        "params/b": (None, adam + "mu/b", adam + "nu/b"),
        muon + "mu/a": ("params/a", None, None),
        adam + "mu/b": ("params/b", None, adam + "nu/b"),
        adam + "nu/b": ("params/b", adam + "mu/b", None),
    }


def test_labels_of_groups_may_be_called_like_fields():
    make = optax.multi_transform(
        {"nu": optax.adam(1e-3), "count": optax.sgd(0.1, momentum=0.9)}, {"a": "nu", "b": "count"}
    )
    state = {"params": PARAMS, "opt_state": make.init(PARAMS)}
    assert roles_of(state)["opt_state/inner_states/nu/inner_state/0/mu/a"] == "mu"
    assert roles_of(state)["opt_state/inner_states/count/inner_state/0/trace/b"] == "trace"
    assert partners_of(state)["params/a"].nu == "opt_state/inner_states/nu/inner_state/0/nu/a"
    assert partners_of(state)["params/b"].mu.endswith("count/inner_state/0/trace/b")


def test_masked_leaves_have_no_partners():
    make = optax.masked(optax.adam(1e-3), {"a": True, "b": False})
    got = partners_of({"params": PARAMS, "opt_state": make.init(PARAMS)})
    assert got["params/a"] == (None, "opt_state/inner_state/0/mu/a", "opt_state/inner_state/0/nu/a")
    assert got["params/b"] == NONE


def test_flattened_state_pairs_its_moments():
    state = {"params": PARAMS, "opt_state": optax.flatten(optax.adam(1e-3)).init(PARAMS)}
    assert partners_of(state) == {
        "params/a": NONE,
        "params/b": NONE,
        "opt_state/0/mu": (None, None, "opt_state/0/nu"),
        "opt_state/0/nu": (None, "opt_state/0/mu", None),
    }


def test_lookahead():
    params = optax.LookaheadParams.init_synced(PARAMS)
    make = optax.lookahead(optax.adam(1e-3), 6, 0.5)
    state = {"params": params, "opt_state": make.init(params)}
    for kept in (state, plain(state)):
        got = roles_of(kept)
        assert (got["params/fast/a"], got["params/slow/a"]) == ("param", "ema")
        assert got["opt_state/steps_since_sync"] == "optimizer"
        mu, nu = (f"opt_state/fast_state/0/{n}/a" for n in ("mu", "nu"))
        assert partners_of(kept)["params/slow/a"] == ("params/fast/a", mu, nu)
        assert partners_of(kept)[mu] == ("params/fast/a", None, nu)


# --- train states and modules --------------------------------------------------------------------


class StatsState(TrainState):
    batch_stats: Any
    key: Any
    ema_params: Any
    ema_batch_stats: Any


def test_train_state_with_all_kinds():
    stats = {"norm": {"mean": np.ones(4), "var": np.ones(4)}}
    state = StatsState.create(
        apply_fn=None,
        params=PARAMS,
        tx=optax.adamw(1e-3),
        batch_stats=stats,
        key=jax.random.PRNGKey(0),
        ema_params=PARAMS,
        ema_batch_stats=stats,
    )
    want = {
        "step": "step",
        "params/a": "param",
        "params/b": "param",
        "opt_state/0/count": "count",
        "opt_state/0/mu/a": "mu",
        "opt_state/0/mu/b": "mu",
        "opt_state/0/nu/a": "nu",
        "opt_state/0/nu/b": "nu",
        "batch_stats/norm/mean": "batch_stats",
        "batch_stats/norm/var": "batch_stats",
        "key": "rng",
        "ema_params/a": "ema",
        "ema_params/b": "ema",
        "ema_batch_stats/norm/mean": "batch_stats",
        "ema_batch_stats/norm/var": "batch_stats",
    }
    assert roles_of(state) == roles_of(plain(state)) == want
    got = partners_of(state)
    assert got["ema_params/a"] == ("params/a", "opt_state/0/mu/a", "opt_state/0/nu/a")
    assert got["opt_state/0/mu/a"] == ("params/a", None, "opt_state/0/nu/a")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


NET_ROLES = {
    "lin/bias/value": "param",
    "lin/kernel/value": "param",
    "norm/bias/value": "param",
    "norm/mean/value": "batch_stats",
    "norm/scale/value": "param",
    "norm/var/value": "batch_stats",
    "drop/rngs/count/value": "rng",
    "drop/rngs/key/value": "rng",
}


@pytest.mark.parametrize("keep", [lambda state: state, plain], ids=["classes", "names_only"])
def test_nnx_model_and_optimizer(keep):
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
    state = keep({"model": nnx.state(net), "optimizer": nnx.state(optimizer)})
    got = roles_of(state)
    assert {n: r for n, r in got.items() if n.startswith("model/")} == inside("model/", NET_ROLES)
    params = [n for n, r in NET_ROLES.items() if r == "param"]
    want = {f"optimizer/opt_state/0/{m}/{n}": m for m in ("mu", "nu") for n in params}
    want |= {"optimizer/opt_state/0/count/value": "count", "optimizer/step/value": "optimizer"}
    assert {n: r for n, r in got.items() if n.startswith("optimizer/")} == want
    for name in params:
        mu, nu = (f"optimizer/opt_state/0/{m}/{name}" for m in ("mu", "nu"))
        assert partners_of(state)[f"model/{name}"] == (None, mu, nu)
        assert partners_of(state)[mu] == (f"model/{name}", None, nu)


@pytest.mark.parametrize("keep", [lambda state: state, plain], ids=["classes", "names_only"])
def test_nnx_optimizer_that_holds_the_model(keep):
    both = nnx.ModelAndOptimizer(Net(nnx.Rngs(0)), optax.sgd(0.1, momentum=0.9))
    state = keep({"optimizer": nnx.state(both)})
    got = roles_of(state)
    assert {n: r for n, r in got.items() if "/model/" in n} == inside("optimizer/model/", NET_ROLES)
    assert partners_of(state)["optimizer/model/lin/kernel/value"] == (
        None,
        "optimizer/opt_state/0/trace/lin/kernel/value",
        None,
    )


@pytest.mark.parametrize("side", ["params", "moments"])
def test_only_one_side_has_the_components_of_variables(side):
    weights = {"lin": {"kernel": np.ones(3)}, "own": np.ones(3)}
    variables = {"lin": {"kernel": {"value": np.ones(3)}}, "own": {"value": np.ones(3)}}
    params, moments = (variables, weights) if side == "params" else (weights, variables)
    state = {"model": params, "opt_state": optax.adam(1e-3).init(moments)}
    got = partners_of(state)
    one, two = ("/value", "") if side == "params" else ("", "/value")
    for name in ("lin/kernel", "own"):
        mu, nu = (f"opt_state/0/{m}/{name}{two}" for m in ("mu", "nu"))
        assert got[f"model/{name}{one}"] == (None, mu, nu)


def test_bare_array():
    params = np.ones(3)
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    assert partners_of(state) == {
        "params": (None, "opt_state/0/mu", "opt_state/0/nu"),
        "opt_state/0/mu": ("params", None, "opt_state/0/nu"),
        "opt_state/0/nu": ("params", "opt_state/0/mu", None),
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    mu: Any


def test_dataclasses_and_parameters_called_like_fields():
    params = {"count": Layer(np.ones((2, 2)), np.ones(2)), "opt": np.ones(3)}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    for kept in (state, plain(state)):
        assert roles_of(kept) == {
            "opt_state/0/count": "count",
            **{
                f"opt_state/0/{m}/{p}": m
                for m in ("mu", "nu")
                for p in ("count/weight", "count/mu", "opt")
            },
            "params/count/weight": "param",
            "params/count/mu": "param",
            "params/opt": "param",
        }
        assert partners_of(kept)["params/count/mu"].mu == "opt_state/0/mu/count/mu"
        assert partners_of(kept)["params/count/mu"].nu == "opt_state/0/nu/count/mu"


def test_prefix_inside_the_state():
    # As MaxText has it: collections below the field; and a prefix that only one side has.
    weights = {"decoder": PARAMS}
    for below in ({"params": weights}, {"other": weights}):
        state = {
            "state": {
                "params": {"params": weights},
                "opt_state": {"0": {"mu": below, "nu": below, "count": np.int32(1)}},
            }
        }
        name = next(iter(below))
        assert partners_of(state)["state/params/params/decoder/a"] == (
            None,
            f"state/opt_state/0/mu/{name}/decoder/a",
            f"state/opt_state/0/nu/{name}/decoder/a",
        )


# --- several models ------------------------------------------------------------------------------


def test_two_train_states():
    state = {
        name: TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3))
        for name in ("gen", "disc")
    }
    for name in state:
        mu, nu = (f"{name}/opt_state/0/{m}/a" for m in ("mu", "nu"))
        assert partners_of(state)[f"{name}/params/a"] == (None, mu, nu)
        assert partners_of(state)[mu] == (f"{name}/params/a", None, nu)


def test_actor_critic_and_targets():
    init = optax.adam(1e-3).init
    state = {
        "actor": PARAMS,
        "critic": PARAMS,
        "target_actor": PARAMS,
        "target_critic": PARAMS,
        "actor_opt": init(PARAMS),
        "critic_opt": init(PARAMS),
    }
    got = partners_of(plain(state))
    for name in ("actor", "critic"):
        mu, nu = (f"{name}_opt/0/{m}/b" for m in ("mu", "nu"))
        assert roles_of(plain(state))[f"target_{name}/b"] == "ema"
        assert got[f"{name}/b"] == (None, mu, nu)
        assert got[f"target_{name}/b"] == (f"{name}/b", mu, nu)


def test_a_target_needs_a_twin_and_params_hide_names():
    assert roles_of({"target": PARAMS, "params": {"a": np.ones(2)}})["target/a"] == "param"
    hidden = {"params": {"ema": PARAMS, "target": PARAMS, "online": PARAMS}}
    assert {*roles_of(hidden).values()} == {"param"}
    # Two pathways of one network that differ in any leaf are no fast and slow weights.
    assert roles_of({"slow": PARAMS, "fast": {"a": PARAMS["a"]}})["slow/a"] == "param"


@pytest.mark.parametrize("layers", [3, 40])
def test_an_optimizer_per_layer(layers):
    moments = {"0": {"mu": PARAMS, "nu": PARAMS, "count": np.int32(0)}}
    state = {f"l{i}": {"weights": PARAMS, "opt_state": moments} for i in range(layers)}
    got = partners_of(state)
    for i in range(layers):
        mu, nu = (f"l{i}/opt_state/0/{m}/a" for m in ("mu", "nu"))
        assert got[f"l{i}/weights/a"] == (None, mu, nu)
        assert got[mu] == (f"l{i}/weights/a", None, nu)


@pytest.mark.parametrize("models", [2, 40])
def test_models_that_cannot_be_told_apart(models):
    state = {f"m{i}": PARAMS for i in range(models)} | {"opt_state": optax.adam(1e-3).init(PARAMS)}
    got = partners_of(state)
    assert got["m0/a"] == got["m1/b"] == NONE
    assert got["opt_state/0/mu/a"] == (None, None, "opt_state/0/nu/a")


def test_the_other_leaves_decide_between_models():
    # "a" alone would fit both; only one model has "c" too.
    more = PARAMS | {"c": np.ones(5)}
    state = {"x": PARAMS, "y": more, "opt_state": optax.adam(1e-3).init(more)}
    got = partners_of(state)
    assert got["y/a"].mu == "opt_state/0/mu/a"
    assert got["x/a"] == NONE


def test_shapes_must_agree():
    state = {"params": {"a": np.ones(3)}, "opt_state": optax.adam(1e-3).init({"a": np.ones(4)})}
    assert partners_of(state) == {
        "params/a": NONE,
        "opt_state/0/mu/a": (None, None, "opt_state/0/nu/a"),
        "opt_state/0/nu/a": (None, "opt_state/0/mu/a", None),
    }


def test_moments_of_parameters_that_are_not_in_the_item():
    # Layer l0 must not stand in for l1, though the path of its "kernel" ends alike.
    layers = {f"l{i}": {"kernel": np.ones(3)} for i in range(2)}
    state = {"params": {"l0": layers["l0"]}, "opt_state": optax.adam(1e-3).init(layers)}
    got = partners_of(state)
    assert got["params/l0/kernel"].mu == "opt_state/0/mu/l0/kernel"
    assert got["opt_state/0/mu/l1/kernel"] == (None, None, "opt_state/0/nu/l1/kernel")


def test_moments_that_claim_one_parameter_get_none():
    layers = {f"l{i}": {"kernel": np.ones(3)} for i in range(2)}
    state = {"params": {"head": {"kernel": np.ones(3)}}, "opt_state": {"0": {"nu": layers}}}
    got = partners_of(state)
    assert got["params/head/kernel"] == NONE
    assert got["opt_state/0/nu/l0/kernel"] == got["opt_state/0/nu/l1/kernel"] == NONE


def test_items_of_one_kind():
    assert partners_of({"w": PARAMS}) == {"w/a": NONE, "w/b": NONE}
    assert partners_of(plain(optax.adam(1e-3).init(PARAMS))) == {
        "0/mu/a": (None, None, "0/nu/a"),
        "0/mu/b": (None, None, "0/nu/b"),
        "0/nu/a": (None, "0/mu/a", None),
        "0/nu/b": (None, "0/mu/b", None),
    }
    # The moments of a chain lie in different states of it.
    chain = {"opt_state": optax.rmsprop(1e-3, momentum=0.9).init({"w": np.ones(3)})}
    assert partners_of(chain) == {
        "opt_state/0/nu/w": (None, "opt_state/2/trace/w", None),
        "opt_state/2/trace/w": (None, None, "opt_state/0/nu/w"),
    }


# --- names only ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["adam", "chain", "named_chain", "multi_steps", "apply_if_finite", "inject_hyperparams"]
)
def test_a_state_under_no_telling_name(name):
    case = CASES[name]
    state = plain({"mine": case.make.init(PARAMS), "w": PARAMS})
    want = {n.replace("opt_state/", "mine/", 1): r for n, r in expected_roles(case).items()}
    want = {n: r for n, r in want.items() if n.startswith("mine/")}
    got = {n: r for n, r in roles_of(state).items() if n.startswith("mine/")}
    # What the wrappers' flags are called is known only of some.
    flags = {n for n, r in want.items() if r == "optimizer"}
    assert {n: r for n, r in got.items() if n not in flags} == {
        n: r for n, r in want.items() if n not in flags
    }
    assert {got[n] for n in flags} <= {"optimizer", "other"}


def test_names_that_look_like_a_state_but_are_none():
    # A Gaussian's parameters; nothing counts here, or mu and nu do not hold the same.
    assert {*roles_of({"mu": PARAMS, "nu": PARAMS}).values()} == {"param"}
    odd = {"count": np.int32(1), "mu": PARAMS, "nu": {"a": PARAMS["a"]}}
    assert roles_of(odd)["mu/a"] == "param"


def test_statistics_without_classes():
    pair = {"mean": np.ones(3), "var": np.ones(3)}
    assert {*roles_of({"norm": pair}).values()} == {"batch_stats"}
    for other in (
        {"params": {"gauss": pair}},
        {"norm": {"mean": np.ones(3), "var": np.ones(4)}},
        {"norm": {"mean": np.ones(()), "var": np.ones(())}},
        {"norm": {"mean": np.ones(3)}},
    ):
        assert {*roles_of(other).values()} == {"param"}


def test_textbook_adam():
    state = {"params": PARAMS, "opt": {"m": PARAMS, "v": PARAMS, "t": 3}}
    assert partners_of(state)["params/a"] == (None, "opt/m/a", "opt/v/a")


WORDS = st.lists(st.sampled_from("model train x 7 mu count v".split()), max_size=3)  # noqa: SIM905


@settings(deadline=None, max_examples=40)
@given(WORDS, st.sampled_from([*CASES]), st.booleans())
def test_a_prefix_changes_nothing(prefix, name, lose_classes):
    state = {"params": PARAMS, "opt_state": CASES[name].make.init(PARAMS), "ema_params": PARAMS}
    state = plain(state) if lose_classes else state
    wrapped = state
    for part in reversed(prefix):
        wrapped = {part: wrapped}
    start = "".join(f"{part}/" for part in prefix)
    assert roles_of(wrapped) == inside(start, roles_of(state))
    assert partners_of(wrapped) == {
        start + leaf: tuple(name and start + name for name in trio)
        for leaf, trio in partners_of(state).items()
    }


names = st.sampled_from(["w", "b", "mu", "nu", "trace", "count", "ema", "value", "0", "opt"])
trees = st.recursive(
    st.integers(1, 2).map(np.ones),
    lambda below: st.dictionaries(names, below, min_size=1, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(names, trees, min_size=1, max_size=3), st.booleans())
def test_any_parameters_find_their_moments(params, lose_classes):
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    state = plain(state) if lose_classes else state
    got = partners_of(state)
    for leaf in tree.flatten(params).leaves:
        mu, nu = (f"opt_state/0/{m}/{leaf.name}" for m in ("mu", "nu"))
        assert roles_of(state)[f"params/{leaf.name}"] == "param"
        assert got[f"params/{leaf.name}"] == (None, mu, nu)
        assert got[mu] == (f"params/{leaf.name}", None, nu)
        assert got[nu] == (f"params/{leaf.name}", mu, None)


paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(tuple)


@settings(deadline=None, max_examples=100)
@given(st.sets(paths, min_size=1, max_size=12), paths)
def test_the_longest_common_end_decides(params, path):
    """Against comparing the moment with each parameter."""

    def leaf(parts, role):
        return dataclasses.replace(tree.flatten(np.ones(2)).leaves[0], parts=parts, role=role)

    def alike(one):
        return next((i for i in range(len(one)) if one[-i - 1 :] != path[-i - 1 :]), len(one))

    best = max(map(alike, params))
    fit = [p for p in params if alike(p) == best]
    moment = leaf(("z", *path), "mu")
    got = roles.partners([moment, *(leaf(p, "param") for p in params)])[moment.name].param
    if not best:
        assert got is None
    elif len(fit) == 1:
        assert got == tree.join_name(fit[0])
    else:
        assert got in (None, *map(tree.join_name, fit))


# --- stated --------------------------------------------------------------------------------------


def test_stated_roles():
    state = {"params": PARAMS, "velocity": PARAMS, "n": 3}
    leaves = tree.flatten(state).leaves
    patterns = [("velocity/b", "other"), ("VELOCITY*", "nu"), ("v*", "trace"), ("*a", "ema")]
    got = dict(zip([x.name for x in leaves], roles.stated(leaves, patterns), strict=True))
    assert got == {
        "n": "other",
        "params/a": "ema",
        "params/b": "param",
        "velocity/a": "trace",
        "velocity/b": "other",
    }


def test_stated_moments_find_their_parameters():
    leaves = tree.flatten({"params": PARAMS, "first": PARAMS, "second": {"deep": PARAMS}}).leaves
    stated = roles.stated(leaves, [("first*", "mu"), ("second*", "nu")])
    got = roles.partners(
        [dataclasses.replace(x, role=r) for x, r in zip(leaves, stated, strict=True)]
    )
    assert got["params/a"] == (None, "first/a", "second/deep/a")
    assert got["first/a"] == ("params/a", None, "second/deep/a")
    assert got["second/deep/a"] == ("params/a", "first/a", None)


def test_without_patterns_neighbours_still_count():
    leaves = tree.flatten({"params": PARAMS, "opt_state": optax.adan(1e-3).init(PARAMS)}).leaves
    assert dict(zip([x.name for x in leaves], roles.stated(leaves, []), strict=True)) == (
        expected_roles(CASES["adan"])
    )


def test_unknown_roles_are_refused():
    with pytest.raises(PresetError) as err:
        roles.stated((), [("a", "mu"), ("x*", "momentum")])
    assert str(err.value) == (
        "roles: 'x*' is given the unknown role 'momentum'; use one of param, ema, batch_stats, mu, "
        "trace, nu, nu_max, acc_grads, count, optimizer, step, rng, other"
    )


def test_every_role_is_in_the_table():
    listed = [line.split("``")[1] for line in roles.__doc__.splitlines() if line.startswith("``")]
    assert listed == [*roles.ROLES]


def test_plans_follow_partners():
    big = {"w": jnp.ones((16, 16))}
    leaves = tree.flatten({"params": big, "opt_state": optax.adam(1e-3).init(big)}).leaves
    plans = dict(
        zip(
            [x.name for x in leaves],
            policy.plans(policy.resolve("balanced"), leaves),
            strict=True,
        )
    )
    moment = plans["opt_state/0/mu/w"]
    assert (moment.kind, moment.param, moment.nu) == ("moment", "params/w", "opt_state/0/nu/w")
    assert (plans["params/w"].kind, plans["params/w"].nu) == ("step", "opt_state/0/nu/w")

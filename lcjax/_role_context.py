"""What the leaves around a leaf tell of its role, where its own name and classes do not suffice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from lcjax._tree_leaves import FIELD_ROLES, INNER_STATES, Leaf, field_at, stem, words
from lcjax._tree_names import Parts

# Parts of names for weights that follow others; "ema" needs no neighbour to be believed.
_FOLLOWS = frozenset({"target", "teacher", "average", "averaged", "avg", "polyak", "swa"})

_Roles: TypeAlias = list[str]
_Slots: TypeAlias = list[int | None]


def found(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """The leaves with the roles that take their neighbours to see.

    * Optimizer states restored into plain dicts and lists, under no telling name: a node with
      ``count``, ``mu`` and ``nu``, or one that holds another state as optax's wrappers do.
    * Fields that mean different things in different states. Where a lossy first or second moment
      could break training (SM3's ``nu`` is signed, Sophia's too; centered RMSProp takes the root
      of ``nu - mu^2``), the leaf is not called one.
    * Averages of parameters: beside ``params``, a ``target_params`` of the same leaves.
    * Statistics of normalization layers without their classes: a ``mean`` beside a ``var``.

    Args:
        leaves: of one tree, as `lcjax.tree.flatten` gives them.

    Returns:
        The leaves in the same order; only `role` and `slot` may differ.
    """
    places = [(leaf.role, leaf.slot) for leaf in leaves]
    roles = [role for role, _ in places]
    slots = [slot for _, slot in places]
    _nameless_states(leaves, roles, slots)
    _fields_in_context(leaves, roles, slots)
    _averages(leaves, roles)
    _statistics(leaves, roles)
    return tuple(
        leaf if place == (role, slot) else dataclasses.replace(leaf, role=role, slot=slot)
        for leaf, place, role, slot in zip(leaves, places, roles, slots, strict=True)
    )


def _shape(leaf: Leaf) -> tuple[int, ...] | None:
    return None if leaf.spec is None else leaf.spec.shape


# --- states whose classes and names are lost ---------------------------------------------------


def _nameless_states(leaves: Sequence[Leaf], roles: _Roles, slots: _Slots) -> None:
    free = [i for i, leaf in enumerate(leaves) if slots[i] is None and leaf.role != "rng"]
    states = _adam_like([leaves[i] for i in free])
    for leaf in (leaves[i] for i in free):
        states.update(leaf.parts[:k] for k, part in enumerate(leaf.parts) if part in INNER_STATES)
    for leaf, slot in zip(leaves, slots, strict=True):
        if slot is not None:
            inner = (k for k in range(slot) if leaf.parts[k] in INNER_STATES)
            states.update(leaf.parts[:k] for k in inner)
    chains = {state[:-1] for state in states if state and state[-1].isdigit()}
    if not states:
        return
    for i in free:
        parts = leaves[i].parts
        for k in range(len(parts)):
            if parts[k] not in FIELD_ROLES:
                continue
            in_chain = k and parts[k - 1].isdigit() and parts[: k - 1] in chains
            if parts[:k] in states or in_chain:
                slots[i] = field_at(parts, k)
                roles[i] = FIELD_ROLES[parts[k]]
                break


def _adam_like(leaves: Sequence[Leaf]) -> set[Parts]:
    """Nodes with an integer ``count`` and the same leaves in ``mu`` as in ``nu``."""
    counted = {
        stem(leaf.parts)[:-1]
        for leaf in leaves
        if stem(leaf.parts)[-1:] == ("count",)
        and leaf.role == "other"
        and _shape(leaf) in ((), None)
    }
    below: dict[tuple[Parts, str], set[Parts]] = {}
    for leaf in leaves if counted else ():
        for k, part in enumerate(leaf.parts):
            if part in ("mu", "nu") and leaf.parts[:k] in counted:
                below.setdefault((leaf.parts[:k], part), set()).add(leaf.parts[k + 1 :])
                break
    return {
        state
        for state in counted
        if (state, "mu") in below and below[state, "mu"] == below.get((state, "nu"))
    }


# --- fields ------------------------------------------------------------------------------------


def _fields_in_context(leaves: Sequence[Leaf], roles: _Roles, slots: _Slots) -> None:
    states: dict[Parts, dict[str, list[int]]] = {}
    for i, (leaf, slot) in enumerate(zip(leaves, slots, strict=True)):
        if slot is not None:
            held = states.setdefault(leaf.parts[:slot], {})
            held.setdefault(leaf.parts[slot], []).append(i)
    factored = {state[:-1] for state, fields in states.items() if "v_row" in fields}
    for state, fields in states.items():
        below = {
            name: {leaves[i].parts[(slots[i] or 0) + 1 :] for i in fields[name]} for name in fields
        }
        for name, role in _meanings(below, state[:-1] in factored).items():
            for i in fields[name]:
                # A key in a field, such as Hutchinson's, is still one.
                if roles[i] != "rng":
                    roles[i] = role


def _meanings(below: dict[str, set[Parts]], factored: bool) -> dict[str, str]:
    """What fields mean beside others: AdaFactor, Adan, MoMo, SM3, Sophia, centered RMSProp, ..."""
    fields = below.keys()
    out: dict[str, str] = {}
    if "v" in fields and "v_row" in fields:
        out["v"] = "nu"
    if fields >= {"m", "n", "t"}:
        out |= {"m": "mu", "n": "nu"}
    elif "m" in fields and below["m"] == below.get("v") and fields.isdisjoint(("r", "s", "g")):
        out |= {"m": "mu", "v": "nu"}  # Adam as textbooks write it
    if "hessian_fn_state" in fields and "nu" in fields:
        out["nu"] = "optimizer"
    if fields >= {"mu", "nu"} and "count" not in fields:
        one_per_axis = any(path[:-1] in below["nu"] and path[-1:] == ("0",) for path in below["mu"])
        out |= {"mu": "nu", "nu": "mu"} if one_per_axis else {"mu": "optimizer", "nu": "optimizer"}
    if fields >= {"exp_avg", "barf"}:
        out["exp_avg"] = "optimizer"  # MoMo's bound on the loss is made of its products
    if "ema" in fields and factored:
        out["ema"] = "mu"  # of updates; elsewhere the name stands for averages of parameters
    return out


# --- averages ----------------------------------------------------------------------------------


def follower_at(parts: Parts) -> int | None:
    """Position of the component that calls a leaf a follower of another, if a twin agrees."""
    for i, part in enumerate(parts):
        if part == "params":
            return None
        if not _FOLLOWS.isdisjoint(words(part)):
            return i
    return None


def live_name(part: str) -> str:
    """What the name of an average calls the live weights: ``critic`` of ``target_critic``.

    Empty where nothing is left.
    """
    return "_".join(word for word in words(part) if word not in _FOLLOWS and word != "ema")


def _averages(leaves: Sequence[Leaf], roles: _Roles) -> None:
    params = [i for i, role in enumerate(roles) if role == "param"]
    named = {i: k for i in params if (k := follower_at(leaves[i].parts)) is not None}
    if named:
        depths = {*named.values()}
        live = {
            (leaf.parts[:k], leaf.parts[k + 1 :], _shape(leaf))
            for leaf in (leaves[i] for i in params if i not in named)
            for k in depths
            if k < len(leaf.parts)
        }
        for i, k in named.items():
            parts = leaves[i].parts
            if (parts[:k], parts[k + 1 :], _shape(leaves[i])) in live:
                roles[i] = "ema"
    for i in _slow(leaves, params):
        roles[i] = "ema"


def _slow(leaves: Sequence[Leaf], params: Iterable[int]) -> list[int]:
    """Lookahead's slow weights: all that lies in ``slow`` lies in ``fast`` too, and no more."""
    nodes: dict[Parts, dict[str, dict[Parts, int]]] = {}
    for i in params:
        parts = leaves[i].parts
        for k, part in enumerate(parts):
            if part in ("slow", "fast"):
                node = nodes.setdefault(parts[:k], {"slow": {}, "fast": {}})
                node[part][parts[k + 1 :]] = i
                break
    out: list[int] = []
    for node in nodes.values():
        slow, fast = ({below: _shape(leaves[i]) for below, i in node[n].items()} for n in node)
        if slow == fast:
            out += node["slow"].values()
    return out


# --- statistics --------------------------------------------------------------------------------


def _statistics(leaves: Sequence[Leaf], roles: _Roles) -> None:
    ends: dict[str, dict[tuple[Parts, tuple[int, ...] | None], int]] = {}
    for i, leaf in enumerate(leaves):
        own = stem(leaf.parts)
        ends.setdefault(own[-1] if own else "", {})[own[:-1], _shape(leaf)] = i
    both = ends.get("mean", {}).keys() & ends.get("var", {}).keys()
    for node, shape in both:
        pair = [ends[name][node, shape] for name in ("mean", "var")]
        if shape and "params" not in node and all(roles[i] == "param" for i in pair):
            for i in pair:
                roles[i] = "batch_stats"

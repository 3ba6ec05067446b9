"""Presets and rules: which codec a leaf gets, and why.

A preset is an ordered list of rules; the first that fits a leaf by path, dtype and role
decides. A preset's own rules come after those that the user puts before them, and a leaf
whose codec cannot take its dtype is stored exactly.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from lcjax import roles
from lcjax.codecs import lc, levels, moments, steps
from lcjax.dtypes import DTYPES
from lcjax.errors import PresetError
from lcjax.tree import Leaf

SCOPES = ("model", "leaf")
# What the record of a leaf says; the first group is stored in the chain, which later saves
# build on, the second belongs to one save alone.
CHAINED = ("lc", "delta", "step", "level", "bounded")
OWN = ("alone", "moment")
# First moments do not resemble their past selves, so a delta only costs an older file.
_NEVER_CHAINED = ("mu", "trace", "count", "rng")
_SMALL = 64  # bytes; below, a leaf by itself costs less than keeping it in the chain
_FEW = 16  # elements; below, the exact values cost less than a lossy codec's parameters


@dataclass(frozen=True)
class Exact:
    """Bit-exact: as a delta where that is smaller, else by itself."""

    name = "exact"


@dataclass(frozen=True)
class Lc:
    """LC-Checkpoint as published: exponent buckets, the largest promoted.

    Attributes:
      bits: code width, 1 to 8; the paper finds 3 enough for most models.
      scope: whether buckets are picked over the whole ``"model"``, as published, or per
        ``"leaf"``.
    """

    name = "lc"
    bits: int = 3
    scope: Literal["model", "leaf"] = "model"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not lc.MIN_BITS <= self.bits <= lc.MAX_BITS:
            raise PresetError(
                f"bits must be an int from {lc.MIN_BITS} to {lc.MAX_BITS}, got {self.bits!r}"
            )
        if self.scope not in SCOPES:
            raise PresetError(f"scope must be one of {', '.join(SCOPES)}, got {self.scope!r}")


@dataclass(frozen=True)
class Step:
    """Parameters in steps that follow their updates, see ``lcjax.codecs.steps``.

    Attributes:
      size: the step, in root mean squares of the deltas: of all leaves with second moments
        together, else of the leaf.
      dead_zone: updates up to this many steps are postponed.
      reach: the first representative, in steps.
      weight: leaves with large second moments get finer steps: by ``mean(v)^-weight``.
      key_bits: a first key frame keeps each leaf's root mean square to this many bits.
    """

    name = "step"
    size: float = 2.0
    dead_zone: float = 0.5
    reach: float = 0.9
    weight: float = 0.25
    key_bits: int = 11

    def __post_init__(self) -> None:
        _check(self, "size", 2**-10, 64)
        _check(self, "dead_zone", 0.25, 4)
        _check(self, "reach", 0.5, 2)
        _check(self, "weight", 0, 1)
        _check(self, "key_bits", 4, 22)


@dataclass(frozen=True)
class Level:
    """Second moments as levels of their logarithm, see ``lcjax.codecs.levels``.

    Attributes:
      octaves: distance of two levels, in factors of two.
      dead_zone: changes up to this many levels are postponed.
    """

    name = "level"
    octaves: float = 2.0
    dead_zone: float = 0.5

    def __post_init__(self) -> None:
        _check(self, "octaves", 2**-6, 16)
        _check(self, "dead_zone", 0.5, 4)


@dataclass(frozen=True)
class Moment:
    """First moments, predicted from their parameter's deltas, see ``lcjax.codecs.moments``.

    Attributes:
      size: step for what the prediction misses, in root mean squares of it; None drops it.
      key_size: the same where there is no prediction, as in a key frame; None makes the moment
        0 there, so that a resumed optimizer starts it anew.
      dead_zone: up to this many steps of it are dropped.
      memory: what each delta leaves of the deltas before it in the prediction, 0 to 1.
      norm: the prediction's size, as a multiple of the moment's; 0 predicts nothing.
    """

    name = "moment"
    size: float | None = None
    key_size: float | None = 2.0
    dead_zone: float = 0.6
    memory: float = 0.8
    norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("size", "key_size"):
            if getattr(self, name) is not None:
                _check(self, name, 2**-10, 64)
        _check(self, "dead_zone", 0.25, 4)
        _check(self, "memory", 0, 1)
        _check(self, "norm", 0, 16)


@dataclass(frozen=True)
class Bounded:
    """Every element within a bound, checked when saving: ``|u - c| <= bound``.

    Attributes:
      absolute: the bound, in the leaf's units; or
      relative: the bound as a share of each element's own magnitude.
    """

    name = "bounded"
    absolute: float | None = None
    relative: float | None = None

    def __post_init__(self) -> None:
        if (self.absolute is None) == (self.relative is None):
            raise PresetError("Bounded takes either absolute= or relative=")
        if self.absolute is not None:
            _check(self, "absolute", 2.0**-120, 2.0**120)
        else:
            _check(self, "relative", 2.0**-23, 0.5)


def _check(spec: Any, name: str, low: float, high: float) -> None:
    value = getattr(spec, name)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high:
        raise PresetError(
            f"{type(spec).__name__}: {name} must be a number from {low:g} to {high:g}, "
            f"got {value!r}"
        )


Codec: TypeAlias = Exact | Lc | Step | Level | Moment | Bounded
_CODECS: dict[str, type[Codec]] = {c.name: c for c in (Exact, Lc, Step, Level, Moment, Bounded)}
_DTYPES: dict[str, tuple[str, ...]] = {
    "lc": lc.SUPPORTED_DTYPES,
    "step": steps.DTYPES,
    "level": levels.DTYPES,
    "moment": moments.DTYPES,
    "bounded": steps.DTYPES,
}


@dataclass(frozen=True)
class Rule:
    """What leaves that fit get.

    Attributes:
      codec: ``lcjax.Exact()``, ``Bounded(absolute=1e-6)``, ``Step()``, ...
      path: glob over the leaf's name, where ``*`` also crosses ``/``: ``"params/embed*"``.
      dtype: glob over the dtype's name: ``"float32"``, ``"*float*"``.
      role: a role, or several joined by ``|``: ``"mu|trace"``; ``"*"`` for any. See
        ``lcjax.explain`` for the roles of a state.
    """

    codec: Codec
    path: str = "*"
    dtype: str = "*"
    role: str = "*"

    def __post_init__(self) -> None:
        if type(self.codec) not in _CODECS.values():
            names = ", ".join(c.__name__ for c in _CODECS.values())
            raise PresetError(f"a rule's codec must be one of {names}, got {self.codec!r}")
        if not all(isinstance(g, str) for g in (self.path, self.dtype, self.role)):
            raise PresetError("a rule's path, dtype and role are text")

    def fits(self, name: str, dtype: str, role: str) -> bool:
        """Whether a leaf is meant."""
        return (
            (self.role == "*" or role in self.role.split("|"))
            and (self.dtype == "*" or fnmatch.fnmatchcase(dtype, self.dtype))
            and (self.path == "*" or fnmatch.fnmatchcase(name, self.path))
        )

    def __str__(self) -> str:
        """As explanations show it."""
        wanted = [f"{k} {v}" for k, v in (("path", self.path), ("dtype", self.dtype)) if v != "*"]
        if self.role != "*":
            wanted.append(f"role {self.role}")
        return ", ".join(wanted) or "every leaf"


class Plan(NamedTuple):
    """How one leaf is stored.

    Attributes:
      kind: one of ``CHAINED`` or ``OWN``.
      codec: with its options.
      reason: in words.
      param: the parameter of a moment, if it is in the chain.
      nu: the second moment beside it, if it is in the chain.
    """

    kind: str
    codec: Codec
    reason: str
    param: str | None = None
    nu: str | None = None


_BALANCED = (
    Rule(Step(size=2.8, reach=1.0), role="param|ema"),
    Rule(Level(dead_zone=0.6), role="nu|nu_max"),
    Rule(Moment(), role="mu|trace"),
)
# A moment twice its size makes up for what coarse steps have postponed: for some steps it takes
# the parameters on along their own way.
_EXTREME = (
    Rule(Step(size=4.5, reach=0.85, key_bits=9), role="param|ema"),
    Rule(Level(dead_zone=0.75), role="nu|nu_max"),
    Rule(Moment(norm=2.0), role="mu|trace"),
)


@dataclass(frozen=True)
class _Named:
    promise: str
    rules: tuple[Rule, ...]


_PRESETS = {
    "lossless": _Named("every bit comes back", ()),
    "paper": _Named("parameters as LC-Checkpoint (ICML 2020) has them, everything else exact", ()),
    "balanced": _Named(
        "made so that training that resumes from it loses no more than 5 steps",
        _BALANCED,
    ),
    "extreme": _Named(
        "the fewest bytes that training still goes on from, losing no more than 20 steps",
        _EXTREME,
    ),
}
PRESETS = tuple(_PRESETS)


@dataclass(frozen=True)
class Preset:
    """A named fidelity with its options.

    Attributes:
      name: ``"lossless"``, ``"paper"``, ``"balanced"`` or ``"extreme"``.
      bits: code width of ``paper``, 1 to 8; the paper finds 3 enough for most models.
      scope: whether ``paper`` picks its buckets over the whole ``"model"``, as published,
        or per ``"leaf"``.
      rules: looked at before the preset's own.
      roles: ``(path, role)`` pairs that overrule the roles found, see ``lcjax.explain``.

    Raises:
      PresetError: an unknown name, or options out of range.
    """

    name: str
    bits: int = 3
    scope: Literal["model", "leaf"] = "model"
    rules: tuple[Rule, ...] = ()
    roles: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        if self.name not in PRESETS:
            raise PresetError(f"unknown preset {self.name!r}; {_choices()}")
        Lc(self.bits, self.scope)
        if self.name != "paper" and (self.bits, self.scope) != (3, "model"):
            raise PresetError(f"preset {self.name!r} takes neither bits nor scope")
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "roles", tuple((str(p), str(r)) for p, r in self.roles))
        if not all(isinstance(rule, Rule) for rule in self.rules):
            raise PresetError(f"rules must be lcjax.Rule objects, got {self.rules!r}")
        roles.stated((), self.roles)

    @property
    def promise(self) -> str:
        """What a restore may differ in, in words; the user's own rules may change that."""
        return _PRESETS[self.name].promise

    @property
    def is_lossy(self) -> bool:
        """Whether what is restored may differ from what was saved."""
        return any(not isinstance(rule.codec, Exact) for rule in self.all_rules)

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules, in order; the last fits every leaf."""
        own = _PRESETS[self.name].rules
        if self.name == "paper":
            # The paper speaks of model parameters; what else training needs stays exact.
            own = (Rule(Lc(self.bits, self.scope), role="param"),)
        return (*self.rules, *own, Rule(Exact()))

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, for a step's metadata."""
        out: dict[str, Any] = {"name": self.name}
        if self.name == "paper":
            out |= {"bits": self.bits, "scope": self.scope}
        if self.rules:
            out["rules"] = [_rule_to_json(rule) for rule in self.rules]
        if self.roles:
            out["roles"] = [list(pair) for pair in self.roles]
        return out


def preset_from_json(raw: Mapping[str, Any]) -> Preset:
    """Inverse of ``Preset.to_json``.

    Raises:
      PresetError: not a preset of this release.
    """
    try:
        return Preset(
            raw["name"],
            raw.get("bits", 3),
            raw.get("scope", "model"),
            tuple(_rule_from_json(rule) for rule in raw.get("rules", ())),
            tuple((p, r) for p, r in raw.get("roles", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise PresetError(f"not a preset of this release: {raw!r}") from e


def _rule_to_json(rule: Rule) -> dict[str, Any]:
    out: dict[str, Any] = {"codec": rule.codec.name} | dataclasses.asdict(rule.codec)
    out |= {k: getattr(rule, k) for k in ("path", "dtype", "role") if getattr(rule, k) != "*"}
    return out


def _rule_from_json(raw: Mapping[str, Any]) -> Rule:
    options = dict(raw)
    codec = _CODECS[options.pop("codec")]
    options.pop("boost", None)  # of moments, in files of version 2
    where = {k: options.pop(k) for k in ("path", "dtype", "role") if k in options}
    return Rule(codec(**options), **where)


def resolve(
    preset: str | Preset | None, bits: int | None = None, scope: str | None = None
) -> Preset:
    """Checks a preset's name and options.

    Args:
      preset: the name, or a finished ``Preset``; there is no default.
      bits: overrides ``Preset.bits``.
      scope: overrides ``Preset.scope``.

    Raises:
      PresetError: no name, an unknown name, or options out of range.
    """
    if preset is None:
        raise PresetError(
            "name a preset to save: preset='lossless' restores every bit, preset='balanced' is "
            "lossy and made to train on from, preset='paper' is LC-Checkpoint's lossy delta. "
            "There is no default, so that nobody loses precision unasked"
        )
    if isinstance(preset, str):
        preset = Preset(preset)
    if not isinstance(preset, Preset):
        raise PresetError(f"a preset is a name or an lcjax.Preset, got {preset!r}; {_choices()}")
    changes: dict[str, Any] = {}
    if bits is not None:
        changes["bits"] = bits
    if scope is not None:
        changes["scope"] = scope
    if changes and preset.name != "paper":
        raise PresetError(f"preset {preset.name!r} takes neither bits nor scope")
    return dataclasses.replace(preset, **changes)


def plans(preset: Preset, leaves: Sequence[Leaf]) -> tuple[Plan | None, ...]:
    """How each leaf is stored; None for Python scalars, which go into the record.

    Args:
      preset: the save's preset.
      leaves: of the whole tree, so that moments find their parameters.

    Raises:
      PresetError: a stated role that does not exist.
    """
    found_roles = roles.stated(leaves, preset.roles)
    rules = preset.all_rules
    made: list[Plan | None] = [
        None if leaf.spec is None else _plan(rules, leaf, role)
        for leaf, role in zip(leaves, found_roles, strict=True)
    ]
    if not any(plan is not None and plan.kind in ("moment", "step") for plan in made):
        return tuple(made)
    partners = roles.partners(
        [
            leaf if leaf.role == role else dataclasses.replace(leaf, role=role)
            for leaf, role in zip(leaves, found_roles, strict=True)
        ]
    )
    chained = {
        leaf.name
        for leaf, plan in zip(leaves, made, strict=True)
        if plan is not None and plan.kind in CHAINED
    }
    for k, (leaf, plan) in enumerate(zip(leaves, made, strict=True)):
        pair = partners.get(leaf.name)
        if plan is None or pair is None or plan.kind not in ("moment", "step"):
            continue
        made[k] = plan._replace(
            param=pair.param if plan.kind == "moment" and pair.param in chained else None,
            nu=pair.nu if pair.nu in chained or plan.kind == "step" else None,
        )
    return tuple(made)


def _plan(rules: Sequence[Rule], leaf: Leaf, role: str) -> Plan:
    assert leaf.spec is not None
    spec = leaf.spec
    rule = next(r for r in rules if r.fits(leaf.name, spec.dtype, role))
    codec, size = rule.codec, math.prod(spec.shape)
    if isinstance(codec, Exact):
        reason = str(rule)
    elif leaf.kind == "key" or spec.dtype not in _DTYPES[codec.name]:
        kind = "PRNG keys are" if leaf.kind == "key" else f"{spec.dtype} is"
        codec, reason = Exact(), f"{kind} stored exactly"
    elif size == 0 or (size < _FEW and not isinstance(codec, Lc)):
        codec, reason = Exact(), f"{size} elements cost least exactly"
    else:
        return Plan(codec.name, codec, str(rule))
    # The words of a PRNG key and other dtypes alike; a bit-exact delta needs some size.
    chained = role not in _NEVER_CHAINED and size * DTYPES[spec.dtype].itemsize >= _SMALL
    return Plan("delta" if chained else "alone", codec, reason)


def _choices() -> str:
    return f"choose one of {', '.join(repr(p) for p in PRESETS)}"

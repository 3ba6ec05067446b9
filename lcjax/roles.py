"""What each leaf of a training state is for, and which moment belongs to which parameter.

The roles, in the order of a training state:

=============== ====================================================================================
role            what the leaf holds
=============== ====================================================================================
``param``       weights that are trained
``ema``         weights that trail them: averages, target networks, Lookahead's slow weights
``batch_stats`` running statistics of normalization layers
``mu``          first moment: a short average of gradients or of updates (Adam, Lion, Muon)
``trace``       momentum buffer of SGD
``nu``          second moment: squares of gradients, averaged or summed, never negative (Adam,
                RMSProp, AdaGrad; also AdaFactor's rows and columns)
``nu_max``      largest second moment so far (AMSGrad)
``acc_grads``   gradients summed over micro-batches (MultiSteps)
``count``       steps that an optimizer counts
``optimizer``   any other optimizer state: hyperparameters, anchors, flags, averages that a lossy
                moment would break (signed curvature, AdEMAMix's slow average)
``step``        the trainer's step
``rng``         PRNG keys and their counters
``other``       everything else
=============== ====================================================================================

`lcjax.tree.flatten` gives each leaf the role that its own name and classes tell; `found` looks at
its neighbours too, and `stated` lets the user overrule both. Only names are needed for most of it,
so a state restored into plain dicts has the roles it had before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from lcjax._role_context import follower_at, found, live_name
from lcjax._tree_leaves import FIELD_ROLES, VARIABLE_FIELDS, Leaf, average_at, stem, words
from lcjax._tree_names import Parts
from lcjax.errors import PresetError

__all__ = ["ROLES", "Partners", "found", "partners", "stated"]

ROLES = (
    "param",
    "ema",
    "batch_stats",
    "mu",
    "trace",
    "nu",
    "nu_max",
    "acc_grads",
    "count",
    "optimizer",
    "step",
    "rng",
    "other",
)
"""Every role; see the module's table."""

_FIRST = ("mu", "trace")
_MOMENTS = (*_FIRST, "nu")
# AdaFactor's rows and columns; a parameter of their shape has its second moment in "v".
_FACTORS = ("v_row", "v_col")


class Partners(NamedTuple):
    """The other leaves of a trio; a leaf is not its own partner.

    Attributes:
        param: the parameter of a moment, the live parameter of an average.
        mu: the first moment (role ``mu`` or ``trace``) of the same parameter.
        nu: the second moment of the same parameter.
    """

    param: str | None
    mu: str | None
    nu: str | None


# --- stated ----------------------------------------------------------------------------------


def stated(leaves: Sequence[Leaf], patterns: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The role of each leaf, where the user's word goes before what was found.

    Args:
        leaves: of one tree, as `lcjax.tree.flatten` gives them.
        patterns: pairs of a glob over leaf names and a role; the first that matches decides. Globs
            are those of `fnmatch.fnmatchcase`: case counts, and ``*`` also crosses ``/``, so
            ``"params/head*"`` means everything below.

    Returns:
        One role per leaf; leaves that no pattern matches have the role that `found` gives them.

    Raises:
        PresetError: a role that does not exist, whether or not a leaf matches.
    """
    for pattern, role in patterns:
        if role not in ROLES:
            raise PresetError(
                f"roles: {pattern!r} is given the unknown role {role!r}; "
                f"use one of {', '.join(ROLES)}"
            )
    roles = [leaf.role for leaf in found(leaves)]
    if not patterns:
        return tuple(roles)
    return tuple(
        next((wanted for pattern, wanted in patterns if fnmatchcase(leaf.name, pattern)), role)
        for leaf, role in zip(leaves, roles, strict=True)
    )


# --- partners --------------------------------------------------------------------------------

_Shape: TypeAlias = tuple[int, ...]


class _Member(NamedTuple):
    """A leaf as the search for its parameter sees it.

    Attributes:
        leaf: the leaf.
        state: the path of the node whose field holds the leaf (of an average: the path of the
            average's root), None where no field is known.
        below: the path inside the field, to compare with paths of parameters.
        name: what the beginning of a parameter's path is compared with.
    """

    leaf: Leaf
    state: Parts | None
    below: Parts
    name: Parts


class _Candidate(NamedTuple):
    """A parameter that a member may belong to, with what precedes their common suffix."""

    param: Leaf
    inner: Parts  # of the member, below its field
    root: Parts  # of the parameter


def partners(leaves: Sequence[Leaf]) -> dict[str, Partners]:
    """Finds which moments belong to which parameter.

    A moment and its parameter have the same shape, and the moment's path inside its optimizer state
    ends like the parameter's. Where several parameters fit, the one whose root fits most leaves
    of that optimizer state is taken, then the one whose name starts most like the moment's;
    where that leaves several, none is.

    Args:
        leaves: of one item; their roles are taken as they are.

    Returns:
        For every leaf whose role is ``param``, ``ema``, ``mu``, ``trace`` or ``nu``, by name, the
        names of its partners. The entry of an average names its live parameter and that one's
        moments.
    """
    params = [leaf for leaf in leaves if leaf.role == "param"]
    moments = [_member(leaf) for leaf in leaves if leaf.role in _MOMENTS]
    averages = [_average(leaf) for leaf in leaves if leaf.role == "ema"]
    index = _Parameters(params)
    whole = [member for member in moments if not _is_factor(member.leaf)]
    owner = _owners(whole, index)
    other = _other_moments(whole)
    firsts = _by_param([m for m in whole if m.leaf.role != "nu"], owner)
    seconds = _by_param([m for m in whole if m.leaf.role == "nu"], owner)
    out = {
        param.name: Partners(None, firsts.get(param.parts), seconds.get(param.parts))
        for param in params
    }
    for leaf in (member.leaf for member in moments):
        param = _name(owner.get(leaf.parts))
        moment = _name(other.get(leaf.parts))
        if moment is None and param is not None:
            moment = out[param].mu if leaf.role == "nu" else out[param].nu
        mu, nu = (moment, None) if leaf.role == "nu" else (None, moment)
        out[leaf.name] = Partners(param, mu, nu)
    live = _owners(averages, index)
    for leaf in (member.leaf for member in averages):
        name = _name(live.get(leaf.parts))
        out[leaf.name] = out[name]._replace(param=name) if name else Partners(None, None, None)
    return out


def _by_param(members: Sequence[_Member], owner: Mapping[Parts, Leaf]) -> dict[Parts, str | None]:
    """The name of each parameter's member; None where several claim it."""
    out: dict[Parts, str | None] = {}
    for member in members:
        param = owner.get(member.leaf.parts)
        if param is not None:
            out[param.parts] = None if param.parts in out else member.leaf.name
    return out


def _name(leaf: Leaf | None) -> str | None:
    return None if leaf is None else leaf.name


def _only(leaves: Iterable[Leaf]) -> Leaf | None:
    several = list(leaves)
    return several[0] if len(several) == 1 else None


def _shape(leaf: Leaf) -> _Shape | None:
    return None if leaf.spec is None else leaf.spec.shape


def _is_factor(leaf: Leaf) -> bool:
    return leaf.slot is not None and leaf.parts[leaf.slot] in _FACTORS


def _member(leaf: Leaf) -> _Member:
    slot = leaf.slot
    if slot is None:
        fields = (k for k, part in enumerate(leaf.parts) if FIELD_ROLES.get(part) == leaf.role)
        slot = next(fields, None)
    if slot is None:
        return _Member(leaf, None, leaf.parts, leaf.parts)
    return _Member(leaf, leaf.parts[:slot], leaf.parts[slot + 1 :], leaf.parts)


def _average(leaf: Leaf) -> _Member:
    parts = leaf.parts
    at = leaf.slot
    if at is None:
        named = [k for k in (average_at(parts), follower_at(parts)) if k is not None]
        at = min(named, default=parts.index("slow") if "slow" in parts else None)
    if at is None:
        return _Member(leaf, None, parts, parts)
    live = live_name(parts[at])
    name = (*parts[:at], live) if live else parts
    return _Member(leaf, parts[: at + 1], parts[at + 1 :], name)


_MANY = 32


class _Parameters:
    """Finds the parameters that a member may belong to."""

    def __init__(self, params: Sequence[Leaf]) -> None:
        self._whole = _SuffixIndex([(param.parts, param) for param in params])
        # One side may have the last component of nnx variables, the other not.
        self._stems: _SuffixIndex | None = None
        self._params = params

    def longest(self, member: _Member) -> list[_Candidate]:
        """The parameters that share the longest end of their path with the member."""
        out = self._whole.longest(member)
        if not out:
            if self._stems is None:
                self._stems = _SuffixIndex([(stem(param.parts), param) for param in self._params])
            below = member.below[:-1] if member.below[-1:] in _VALUE else member.below
            out = self._stems.longest(member._replace(below=below))
        if not out and member.below in ((), *_VALUE) and len(self._params) == 1:
            # A tree that is one bare array has no name inside its optimizer state.
            alone = self._params[0]
            if member.state is not None and _shape(alone) == _shape(member.leaf) is not None:
                out = [_Candidate(alone, (), alone.parts)]
        return out


_VALUE = tuple((name,) for name in VARIABLE_FIELDS)


class _SuffixIndex:
    """Parameters by shape and by the end of their path.

    Paths written backwards and sorted: those with the longest common end lie side by side.
    """

    def __init__(self, params: Sequence[tuple[Parts, Leaf]]) -> None:
        by_shape: dict[_Shape, list[tuple[Parts, int, Leaf]]] = {}
        for i, (path, param) in enumerate(params):
            shape = _shape(param)
            if shape is not None:
                by_shape.setdefault(shape, []).append((path[::-1], i, param))
        for entries in by_shape.values():
            entries.sort()
        self._ends = {shape: [e[0] for e in entries] for shape, entries in by_shape.items()}
        self._params = {shape: [e[2] for e in entries] for shape, entries in by_shape.items()}
        self._by_beginning: dict[tuple[_Shape, int, int], list[tuple[Leaf, Parts]]] = {}
        self._known: dict[tuple[_Shape, Parts], list[_Candidate]] = {}

    def longest(self, member: _Member) -> list[_Candidate]:
        """As for `_Parameters`, of paths as they are."""
        shape = _shape(member.leaf)
        if shape is None or shape not in self._ends:
            return []
        known = self._known.get((shape, member.below))
        if known is not None:  # the second moment asks as the first did
            return known
        ends = self._ends[shape]
        wanted = member.below[::-1]
        at = bisect_left(ends, wanted)
        length = max(_common(end, wanted) for end in ends[max(at - 1, 0) : at + 1])
        if not length:
            return []
        common = wanted[:length]
        start = at if length == len(wanted) else bisect_left(ends, common, hi=at)
        stop = start + 1
        if stop < len(ends) and ends[stop][:length] == common:
            stop = bisect_right(ends, common, lo=stop, key=lambda end: end[:length])
        inner = member.below[: len(member.below) - length]
        out = [
            _Candidate(param, inner, param.parts[: len(end) - length])
            for param, end in self._between(shape, start, stop, member.name)
        ]
        if stop - start <= _MANY:
            self._known[shape, member.below] = out
        return out

    def _slice(self, shape: _Shape, start: int, stop: int) -> list[tuple[Leaf, Parts]]:
        params, ends = self._params[shape][start:stop], self._ends[shape][start:stop]
        return list(zip(params, ends, strict=True))

    def _between(
        self, shape: _Shape, start: int, stop: int, name: Parts
    ) -> list[tuple[Leaf, Parts]]:
        # Where each layer has an optimizer of its own, and each a "kernel", looking at all of them
        # for each would take quadratic time: only those with the longest common beginning count.
        if stop - start <= _MANY:
            return self._slice(shape, start, stop)
        run = self._by_beginning.get((shape, start, stop))
        if run is None:
            run = sorted(self._slice(shape, start, stop), key=_parts)
            self._by_beginning[shape, start, stop] = run
        at = bisect_left(run, name, key=_parts)
        length = max(_common(leaf.parts, name) for leaf, _ in run[max(at - 1, 0) : at + 1])
        first = bisect_left(run, name[:length], key=_parts)
        last = bisect_right(run, name[:length], lo=first, key=lambda pair: pair[0].parts[:length])
        return run[first:last] if last - first <= _MANY else []


def _parts(pair: tuple[Leaf, Parts]) -> Parts:
    return pair[0].parts


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many components two paths begin with alike."""
    n = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        n += 1
    return n


def _owners(members: Sequence[_Member], index: _Parameters) -> dict[Parts, Leaf]:
    """The parameter of each member that has exactly one."""
    states: dict[tuple[Parts | None, str], list[_Member]] = {}
    for member in members:
        states.setdefault((member.state, member.leaf.role), []).append(member)
    owner: dict[Parts, Leaf] = {}
    for (state, _), group in states.items():
        fits = [index.longest(member) for member in group]
        if state is not None and any(not c.inner for cs in fits for c in cs):
            # Where some leaves match with their whole path, those that do not are not in the item:
            # layer 1 would otherwise stand in for layer 2.
            fits = [[c for c in cs if not c.inner] for cs in fits]
        unsure = any(len(cs) > 1 for cs in fits)
        votes = Counter((c.inner, c.root) for cs in fits for c in cs) if unsure else Counter()
        chosen = [_best(member.name, cs, votes) for member, cs in zip(group, fits, strict=True)]
        claims = Counter(map(id, chosen))
        for member, param in zip(group, chosen, strict=True):
            if param is not None and claims[id(param)] == 1:
                owner[member.leaf.parts] = param
    return owner


def _best(
    name: Parts, candidates: list[_Candidate], votes: Mapping[tuple[Parts, Parts], int]
) -> Leaf | None:
    if len(candidates) <= 1:
        return candidates[0].param if candidates else None
    ranks = [(votes[c.inner, c.root], *_alike(c.root, name)) for c in candidates]
    top = max(ranks)
    return _only(c.param for c, rank in zip(candidates, ranks, strict=True) if rank == top)


def _alike(root: Parts, name: Parts) -> tuple[int, int]:
    """How far two paths agree: in whole components, then in words (``actor_opt`` and ``actor``)."""
    same = _common(root, name)
    if same >= min(len(root), len(name)):
        return same, 0
    return same, _common(words(root[same]), words(name[same]))


def _other_moments(moments: Sequence[_Member]) -> dict[Parts, Leaf]:
    """The moment of the other order in the same state, else in the same chain."""
    other: dict[Parts, Leaf] = {}
    for whole_chain in (False, True):
        groups: dict[tuple[Parts, Parts, _Shape | None], list[Leaf]] = {}
        for leaf, state, below, _ in moments:
            if state is None or leaf.parts in other:
                continue
            if whole_chain and state[-1:] and state[-1].isdigit():
                state = state[:-1]
            groups.setdefault((state, below, _shape(leaf)), []).append(leaf)
        for group in groups.values():
            if len(group) < 2:
                continue
            first = _only(leaf for leaf in group if leaf.role in _FIRST)
            second = _only(leaf for leaf in group if leaf.role == "nu")
            if first is not None and second is not None:
                other[first.parts], other[second.parts] = second, first
    return other

"""A pytree <-> named leaves.

`flatten` takes a tree apart into leaves with names and a `Skeleton` of its containers. A saved
skeleton and the leaves' values make a tree again: by `build` alone, or by `build_like` into the
containers of a target. Any class registered with JAX works; leaves are matched by name, so that a
``TrainState`` (attributes), its dict, and a list (whose indices are names) are interchangeable.

What differs from Orbax's Standard handler, on purpose (see also `build`):

* leaves pair by name alone: a list matches a dict with keys "0", "1" or 0, 1;
* None and empty containers hold no data, so one that exists on only one side is no mismatch;
* where None or another empty node was saved and the target wants a leaf, that leaf is missing
  (Orbax quietly puts None there);
* names may differ by a last component ``value`` (an ``nnx.State`` against its pure dict);
* numpy scalars are allowed in a target, and come back as arrays of no dimensions.

As in Orbax, a saved leaf is left out where the target has None (or another empty node) or ``...``
in its very place, and a target that omits leaves altogether must ask for it (`partial`). A target
of which only names and containers count is matched by `match_names`, as ``PyTreeRestore`` does.
"""

import difflib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lcjax._tree_leaves import (
    ARRAY_KINDS,
    VARIABLE_FIELDS,
    ArraySpec,
    Hint,
    Leaf,
    array_of,
    hint_of,
    is_key_dtype,
    leaf_at,
    role_of,
)
from lcjax._tree_names import Parts, is_text, join_name, split_name
from lcjax._tree_scalars import SCALAR_KINDS, Scalar, scalar_from_json, scalar_to_json
from lcjax._tree_skeleton import (
    KEYED,
    MAX_DEPTH,
    MAX_NAME_CHARS,
    Child,
    Key,
    Node,
    OtherKey,
    Skeleton,
    build,
    fits_int_key,
    key_text,
    name_cost,
    to_json_skeleton,
    validate_skeleton,
)
from lcjax.errors import TreeMismatchError, UnsupportedLeafError

__all__ = [
    "ARRAY_KINDS",
    "MAX_DEPTH",
    "MAX_NAME_CHARS",
    "ArraySpec",
    "Flat",
    "Hint",
    "Leaf",
    "Match",
    "Node",
    "OtherKey",
    "Pair",
    "Parts",
    "Scalar",
    "Skeleton",
    "array_of",
    "build",
    "build_like",
    "check_shape",
    "flatten",
    "flatten_names",
    "is_key_dtype",
    "join_name",
    "match",
    "match_names",
    "role_of",
    "scalar_from_json",
    "scalar_to_json",
    "split_name",
    "to_json_skeleton",
    "validate_skeleton",
]


@dataclass(frozen=True)
class Flat:
    """A tree taken apart.

    Attributes:
        leaves: in the order of `jax.tree.leaves`.
        skeleton: the containers; a leaf's index is its position in `leaves`.
    """

    leaves: tuple[Leaf, ...]
    skeleton: Skeleton


def flatten(tree: Any, *, target: bool = False) -> Flat:
    """Takes a tree apart into named leaves and the skeleton of its containers.

    Args:
        tree: any pytree.
        target: accept also what only a restore target holds: abstract leaves (anything with a
            shape and a dtype, such as `jax.ShapeDtypeStruct`) and ``...`` (do not load).

    Returns:
        The leaves and the skeleton.

    Raises:
        UnsupportedLeafError: a leaf, or a dict key, of a type that is not stored; or a tree nested
            more than `MAX_DEPTH` deep.
        TreeMismatchError: two children of a node with the same name, such as the keys 1 and "1".

    Example:
        >>> flat = flatten({"w": np.ones(2), "n": [None, 3]})
        >>> [(leaf.name, leaf.kind) for leaf in flat.leaves]
        [('n/1', 'int'), ('w', 'numpy')]
    """
    return _Walk(functools.partial(leaf_at, target=target)).flat(tree)


def flatten_names(tree: Any) -> Flat:
    """Takes a tree apart of which only names and containers count: its leaves may be anything.

    Args:
        tree: any pytree.

    Returns:
        The leaves, of kind ``any``, or ``placeholder`` where there is ``...``; and the skeleton.

    Raises:
        UnsupportedLeafError: a dict key that is not stored, or a tree nested too deep.
        TreeMismatchError: two children of a node with the same name.

    Example:
        >>> [(leaf.name, leaf.kind) for leaf in flatten_names({"a": object(), "b": ...}).leaves]
        [('a', 'any'), ('b', 'placeholder')]
    """
    return _Walk(_any_leaf).flat(tree)


def _any_leaf(parts: Parts, value: Any, _: Hint | None) -> Leaf:
    return Leaf(parts, value, "placeholder" if value is ... else "any", "other", None)


class _Walk:
    """One pass over a tree, one level at a time: JAX alone knows how to open each node."""

    def __init__(self, make_leaf: Callable[[Parts, Any, Hint | None], Leaf]) -> None:
        self.make_leaf = make_leaf
        self.leaves: list[Leaf] = []
        self.empties: list[Parts] = []
        self.chars_left = MAX_NAME_CHARS

    def flat(self, tree: Any) -> Flat:
        root = self.visit(tree, (), None)
        paths = tuple(leaf.parts for leaf in self.leaves)
        return Flat(tuple(self.leaves), Skeleton(root, paths, tuple(self.empties)))

    def visit(self, node: Any, path: Parts, hint: Hint | None) -> Child:
        if node is None:
            self._charge(path)
            self.empties.append(path)
            return None
        entries = _open(node, path)
        if entries is None:
            self._charge(path)
            self.leaves.append(self.make_leaf(path, node, hint))
            return len(self.leaves) - 1
        if len(path) >= MAX_DEPTH:
            raise UnsupportedLeafError(
                f"the tree is nested more than {MAX_DEPTH} deep, below "
                f"{join_name(path[:4])!r}: flatten it before saving"
            )
        if not entries:
            self._charge(path)
            self.empties.append(path)
        kind, keys = _describe(node, [entry for entry, _ in entries], path)
        texts = _distinct([entry for entry, _ in entries], keys, path)
        hint = _strongest(hint, hint_of(type(node), len(path)))
        children: list[Child] = []
        for text, (_, child) in zip(texts, entries, strict=True):  # one stack frame per level
            children.append(self.visit(child, (*path, text), hint))
        return Node(kind, keys if kind in KEYED else (), tuple(children))

    def _charge(self, path: Parts) -> None:
        # What is written must be readable, so the reader's limit holds here too.
        self.chars_left -= name_cost(path)
        if self.chars_left < 0:
            raise UnsupportedLeafError(
                f"the names of the tree's leaves pass {MAX_NAME_CHARS} characters in all"
            )


def _strongest(outer: Hint | None, inner: Hint | None) -> Hint | None:
    if outer is None or inner is None:
        return inner or outer
    # The outermost optimizer node decides where its fields begin.
    if outer.role == "optimizer" and inner.role != "rng":
        return outer._replace(centered=outer.centered or inner.centered)
    return inner


def _open(node: Any, path: Parts) -> list[tuple[Any, Any]] | None:
    """The key entries and children of a node, or None for a leaf."""
    if type(node) in SCALAR_KINDS or type(node) is np.ndarray or isinstance(node, jax.Array):
        return None  # as JAX would answer, sooner
    # The first question is about the node itself. Asking "is it the node?" instead would loop for
    # ever on a list that contains itself.
    started = False

    def stop(_: Any) -> bool:
        nonlocal started
        below, started = started, True
        return below

    try:
        flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=stop)
    except (TypeError, ValueError) as err:
        raise TreeMismatchError(
            f"JAX cannot take apart the {type(node).__name__} at {join_name(path)!r}: {err} "
            "(the keys of a dict must all be of one type, so that they can be sorted)"
        ) from err
    if len(flat) == 1 and not flat[0][0]:
        return None
    return [(entries[0], child) for entries, child in flat]


def _describe(node: Any, entries: list[Any], path: Parts) -> tuple[str, tuple[Key, ...]]:
    """The kind of a node in the skeleton, and the key of each child."""
    tu = jax.tree_util
    if not entries:
        if isinstance(node, Mapping):
            return "dict", ()
        return ("list" if type(node) is list else "tuple" if type(node) is tuple else "fields"), ()
    if all(isinstance(e, tu.DictKey) for e in entries):
        return "dict", tuple(_dict_key(e.key, path) for e in entries)
    indices = [
        e.idx if isinstance(e, tu.SequenceKey) else e.key
        for e in entries
        if isinstance(e, tu.SequenceKey | tu.FlattenedIndexKey)
    ]
    if indices == list(range(len(entries))):
        return "tuple" if type(node) is tuple else "list", tuple(indices)
    return "fields", tuple(_text(_raw_key(e), path) for e in entries)


def _dict_key(key: Any, path: Parts) -> Key:
    if isinstance(key, int | np.integer) and not isinstance(key, bool) and fits_int_key(int(key)):
        return int(key)
    text = _text(key, path)
    return text if type(key) is str else OtherKey(text)


def _raw_key(entry: Any) -> Any:
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def _text(key: Any, path: Parts) -> str:
    try:
        text = str(key)
    except ValueError:  # an int of more than 4300 digits
        text = "\ud800"
    if not is_text(text):
        raise UnsupportedLeafError(
            f"the {type(key).__name__} key {ascii(key) if isinstance(key, str) else ''} in "
            f"{join_name(path)!r} cannot be written as text; use another key"
        )
    return text


def _distinct(entries: list[Any], keys: Sequence[Key], path: Parts) -> list[str]:
    """The component of each child, all different."""
    texts = list(map(key_text, keys))
    if len({*texts}) < len(texts):
        twice = next(text for text, n in Counter(texts).items() if n > 1)
        raw = [_raw_key(e) for e, t in zip(entries, texts, strict=True) if t == twice]
        first, second = raw[:2]
        raise TreeMismatchError(
            f"two leaves would share the name {join_name((*path, twice))!r}: "
            f"the {type(first).__name__} key {first!r} and the {type(second).__name__} key "
            f"{second!r} of {join_name(path)!r}; rename one of them"
        )
    return texts


@dataclass(frozen=True)
class Pair:
    """A leaf of the target and the index of the saved leaf that belongs there."""

    target: Leaf
    saved: int


@dataclass(frozen=True)
class Match:
    """How the leaves of a target and the saved leaves correspond.

    Attributes:
        pairs: what to load, in the order of the target's leaves (without placeholders).
        skipped: indices of the saved leaves that the target leaves out: by None or ``...`` in
            their place, or because a partial restore was asked for.
        kept: the target's leaves that were not saved and stay as they are (`match_names`).
    """

    pairs: tuple[Pair, ...]
    skipped: tuple[int, ...]
    kept: tuple[Parts, ...]
    _treedef: Any
    _leaves: tuple[Leaf, ...]

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Puts values into the target's own containers.

        Args:
            values: one value per pair, in the order of `pairs`.

        Returns:
            A tree of exactly the target's structure; placeholders stay ``...``.
        """
        if len(values) != len(self.pairs):
            raise ValueError(f"expected {len(self.pairs)} values, one per pair; got {len(values)}")
        loaded = {pair.target.parts: value for pair, value in zip(self.pairs, values, strict=True)}
        return jax.tree.unflatten(
            self._treedef, [loaded.get(leaf.parts, leaf.value) for leaf in self._leaves]
        )


def match(target: Any, saved: Skeleton | Iterable[Parts], *, partial: bool = False) -> Match:
    """Pairs the leaves of a target with saved leaves, by name.

    Shapes and dtypes are not compared; see `check_shape`.

    Args:
        target: the tree to restore into: concrete or abstract, in any mixture.
        saved: the saved skeleton, or just the path components of every saved leaf, by index.
        partial: accept a target that lacks saved leaves. Every leaf the target has must still
            have been saved.

    Returns:
        The pairs, what was left out, and how to rebuild the target.

    Raises:
        TreeMismatchError: leaves are missing from the checkpoint or from the target.
        UnsupportedLeafError: the target holds something that is neither a leaf nor a placeholder.
    """
    paths = saved.paths if isinstance(saved, Skeleton) else tuple(saved)
    empties = {*saved.empties} if isinstance(saved, Skeleton) else set()
    flat = flatten(target, target=True)
    found, unused = _find(flat, paths)
    missing = [leaf.parts for leaf in flat.leaves if leaf.parts not in found]
    _refuse_mismatch(flat, missing, unused, paths, empties, partial)
    return _matched(target, flat, found, unused)


def match_names(target: Any, saved: Skeleton, *, partial: bool = False) -> Match:
    """Pairs the leaves of a target with saved leaves as Orbax's ``PyTreeRestore`` does.

    Only the target's names and containers count: its leaves may be anything. A placeholder stays
    whether or not it was saved.

    Args:
        target: the tree to restore into.
        saved: the saved skeleton.
        partial: accept a target that lacks saved leaves, and keep those of its leaves for which
            the saved dicts have no place.

    Returns:
        The pairs (of leaves as `flatten_names` gives them), what was left out and kept, and how
        to rebuild the target.

    Raises:
        TreeMismatchError: leaves are missing from the checkpoint or from the target; also where a
            container was saved in a leaf's place, or a leaf, None or a shorter list above it.
    """
    flat = flatten_names(target)
    found, unused = _find(flat, saved.paths)
    lacking = [leaf for leaf in flat.leaves if leaf.parts not in found]
    missing = [
        leaf.parts
        for leaf in lacking
        if leaf.kind != "placeholder" and not (partial and _has_room(saved.root, leaf.parts))
    ]
    _refuse_mismatch(flat, missing, unused, saved.paths, {*saved.empties}, partial)
    return _matched(target, flat, found, unused)


def _has_room(root: Child, path: Parts) -> bool:
    """Whether a leaf of this path could be added to the saved dicts and fields."""
    node = root
    for part in path:
        if not isinstance(node, Node):
            return False
        keyed = node.kind in KEYED
        texts = map(key_text, node.keys) if keyed else map(str, range(len(node.children)))
        children = dict(zip(texts, node.children, strict=True))
        if part not in children:
            return keyed
        node = children[part]
    return False


def _find(flat: Flat, paths: Sequence[Parts]) -> tuple[dict[Parts, int], dict[Parts, int]]:
    """The saved leaf of each of a target's leaves, by name; and the saved ones left over."""
    unused = {path: i for i, path in enumerate(paths)}
    found = {leaf.parts: unused.pop(leaf.parts) for leaf in flat.leaves if leaf.parts in unused}
    lacking = [leaf.parts for leaf in flat.leaves if leaf.parts not in found]
    for path, i in _pair_variables(lacking, unused).items():
        found[path] = i
        del unused[paths[i]]
    return found, unused


def _refuse_mismatch(
    flat: Flat,
    missing: list[Parts],
    unused: Mapping[Parts, int],
    paths: Sequence[Parts],
    were_empty: set[Parts],
    partial: bool,
) -> None:
    empties = {*flat.skeleton.empties}
    extra = [] if partial else [path for path in unused if path not in empties]
    if missing or extra:
        raise TreeMismatchError(_describe_mismatch(missing, extra, paths, flat, were_empty))


def _matched(
    target: Any, flat: Flat, found: Mapping[Parts, int], unused: Mapping[Parts, int]
) -> Match:
    pairs: list[Pair] = []
    skipped = [*unused.values()]
    kept: list[Parts] = []
    for leaf in flat.leaves:
        if leaf.kind == "placeholder":
            skipped += [found[leaf.parts]] if leaf.parts in found else []
        elif leaf.parts in found:
            pairs.append(Pair(leaf, found[leaf.parts]))
        else:
            kept.append(leaf.parts)
    return Match(
        pairs=tuple(pairs),
        skipped=tuple(sorted(skipped)),
        kept=tuple(kept),
        _treedef=jax.tree.structure(target),
        _leaves=flat.leaves,
    )


def _pair_variables(lacking: list[Parts], unused: Mapping[Parts, int]) -> dict[Parts, int]:
    """Pairs leaves whose names differ only by the last component of an nnx variable."""
    saved: dict[Parts, list[int]] = {}
    for path, i in unused.items():
        saved.setdefault(_stem(path), []).append(i)
    stems = Counter(map(_stem, lacking))
    return {
        path: saved[_stem(path)][0]
        for path in lacking
        if stems[_stem(path)] == 1 and len(saved.get(_stem(path), ())) == 1
    }


def _stem(path: Parts) -> Parts:
    return path[:-1] if len(path) > 1 and path[-1] in VARIABLE_FIELDS else path


_SHOWN = 10
_COMPARED = 2000
_LONGEST_COMPARED = 300


def _describe_mismatch(
    missing: list[Parts], extra: list[Parts], saved: Sequence[Parts], flat: Flat, empty: set[Parts]
) -> str:
    lines = ["the checkpoint and the target do not have the same leaves."]
    if missing:
        lines.append(f"{_count(missing)} of the target missing from the checkpoint:")
        # What the target has not claimed is the likelier new name.
        candidates = extra or list(saved)
        for path in missing[:_SHOWN]:
            note = "saved as None or as an empty container" if path in empty else ""
            lines.append(_item(path, note or _nearest(path, candidates, "saved")))
    if extra:
        lines.append(f"{_count(extra)} of the checkpoint missing from the target:")
        candidates = missing or [leaf.parts for leaf in flat.leaves]
        lines += [_item(p, _nearest(p, candidates, "in the target")) for p in extra[:_SHOWN]]
    if missing:
        lines.append(
            "Build the target with the model and optimizer that were saved, or restore without a "
            "target and move the leaves by hand."
        )
    else:
        lines.append(
            "Add them to the target, or restore only what it has: partial_restore=True in "
            "lcjax.args.Restore or PyTreeRestore, partial=True in Ref.as_tree, or put ... in the "
            "place of each leaf."
        )
    return "\n".join(lines)


def _count(paths: list[Parts]) -> str:
    shown = f" (the first {_SHOWN} shown)" if len(paths) > _SHOWN else ""
    return f"{len(paths)} {'leaf' if len(paths) == 1 else 'leaves'}{shown}"


def _item(path: Parts, note: str) -> str:
    return f"  {join_name(path)!r}" + (f" ({note})" if note else "")


def _nearest(path: Parts, candidates: Sequence[Parts], where: str) -> str:
    # difflib takes tens of microseconds per candidate and grows with the square of the length: the
    # error for a tree of 100,000 leaves must not take seconds. Leaves with the same last component
    # come first.
    ranked = [c for c in candidates if c[-1:] == path[-1:]][:_COMPARED]
    ranked += candidates[: _COMPARED - len(ranked)]
    names = [name for name in map(join_name, ranked) if len(name) <= _LONGEST_COMPARED]
    close = difflib.get_close_matches(join_name(path)[:_LONGEST_COMPARED], names, n=1)
    return f"nearest {where}: {close[0]!r}" if close else ""


def build_like(
    target: Any,
    saved: Skeleton | Iterable[Parts],
    getter: Callable[[Leaf, int], Any],
    *,
    partial: bool = False,
) -> Any:
    """Restores into a target's containers, one leaf after the other.

    Args:
        target: as for `match`.
        saved: as for `match`.
        getter: called with the target's leaf and the index of the saved one; returns the value.
        partial: as for `match`.

    Returns:
        A tree of exactly the target's structure.

    Raises:
        TreeMismatchError: as for `match`.

    Example:
        >>> flat = flatten({"a": [1, 2]})
        >>> build_like({"a": (0, 0)}, flat.skeleton, lambda _, i: flat.leaves[i].value)
        {'a': (1, 2)}
    """
    matched = match(target, saved, partial=partial)
    return matched.rebuild([getter(pair.target, pair.saved) for pair in matched.pairs])


def check_shape(name: str, saved_shape: Sequence[int], target_shape: Sequence[int]) -> None:
    """Refuses to restore an array into a target of another shape.

    Args:
        name: the leaf's name, for the message.
        saved_shape: the shape in the checkpoint.
        target_shape: the shape of the target's leaf.

    Raises:
        TreeMismatchError: the shapes differ.
    """
    if tuple(saved_shape) != tuple(target_shape):
        raise TreeMismatchError(
            f"leaf {name!r} was saved with shape {tuple(saved_shape)}, but the target has shape "
            f"{tuple(target_shape)}: build the target with the saved model's sizes, or restore "
            "without a target and reshape the leaf"
        )

"""The containers of a saved tree, as plain data that JSON can hold.

In JSON a leaf is its index, None is null, and every other node is a list whose first item is its
kind::

    ["dict",   ["b", 1, {"other": "(2, 3)"}], child, child, child]
    ["fields", ["step", "params"], child, child]      namedtuple, dataclass, attributes
    ["list",   child, ...]
    ["tuple",  child, ...]

One level of the tree is one level of JSON, and `MAX_DEPTH` bounds both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from lcjax._tree_names import Parts, is_text, join_name
from lcjax.errors import CorruptDataError

MAX_DEPTH = 256
"""Containers may be nested this deep, when saving and when reading."""

MAX_NAME_CHARS = 1 << 26
"""Limit on the characters of all leaf names together: a small file can spell enormous names."""

KINDS = ("dict", "list", "tuple", "fields")
KEYED = ("dict", "fields")
_INT_KEY_LIMIT = 1 << 63


class OtherKey(NamedTuple):
    """A dict key that is neither str nor a 64-bit int: only its `str` is kept."""

    text: str


Key: TypeAlias = str | int | OtherKey


class Node(NamedTuple):
    """A container: its kind, its keys (empty for lists and tuples) and its children."""

    kind: str
    keys: tuple[Key, ...]
    children: "tuple[Child, ...]"


Child: TypeAlias = "Node | int | None"


@dataclass(frozen=True)
class Skeleton:
    """A tree without its leaves' values.

    Attributes:
        root: the outermost node; a leaf is its index, None is itself.
        paths: the path components of every leaf, by index.
        empties: the paths of None nodes and of containers without children.
    """

    root: Child
    paths: tuple[Parts, ...]
    empties: tuple[Parts, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every leaf, by index."""
        return tuple(map(join_name, self.paths))


def key_text(key: Key) -> str:
    """The path component that a key becomes."""
    return key.text if isinstance(key, OtherKey) else str(key)


def fits_int_key(value: int) -> bool:
    """Whether an int dict key is stored as a number (64 bits, as other readers' JSON has)."""
    return -_INT_KEY_LIMIT <= value < _INT_KEY_LIMIT


def name_cost(path: Parts) -> int:
    """What a path counts towards `MAX_NAME_CHARS`: its characters and one for each component."""
    return sum(map(len, path)) + len(path)


def to_json_skeleton(skeleton: Skeleton) -> Any:
    """Describes a skeleton by lists, strings, integers and null, for `json.dumps`.

    Args:
        skeleton: what `flatten` returned.

    Returns:
        The description; see the head of ``_tree_skeleton.py`` for its form.
    """
    return _encode(skeleton.root)


def _encode(child: Child) -> Any:
    if child is None or isinstance(child, int):
        return child
    keys = [{"other": k.text} if isinstance(k, OtherKey) else k for k in child.keys]
    head: list[Any] = [child.kind, keys] if child.kind in KEYED else [child.kind]
    for c in child.children:  # a comprehension would take a second stack frame per level
        head.append(_encode(c))
    return head


def validate_skeleton(obj: object, num_leaves: int | None = None) -> Skeleton:
    """Reads what `to_json_skeleton` wrote, trusting nothing.

    `json.loads` itself raises `RecursionError` for text nested thousands deep; whoever calls it on
    a file must catch that too.

    Args:
        obj: an object from `json.loads`; it may come from a damaged or hostile file.
        num_leaves: how many leaves the file holds, if that is known.

    Returns:
        The skeleton, in which every leaf index below the number of leaves occurs once.

    Raises:
        CorruptDataError: a wrong type, an unknown kind, a key that occurs twice, an index missing,
            repeated or out of range, or a limit (`MAX_DEPTH`, `MAX_NAME_CHARS`) passed.
    """
    reader = _Reader()
    root = reader.read(obj, ())
    leaves = reader.leaves
    wanted = len(leaves) if num_leaves is None else num_leaves
    # The indices are distinct, so the right number of them, all in range, is all of them.
    bad = next((i for i in leaves if not 0 <= i < wanted), None)
    if bad is not None:
        raise CorruptDataError(
            f"skeleton: leaf {join_name(leaves[bad])!r} has index {_number(bad)}, "
            f"expected 0 <= index < {wanted}"
        )
    if len(leaves) != wanted:
        raise CorruptDataError(
            f"skeleton: it has {len(leaves)} leaves, the file's index has {wanted}"
        )
    return Skeleton(root, tuple(leaves[i] for i in range(wanted)), tuple(reader.empties))


class _Reader:
    """Checks one skeleton; collects the paths of its leaves and of its empty nodes."""

    def __init__(self) -> None:
        self.leaves: dict[int, Parts] = {}
        self.empties: list[Parts] = []
        self.chars_left = MAX_NAME_CHARS

    def read(self, obj: object, path: Parts) -> Child:
        if obj is None:
            self._note_empty(path)
            return None
        if type(obj) is int:
            self._note_leaf(obj, path)
            return obj
        if not isinstance(obj, list) or not obj or obj[0] not in KINDS:
            raise CorruptDataError(
                f"skeleton: at {join_name(path)[:200]!r} expected an index, null or a list that "
                f"starts with one of {KINDS}, found a {type(obj).__name__}"
            )
        if len(path) >= MAX_DEPTH:
            raise CorruptDataError(f"skeleton: containers nested more than {MAX_DEPTH} deep")
        return self._read_node(obj[0], obj[1:], path)

    def _read_node(self, kind: str, items: list[object], path: Parts) -> Node:
        keys: tuple[Key, ...] = ()
        if kind in KEYED:
            keys = _decode_keys(items[0] if items else None, kind, path)
            items = items[1:]
            if len(keys) != len(items):
                raise CorruptDataError(
                    f"skeleton: {join_name(path)!r} has {len(keys)} keys and {len(items)} children"
                )
        if not items:
            self._note_empty(path)
        texts = map(key_text, keys or range(len(items)))
        children: list[Child] = []
        for text, item in zip(texts, items, strict=True):
            children.append(self.read(item, (*path, text)))
        return Node(kind, keys, tuple(children))

    def _note_empty(self, path: Parts) -> None:
        self._charge(path)
        self.empties.append(path)

    def _note_leaf(self, index: int, path: Parts) -> None:
        self._charge(path)
        if index in self.leaves:
            raise CorruptDataError(
                f"skeleton: {join_name(self.leaves[index])!r} and {join_name(path)!r} "
                f"both claim leaf {_number(index)}"
            )
        self.leaves[index] = path

    def _charge(self, path: Parts) -> None:
        self.chars_left -= name_cost(path)
        if self.chars_left < 0:
            raise CorruptDataError(f"skeleton: leaf names pass {MAX_NAME_CHARS} characters")


def _decode_keys(obj: object, kind: str, path: Parts) -> tuple[Key, ...]:
    if not isinstance(obj, list):
        raise CorruptDataError(f"skeleton: {join_name(path)!r} has no list of keys")
    keys = tuple(_decode_key(key, kind, path) for key in obj)
    if len({*map(key_text, keys)}) != len(keys):
        raise CorruptDataError(f"skeleton: {join_name(path)!r} has the same key twice")
    return keys


def _decode_key(obj: object, kind: str, path: Parts) -> Key:
    if isinstance(obj, str) and is_text(obj):
        return obj
    if kind == "dict":
        if type(obj) is int and fits_int_key(obj):
            return obj
        if isinstance(obj, dict) and len(obj) == 1:
            text = obj.get("other")
            if isinstance(text, str) and is_text(text):
                return OtherKey(text)
    raise CorruptDataError(
        f"skeleton: {join_name(path)!r} has a key that no {kind} node has, a {type(obj).__name__}"
    )


def _number(value: int) -> str:
    # Decimal text of a huge int is slow and limited.
    return str(value) if fits_int_key(value) else "of more than 64 bits"


def build(skeleton: Skeleton, values: Sequence[Any]) -> Any:
    """Builds a tree from values alone, without a target to take the classes from.

    Containers come back as Orbax's ``StandardRestore`` without a target gives them: dicts and
    mappings (``FrozenDict``, ``OrderedDict``, ``nnx.State``) as dict; lists and non-empty tuples
    as list; namedtuples, dataclasses and other classes as dict of their named fields (as list if
    they name none), or None if they have no children (``optax.EmptyState``); None, {}, [] and ()
    as themselves.

    Different on purpose:

    * int keys of a dict come back as int, where Orbax turns them into str (other keys become str
      in both);
    * dicts keep the order in which JAX visits them; Orbax sorts;
    * a bare leaf, an empty tree, str, bytes, complex and large ints are accepted;
    * names that Orbax would confuse ("a.b" beside "b" inside "a") stay apart.

    Args:
        skeleton: from `flatten` or `validate_skeleton`.
        values: one value per leaf, by index.

    Returns:
        The tree.

    Raises:
        ValueError: the number of values is not the number of leaves.
    """
    if len(values) != len(skeleton.paths):
        raise ValueError(f"expected {len(skeleton.paths)} values, one per leaf; got {len(values)}")
    return _build(skeleton.root, values)


def _build(child: Child, values: Sequence[Any]) -> Any:
    if child is None:
        return None
    if isinstance(child, int):
        return values[child]
    items: list[Any] = []
    for c in child.children:  # one stack frame per level, as in _encode
        items.append(_build(c, values))
    if child.kind == "fields" and not items:
        return None
    if child.kind == "tuple" and not items:
        return ()
    if child.kind in ("list", "tuple"):
        return items
    keys = [k.text if isinstance(k, OtherKey) else k for k in child.keys]
    return dict(zip(keys, items, strict=True))

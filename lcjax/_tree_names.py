"""Leaf names: a tuple of path components, written as one string and read back."""

from collections.abc import Sequence
from typing import TypeAlias

from lcjax.errors import CorruptDataError

Parts: TypeAlias = tuple[str, ...]

# "~" and "/" are escaped as in JSON pointers (RFC 6901). An empty component gets an escape of its
# own, so that the empty string is free to name a tree that is one bare leaf.
_EMPTY = "~e"
_UNESCAPED = {"e": "", "0": "~", "1": "/"}


def is_text(text: str) -> bool:
    """Whether `text` can be written as UTF-8, that is, has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def join_name(parts: Sequence[str]) -> str:
    """Writes path components as one name, such as ``params/Dense_0/kernel``.

    Inside a component ``~`` becomes ``~0`` and ``/`` becomes ``~1``; an empty component becomes
    ``~e``. No two tuples of components share a name. The empty name is the root, a bare leaf.

    Args:
        parts: the components, outermost first.

    Returns:
        The name; `split_name` gives the components back.

    Example:
        >>> join_name(("params", "a/b", ""))
        'params/a~1b/~e'
    """
    return "/".join(p.replace("~", "~0").replace("/", "~1") or _EMPTY for p in parts)


def split_name(name: str) -> Parts:
    """Reads a name written by `join_name`.

    Args:
        name: the name. Names come from files, so any other text is refused.

    Returns:
        The path components.

    Raises:
        CorruptDataError: `join_name` never writes this text.

    Example:
        >>> split_name("params/a~1b/~e")
        ('params', 'a/b', '')
    """
    if name == "":
        return ()
    parts = tuple(_unescape(text, name) for text in name.split("/"))
    # One spelling per name: "a~e" and "a//b" would otherwise be aliases.
    if join_name(parts) != name:
        raise CorruptDataError(f"leaf name {name!r} is not a path as lcjax writes it")
    return parts


def _unescape(text: str, name: str) -> str:
    first, *rest = text.split("~")
    try:
        return first + "".join(_UNESCAPED[piece[:1]] + piece[1:] for piece in rest)
    except KeyError:
        raise CorruptDataError(
            f"leaf name {name!r} has an unknown escape; expected ~0, ~1 or ~e after each '~'"
        ) from None

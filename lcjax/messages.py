"""The pure functions: a tree to a message and back, without files and without Orbax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lcjax import capture, container, policy, rebuilt, segment, state, tree
from lcjax.codecs import moments
from lcjax.container import Writer
from lcjax.errors import BaseMismatchError, CorruptDataError
from lcjax.policy import Preset
from lcjax.record import (
    Record,
    fidelity_to_json,
    from_meta,
    memory_limit,
    read_leaves,
    with_losses,
)


@dataclass(frozen=True)
class Ref:
    """A state as every reader rebuilds it: the base of the next message.

    Attributes:
      id: content hash of the state; a delta names its base by it.
      preset: the preset that ``encode`` goes on with unless told otherwise.
      fidelity: what the lossy leaves lost in this step, or None.
    """

    id: str
    preset: Preset
    fidelity: dict[str, Any] | None
    _reference: state.Reference = field(repr=False)
    _skeleton: tree.Skeleton = field(repr=False)
    _kinds: tuple[tuple[str, str | None], ...] = field(repr=False)
    _values: tuple[Any, ...] = field(repr=False)

    @property
    def tree(self) -> Any:
        """The state in plain containers (dicts and lists), see ``lcjax.tree.build``."""
        values = [rebuilt.as_leaf(v, kind, impl) for v, (kind, impl) in self._pairs()]
        return tree.build(self._skeleton, values)

    def as_tree(self, target: Any, *, partial: bool = False) -> Any:
        """The state in a target's own containers.

        Args:
          target: a tree of the same leaves, concrete or abstract.
          partial: allow a target that leaves some out.

        Raises:
          TreeMismatchError: other leaves or other shapes.
        """
        pairs = list(self._pairs())

        def get(leaf: tree.Leaf, number: int) -> Any:
            value, (kind, impl) = pairs[number]
            made = rebuilt.as_leaf(value, kind, impl)
            if leaf.spec is not None:
                tree.check_shape(leaf.name, np.shape(made), leaf.spec.shape)
            return made

        return tree.build_like(target, self._skeleton, get, partial=partial)

    def _pairs(self) -> Any:
        return zip(self._values, self._kinds, strict=True)


def encode(
    pytree: Any,
    ref: Ref | None = None,
    *,
    preset: str | Preset | None = None,
    bits: int | None = None,
    scope: str | None = None,
) -> tuple[bytes, Ref]:
    """Encodes a tree as a message: a key frame, or a delta against a reference.

    Nothing is kept but what is returned: forget the new reference, and the old one still
    is a good base.

    Args:
      pytree: any tree of arrays and Python scalars.
      ref: the state that the reader has; None for a key frame.
      preset: ``"paper"`` or ``"lossless"``; may be left out where ``ref`` has one.
      bits: code width of ``paper``, 1 to 8.
      scope: ``"model"`` or ``"leaf"``, see ``lcjax.policy.Preset``.

    Returns:
      The message, and the reference that a reader of it will have.

    Raises:
      PresetError: no preset, or an unknown one.
      UnsupportedLeafError: a leaf that cannot be stored.
    """
    if preset is None and ref is not None:
        preset = ref.preset
    chosen = policy.resolve(preset, bits, scope)
    taken = capture.capture(tree.flatten(pytree), chosen)
    encoded = state.encode(taken.snapshot, None if ref is None else ref._reference)
    fidelity = fidelity_to_json(encoded.fidelity)
    record = Record(
        taken.flat.skeleton,
        with_losses(taken.flat.skeleton.names, taken.leaves, encoded),
        chosen.to_json(),
        encoded.is_key,
        fidelity=fidelity,
    )
    writer = Writer()
    for part in (encoded.chain, encoded.own):
        writer.add(b"" if part is None else part.to_bytes())
    message = writer.finish(record.to_meta("message")).to_bytes()

    values = rebuilt.values_of(taken, encoded)
    new = Ref(
        encoded.reference.state,
        chosen,
        fidelity,
        encoded.reference,
        taken.flat.skeleton,
        _kinds(record),
        values,
    )
    return message, new


def decode(message: Any, ref: Ref | None = None, *, max_bytes: int | None = None) -> Ref:
    """Decodes a message.

    Args:
      message: bytes-like, not trusted.
      ref: the state that the message's deltas start from; not needed for a key frame.
      max_bytes: limit on the decoded arrays' bytes; by default this machine's memory.

    Returns:
      The new state; its ``tree`` holds the values.

    Raises:
      BaseMismatchError: the message is a delta on another state than ``ref``.
      CorruptDataError: the message is damaged.
      UnsupportedFormatError: a later release wrote it.
    """
    reader = container.from_bytes(message)
    record = from_meta(reader.meta, "message", reader.where)
    if len(reader) != 2:
        raise CorruptDataError(f"a message has 2 chunks, this one has {len(reader)}")
    parts = [
        [] if not len(data) else [segment.parse(container.from_bytes(data, where), [kind])]
        for data, where, kind in (
            (reader.chunk(0), "message: chain", "chain"),
            (reader.chunk(1), "message: own", "own"),
        )
    ]
    chain, own = parts
    base = chain[0].base if chain else None
    if base is not None and (ref is None or ref.id != base):
        raise BaseMismatchError(
            f"the message is a delta on state {base}, and the given reference is "
            f"{'none' if ref is None else ref.id}; decode the messages in order, beginning at "
            "a key frame"
        )
    limit = memory_limit() if max_bytes is None else max_bytes
    values, trails = read_leaves(
        record,
        range(len(record.leaves)),
        [chain],
        own,
        base=_lookup(ref) if base is not None else None,
        known=_known_trail(ref) if base is not None else None,
        max_bytes=limit,
        where="message",
    )
    chained = {
        name: value
        for name, leaf, value in zip(record.names, record.leaves, values, strict=True)
        if leaf.spec is not None and leaf.codec in policy.CHAINED
    }
    new_id = chain[0].state if chain else ""
    return Ref(
        new_id,
        policy.preset_from_json(record.preset),
        record.fidelity,
        state.Reference.from_values(new_id, chained, record.notes(), trails),
        record.skeleton,
        _kinds(record),
        tuple(values),
    )


def _lookup(ref: Ref | None) -> Any:
    assert ref is not None
    known = ref._reference

    def base(name: str) -> np.ndarray:
        if name not in known.specs:
            raise CorruptDataError(
                f"message: leaf {name!r} is a delta, and its base has no such leaf"
            )
        return known.value(name)

    return base


def _known_trail(ref: Ref | None) -> Any:
    assert ref is not None
    trails = ref._reference.trails

    def known(recipe: moments.Recipe) -> np.ndarray:
        if recipe not in trails:
            raise CorruptDataError(
                f"message: a moment is predicted from {recipe.span + 1} deltas of leaf "
                f"{recipe.param!r}, more than its base knows"
            )
        return trails[recipe]

    return known


def _kinds(record: Record) -> tuple[tuple[str, str | None], ...]:
    return tuple(
        (leaf.kind, None if leaf.spec is None else leaf.spec.impl) for leaf in record.leaves
    )

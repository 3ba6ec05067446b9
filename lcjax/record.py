"""The record of a saved tree: its containers, what each leaf is, and where its values lie.

It is the ``meta`` of a step's manifest and of a message. Fields::

    kind       "manifest" or "message"
    producer   the release that wrote it
    step       the training step, or null
    preset     {"name": ..., options}
    key_frame  whether the chained leaves stand by themselves in this save
    skeleton   the containers, see lcjax/_tree_skeleton.py
    leaves     one entry per leaf, in skeleton order: {"kind", "codec", "dtype", "shape",
               "weak_type", "impl", "sharding"} for arrays, {"kind", "value"} for scalars
    shardings  texts that leaves refer to by number
    segments   see lcjax/chain.py (manifests only)
    fidelity   what lossy leaves lost in this save, or null
    custom     the caller's own JSON as text, or null
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lcjax import _version, segment, tree
from lcjax.codecs import moments
from lcjax.dtypes import dtype_from_name
from lcjax.errors import CorruptDataError
from lcjax.jobs import Loss
from lcjax.policy import CHAINED, OWN
from lcjax.scales import Note
from lcjax.state import Encoded

MEMORY_LIMIT_VARIABLE = "LCJAX_MAX_RESTORE_BYTES"


class Lost(NamedTuple):
    """What a save lost of a leaf, in few digits.

    Attributes:
      relative_error: ``|u - c_new| / |u - c_old|`` (Euclidean norms); of a key frame, and of
        leaves outside the chain, ``|u - c_new| / |u|``. None where that is 0 / 0.
      max_error: largest ``|u - c_new|``.
      zeros: elements postponed or dropped (code 0).
      odd: elements stored exactly because they are not finite or out of range.
      left: root of the sum of ``(u - c_new)^2``.
      step: the step of a leaf stored in steps, else 0.
    """

    relative_error: float | None
    max_error: float
    zeros: int
    odd: int
    left: float
    step: float

    @classmethod
    def of(cls, loss: Loss, step: float) -> Lost:
        """The few digits of a loss."""
        return cls(
            _ratio(loss.error_squares, loss.delta_squares),
            _digits(loss.max_error, 2),
            loss.zeros,
            loss.odd,
            # Later steps are chosen from those of leaves stored in steps.
            _digits(loss.error_squares**0.5, 6 if step else 3),
            _digits(step, 4),
        )


@dataclass(frozen=True)
class LeafRecord:
    """What a leaf is.

    Attributes:
      kind: as ``tree.Leaf.kind``.
      codec: as in ``lcjax.policy``; None for Python scalars.
      spec: shape and dtype as the user sees them; None for Python scalars.
      value: a Python scalar's value.
      sharding: number of its sharding's text, or None.
      lost: what this save lost of it; None where it is exact.
    """

    kind: str
    codec: str | None = None
    spec: tree.ArraySpec | None = None
    value: Any = None
    sharding: int | None = None
    lost: Lost | None = None

    def to_json(self) -> dict[str, Any]:
        """The record's entry; fields at their defaults are left out."""
        if self.spec is None:
            return {"kind": self.kind, "value": tree.scalar_to_json(self.value)}
        entry: dict[str, Any] = {
            "kind": self.kind,
            "codec": self.codec,
            "dtype": self.spec.dtype,
            "shape": list(self.spec.shape),
        }
        if self.spec.weak_type:
            entry["weak_type"] = True
        if self.spec.impl is not None:
            entry["impl"] = self.spec.impl
        if self.sharding is not None:
            entry["sharding"] = self.sharding
        if self.lost is not None:
            entry["lost"] = list(self.lost)
        return entry


@dataclass(frozen=True)
class Record:
    """A saved tree without its array values; see the module's docstring."""

    skeleton: tree.Skeleton
    leaves: tuple[LeafRecord, ...]
    preset: dict[str, Any]
    key_frame: bool
    step: int | None = None
    shardings: tuple[str, ...] = ()
    fidelity: dict[str, Any] | None = None
    custom: str | None = None
    producer: str = f"lcjax {_version.__version__}"

    def to_meta(self, kind: str) -> dict[str, Any]:
        """The JSON-able form."""
        return {
            "kind": kind,
            "producer": self.producer,
            "step": self.step,
            "preset": self.preset,
            "key_frame": self.key_frame,
            "skeleton": tree.to_json_skeleton(self.skeleton),
            "leaves": [leaf.to_json() for leaf in self.leaves],
            "shardings": list(self.shardings),
            "fidelity": self.fidelity,
            "custom": self.custom,
        }

    @property
    def custom_json(self) -> Any:
        """The caller's own JSON, or None.

        Raises:
          CorruptDataError: the text is not JSON.
        """
        try:
            return None if self.custom is None else json.loads(self.custom)
        except (ValueError, RecursionError) as e:
            raise CorruptDataError(f"the custom metadata are damaged: {e}") from e

    def notes(self) -> dict[str, Note]:
        """What the next save wants to know of leaves stored in steps."""
        return {
            name: Note(leaf.lost.step, leaf.lost.left**2)
            for name, leaf in zip(self.names, self.leaves, strict=True)
            if leaf.lost is not None and leaf.lost.step > 0
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The leaves' names, in skeleton order."""
        return self.skeleton.names


def from_meta(meta: dict[str, Any], kind: str, where: str) -> Record:
    """Checks a record that was read from a file.

    Raises:
      CorruptDataError: a field is missing, damaged or of another kind of file.
    """
    if meta.get("kind") != kind:
        raise CorruptDataError(f"{where}: is a {meta.get('kind')!r} file, expected a {kind}")
    raw = meta.get("leaves")
    if not isinstance(raw, list):
        raise CorruptDataError(f"{where}: its list of leaves is missing or damaged")
    try:
        skeleton = tree.validate_skeleton(meta.get("skeleton"), len(raw))
    except CorruptDataError as e:
        raise CorruptDataError(f"{where}: {e}") from e
    shardings = meta.get("shardings", [])
    if not isinstance(shardings, list) or not all(isinstance(s, str) for s in shardings):
        raise CorruptDataError(f"{where}: its shardings are damaged")
    names = skeleton.names
    leaves = tuple(
        _leaf_from_json(entry, len(shardings), f"{where}: leaf {names[k]!r}")
        for k, entry in enumerate(raw)
    )
    preset, step, fidelity = meta.get("preset"), meta.get("step"), meta.get("fidelity")
    custom = meta.get("custom")
    if not (
        isinstance(preset, dict)
        and isinstance(preset.get("name"), str)
        and (step is None or type(step) is int)
        and (fidelity is None or isinstance(fidelity, dict))
        and (custom is None or isinstance(custom, str))
        and isinstance(meta.get("producer"), str)
    ):
        raise CorruptDataError(f"{where}: its preset, step, fidelity or custom text is damaged")
    return Record(
        skeleton,
        leaves,
        preset,
        meta.get("key_frame") is True,
        step,
        tuple(shardings),
        fidelity,
        custom,
        meta["producer"],
    )


def _leaf_from_json(entry: Any, shardings: int, where: str) -> LeafRecord:
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise CorruptDataError(f"{where}: its description is damaged")
    kind = entry["kind"]
    if kind in ("jax", "numpy", "key"):
        shape = segment.parse_shape(entry.get("shape"), where)
        dtype = dtype_from_name(entry.get("dtype"), where)
        impl, sharding = entry.get("impl"), entry.get("sharding")
        if not (
            entry.get("codec") in (*CHAINED, *OWN)
            and (isinstance(impl, str) if kind == "key" else impl is None)
            and (sharding is None or (type(sharding) is int and 0 <= sharding < shardings))
        ):
            raise CorruptDataError(f"{where}: its description is damaged")
        spec = tree.ArraySpec(shape, dtype.name, entry.get("weak_type") is True, impl)
        lost = _lost_from_json(entry.get("lost"), where)
        return LeafRecord(kind, entry["codec"], spec, None, sharding, lost)
    try:
        value = tree.scalar_from_json(entry.get("value"))
    except CorruptDataError as e:
        raise CorruptDataError(f"{where}: {e}") from e
    if type(value).__name__ != kind:
        raise CorruptDataError(f"{where}: a {type(value).__name__} where a {kind} is announced")
    return LeafRecord(kind, None, None, value)


def _lost_from_json(raw: Any, where: str) -> Lost | None:
    if raw is None:
        return None
    good = isinstance(raw, list) and len(raw) == len(Lost._fields)
    numbers = [0 if k == 0 and x is None else x for k, x in enumerate(raw)] if good else []
    if not good or not all(
        type(x) in (int, float) and math.isfinite(x) and x >= 0 for x in numbers
    ):
        raise CorruptDataError(f"{where}: what it says of its losses is damaged")
    return Lost(*raw)


def with_losses(
    names: Sequence[str], leaves: Sequence[LeafRecord], encoded: Encoded
) -> tuple[LeafRecord, ...]:
    """The leaves' records with what an encoding lost of each."""
    notes = encoded.reference.notes
    return tuple(
        leaf
        if name not in encoded.losses
        else replace(
            leaf,
            lost=Lost.of(encoded.losses[name], notes[name].step if name in notes else 0.0),
        )
        for name, leaf in zip(names, leaves, strict=True)
    )


def _digits(value: float, digits: int) -> float:
    """A finite number with few digits, as JSON has it."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else 3.4e38


def _ratio(a: float, b: float) -> float | None:
    return _digits((a / b) ** 0.5, 3) if b > 0 and math.isfinite(a / b) else None


def fidelity_to_json(lost: Loss | None) -> dict[str, Any] | None:
    """What a step's metadata says of the parameters in a lossy save.

    ``relative_error`` is ``|u - c_new| / |u - c_old|`` and ``state_error`` is
    ``|u - c_new| / |u|`` (Euclidean norms over the lossy leaves), ``max_error`` is the
    largest ``|u - c_new|``. Four digits are kept.
    """
    if lost is None:
        return None

    return {
        "relative_error": _ratio(lost.error_squares, lost.delta_squares),
        "state_error": _ratio(lost.error_squares, lost.state_squares),
        "max_error": _digits(lost.max_error, 4),
    }


def read_leaves(
    record: Record,
    wanted: Sequence[int],
    chains: Sequence[Sequence[segment.Segment]],
    own: Sequence[segment.Segment],
    *,
    base: Callable[[str], np.ndarray] | None = None,
    known: Callable[[moments.Recipe], np.ndarray] | None = None,
    max_bytes: int | None = None,
    where: str,
) -> Read:
    """Values of leaves: numpy arrays as stored (key data for PRNG keys), Python scalars.

    Args:
      record: the tree's record.
      wanted: numbers of the leaves.
      chains: opened chain segments, one chain per writing process, each oldest first.
      own: opened segments of leaves that stand alone.
      base: gives leaves before the chain's first segment, see ``segment.decode_leaf``.
      known: gives trails before it, see ``segment.decode_trails``.
      max_bytes: limit on the arrays' bytes together (unpacking one passes through up to
        twice its bytes besides), None where the caller has compared the shapes with a
        target's.
      where: how errors call the checkpoint.

    Raises:
      CorruptDataError: damaged data, or more bytes than the limit.
    """
    sources: list[list[Sequence[segment.Segment]] | None] = []
    total = 0
    names = record.names
    for k in wanted:
        leaf = record.leaves[k]
        if leaf.spec is None:
            sources.append(None)
            continue
        found = _sources(leaf, names[k], chains, own, where)
        sources.append(found)
        entry = found[0][-1].leaves[names[k]]
        total += math.prod(entry.shape) * entry.dtype.itemsize
        if max_bytes is not None and total > max_bytes:
            raise CorruptDataError(
                f"{where}: unpacks to more than {max_bytes} bytes. If that is right, give a "
                f"target with the expected shapes or set {MEMORY_LIMIT_VARIABLE}"
            )

    chained = {name for one in chains if one for name in one[-1].leaves}
    reading = Reading(
        record, dict(zip(wanted, sources, strict=True)), chains, base, known, chained, where
    )
    values: dict[int, Any] = {}
    trails: dict[moments.Recipe, np.ndarray] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for part, found_trails in pool.map(reading.read_group, reading.groups()):
            values.update(part)
            trails.update(found_trails)
    return Read([values[k] for k in wanted], trails)


class Read(NamedTuple):
    """What was read: the leaves' values, and the trails that their moments were made from."""

    values: list[Any]
    trails: dict[moments.Recipe, np.ndarray]


@dataclass(frozen=True)
class Reading:
    """Leaves to read, and where they are.

    Attributes:
      record: the tree's record.
      sources: number of a wanted leaf -> the segments that hold it; None for scalars.
      chains: the opened chains.
      base: as ``read_leaves`` has it.
      known: as ``read_leaves`` has it.
      chained: names of the leaves that a chain holds.
      where: how errors call the checkpoint.
    """

    record: Record
    sources: dict[int, list[Sequence[segment.Segment]] | None]
    chains: Sequence[Sequence[segment.Segment]]
    base: Callable[[str], np.ndarray] | None
    known: Callable[[moments.Recipe], np.ndarray] | None
    chained: set[str]
    where: str

    def groups(self) -> list[list[int]]:
        """Wanted leaves that are read together: moments with the leaves they were coded with."""
        names = self.record.names
        place = {names[k]: k for k in self.sources}
        home: dict[int, list[int]] = {k: [k] for k in self.sources}
        for k in self.sources:
            given = self._given_of(k)
            for other in () if given is None else given.names:
                if other not in self.chained:
                    raise CorruptDataError(
                        f"{self.where}: leaf {names[k]!r} was coded with leaf {other!r}, which no "
                        "chain has"
                    )
                self._check_shape(k, other)
                if other in place and home[place[other]] is not home[k]:
                    joined = home[k] + home[place[other]]
                    home.update(dict.fromkeys(joined, joined))
        return list({id(group): group for group in home.values()}.values())

    def read_group(
        self, group: Sequence[int]
    ) -> tuple[dict[int, Any], dict[moments.Recipe, np.ndarray]]:
        """The values of leaves that belong together, by number, and the trails made on the way."""
        names = self.record.names
        given = {k: found for k in group if (found := self._given_of(k)) is not None}
        recipes = {g.recipe for g in given.values() if g.recipe is not None}
        known: dict[str, np.ndarray] = {}
        trails: dict[moments.Recipe, np.ndarray] = {}
        for param in sorted({recipe.param for recipe in recipes}):
            mine = sorted(recipe for recipe in recipes if recipe.param == param)
            known[param], made = segment.decode_trails(
                self._holders(param), mine, self.base, self.known
            )
            trails |= made

        def chained(name: str) -> np.ndarray:
            if name not in known:
                known[name] = segment.decode_leaf(self._holders(name), name, self.base)
            return known[name]

        out: dict[int, Any] = {}
        for k in group:
            holders = self.sources[k]
            if holders is None:
                out[k] = self.record.leaves[k].value
            elif k in given:
                partners = self._partners(k, given[k], chained, trails)
                out[k] = segment.decode_leaf(holders, names[k], partners=partners)
            elif self.record.leaves[k].codec in CHAINED:
                out[k] = chained(names[k])
            else:
                out[k] = segment.decode_leaf(holders, names[k], self.base)
        return out, trails

    def _holders(self, name: str) -> list[Sequence[segment.Segment]]:
        return [c for c in self.chains if c and name in c[-1].leaves]

    def _given_of(self, k: int) -> segment.Given | None:
        """What a moment was coded with; None for other leaves.

        Raises:
          CorruptDataError: its chunks disagree.
        """
        name = self.record.names[k]
        found = {
            chunk.given
            for segments in self.sources[k] or ()
            for chunk in segments[-1].leaves[name].chunks.values()
            if chunk.codec == "moment"
        }
        if len(found) > 1:
            raise CorruptDataError(
                f"{self.where}: the chunks of leaf {name!r} were coded with different leaves"
            )
        return found.pop() if found else None

    def _check_shape(self, k: int, other: str) -> None:
        """Refuses a leaf to decode a moment with that is not of its shape, before reading it."""
        moment, name = self.sources[k], self.record.names[k]
        assert moment is not None
        own = moment[0][-1]
        for chain in self._holders(other):
            if chain[-1].leaves[other].shape != own.leaves[name].shape:
                raise CorruptDataError(
                    f"{own.reader.where}: leaf {name!r} was coded with leaf {other!r}, which has "
                    "another shape"
                )

    def _partners(
        self,
        k: int,
        given: segment.Given,
        chained: Callable[[str], np.ndarray],
        trails: dict[moments.Recipe, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """The parameter's trail, and the root of the second moment, for a moment."""
        holders = self.sources[k]
        assert holders is not None
        name = self.record.names[k]
        shape = holders[0][-1].leaves[name].shape
        size = math.prod(shape)
        trail = np.zeros(size, np.float32) if given.recipe is None else trails[given.recipe]
        root = np.ones(size, np.float32)
        return trail, root if given.nu is None else moments.root_of(chained(given.nu))


def memory_limit() -> int:
    """Default for ``max_bytes``: the environment's limit, else this machine's memory."""
    text = os.environ.get(MEMORY_LIMIT_VARIABLE)
    if text:
        try:
            return int(text)
        except ValueError:
            raise ValueError(
                f"{MEMORY_LIMIT_VARIABLE} must be a whole number of bytes, got {text!r}"
            ) from None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 1 << 36


def _sources(
    leaf: LeafRecord,
    name: str,
    chains: Sequence[Sequence[segment.Segment]],
    own: Sequence[segment.Segment],
    where: str,
) -> list[Sequence[segment.Segment]]:
    """The segments that hold a leaf, checked against what the record says of it."""
    assert leaf.spec is not None
    candidates = chains if leaf.codec in CHAINED else [[s] for s in own]
    found = [segments for segments in candidates if segments and name in segments[-1].leaves]
    if not found:
        raise CorruptDataError(f"{where}: no segment holds leaf {name!r}")
    for segments in found:
        entry = segments[-1].leaves[name]
        shape = entry.shape
        if leaf.kind == "key":  # key data have the key's own words as a last dimension
            shape = shape[: len(leaf.spec.shape)]
            if len(entry.shape) != len(shape) + 1 or not 0 < entry.shape[-1] <= 16:
                shape = (-1,)
        if shape != leaf.spec.shape or entry.dtype.name != leaf.spec.dtype:
            raise CorruptDataError(
                f"{segments[-1].reader.where}: leaf {name!r} is {entry.dtype.name}"
                f"{list(entry.shape)} in the segment, but {leaf.spec.dtype}"
                f"{list(leaf.spec.shape)} in {where}"
            )
    return found

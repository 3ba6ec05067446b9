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
from dataclasses import dataclass
from typing import Any

import numpy as np

from lcjax import _version, segment, tree
from lcjax.codecs import lc
from lcjax.dtypes import dtype_from_name
from lcjax.errors import CorruptDataError

MEMORY_LIMIT_VARIABLE = "LCJAX_MAX_RESTORE_BYTES"


@dataclass(frozen=True)
class LeafRecord:
    """What a leaf is.

    Attributes:
      kind: as ``tree.Leaf.kind``.
      codec: as in ``lcjax.policy``; None for Python scalars.
      spec: shape and dtype as the user sees them; None for Python scalars.
      value: a Python scalar's value.
      sharding: number of its sharding's text, or None.
    """

    kind: str
    codec: str | None = None
    spec: tree.ArraySpec | None = None
    value: Any = None
    sharding: int | None = None

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
            entry.get("codec") in ("lc", "delta", "alone")
            and (isinstance(impl, str) if kind == "key" else impl is None)
            and (sharding is None or (type(sharding) is int and 0 <= sharding < shardings))
        ):
            raise CorruptDataError(f"{where}: its description is damaged")
        spec = tree.ArraySpec(shape, dtype.name, entry.get("weak_type") is True, impl)
        return LeafRecord(kind, entry["codec"], spec, None, sharding)
    try:
        value = tree.scalar_from_json(entry.get("value"))
    except CorruptDataError as e:
        raise CorruptDataError(f"{where}: {e}") from e
    if type(value).__name__ != kind:
        raise CorruptDataError(f"{where}: a {type(value).__name__} where a {kind} is announced")
    return LeafRecord(kind, None, None, value)


def fidelity_to_json(lost: lc.Fidelity | None) -> dict[str, Any] | None:
    """What a step's metadata says of a lossy save.

    ``relative_error`` is ``|u - c_new| / |u - c_old|`` and ``state_error`` is
    ``|u - c_new| / |u|`` (Euclidean norms over the lossy leaves), ``max_error`` is the
    largest ``|u - c_new|``. Four digits are kept.
    """
    if lost is None:
        return None

    def ratio(a: float, b: float) -> float | None:
        return float(f"{(a / b) ** 0.5:.4g}") if b > 0 and np.isfinite(a / b) else None

    return {
        "relative_error": ratio(lost.error_squares, lost.delta_squares),
        "state_error": ratio(lost.error_squares, lost.state_squares),
        "max_error": float(f"{lost.max_error:.4g}") if np.isfinite(lost.max_error) else None,
    }


def read_leaves(
    record: Record,
    wanted: Sequence[int],
    chains: Sequence[Sequence[segment.Segment]],
    own: Sequence[segment.Segment],
    *,
    base: Callable[[str], np.ndarray] | None = None,
    max_bytes: int | None = None,
    where: str,
) -> list[Any]:
    """Values of leaves: numpy arrays as stored (key data for PRNG keys), Python scalars.

    Args:
      record: the tree's record.
      wanted: numbers of the leaves.
      chains: opened chain segments, one chain per writing process, each oldest first.
      own: opened segments of leaves that stand alone.
      base: gives leaves before the chain's first segment, see ``segment.decode_leaf``.
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

    def read(job: tuple[int, list[Sequence[segment.Segment]] | None]) -> Any:
        k, holders = job
        if holders is None:
            return record.leaves[k].value
        return segment.decode_leaf(holders, names[k], base)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(read, zip(wanted, sources, strict=True)))


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
    candidates = [[s] for s in own] if leaf.codec == "alone" else chains
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

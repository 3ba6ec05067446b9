"""One save's arrays: a snapshot of what the trainer holds, encoded against a reference.

The *reference* is the state that a reader will rebuild. It is the base of the next delta,
so what one save drops the next one picks up, and errors never accumulate.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lcjax import boxes, hashing, segment
from lcjax._jax_context import neutral
from lcjax.boxes import Box
from lcjax.codecs import lc
from lcjax.container import Container, Writer
from lcjax.policy import Preset


class Item(NamedTuple):
    """An array leaf ready to be encoded.

    Attributes:
      name: the leaf's name.
      dtype: stored dtype, native byte order.
      shape: stored shape.
      codec: ``lc``, ``delta`` or ``alone``, see ``lcjax.policy``.
      array: the flat values, numpy ``(elements,)``; None where they are in a device flat.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    codec: str
    array: np.ndarray | None


class Flat(NamedTuple):
    """Several leaves of one dtype one after the other in one array.

    A numpy array has the leaves' dtype, a jax array holds their bits (``lc.words``).
    """

    names: tuple[str, ...]
    array: Any
    offsets: dict[str, tuple[int, int]]


def concatenate(names: Sequence[str], arrays: Sequence[Any], dtype: np.dtype) -> Flat:
    """Joins flat arrays (all numpy, or all jax on one backend) into a ``Flat``."""
    offsets, at = {}, 0
    for name, array in zip(names, arrays, strict=True):
        offsets[name] = (at, at + array.shape[0])
        at += array.shape[0]
    if not arrays:
        joined: Any = np.zeros(0, dtype)
    elif len(arrays) == 1:
        joined = arrays[0]
    elif all(isinstance(a, np.ndarray) for a in arrays):
        joined = np.concatenate(arrays)
    else:
        import jax
        import jax.numpy as jnp

        joined = jax.jit(lambda parts: jnp.concatenate(parts))(list(arrays))
    return Flat(tuple(names), joined, offsets)


def _alone(name: str, values: np.ndarray) -> Flat:
    return Flat((name,), values, {name: (0, values.size)})


@dataclass(frozen=True)
class Snapshot:
    """What one save has to store. Holds views or device copies, safe against donation.

    Attributes:
      items: the array leaves, in tree order.
      device: dtype name -> the ``lc`` leaves of that dtype, copied on their device; empty
        where arrays are on the host.
    """

    items: tuple[Item, ...]
    device: dict[str, Flat]

    def gather(self, names: Sequence[str], dtype: np.dtype) -> Any:
        """The named ``lc`` leaves, joined in that order."""
        flat = self.device.get(dtype.name)
        if flat is not None:
            return _take(flat, names, dtype)
        by_name = {item.name: item.array for item in self.items}
        return concatenate(names, [by_name[n] for n in names], dtype).array

    def host(self, item: Item) -> np.ndarray:
        """A leaf's flat values on the host."""
        if item.array is not None:
            return item.array
        return _host_part(self.device[item.dtype.name], item.name, item.dtype)


def _host_part(flat: Flat, name: str, dtype: np.dtype) -> np.ndarray:
    start, stop = flat.offsets[name]
    return np.asarray(flat.array[start:stop]).view(dtype)


def _take(flat: Flat, names: Sequence[str], dtype: np.dtype) -> Any:
    if tuple(names) == flat.names:
        return flat.array
    parts = [flat.array[slice(*flat.offsets[n])] for n in names]
    return concatenate(names, parts, dtype).array


@dataclass(frozen=True)
class Reference:
    """The chained leaves of a state as every reader rebuilds them.

    Attributes:
      state: id of the state, see ``segment.state_id``.
      specs: leaf name -> (dtype, shape).
      flats: where the values are; immutable by agreement.
      where: leaf name -> number of its ``Flat``.
    """

    state: str
    specs: dict[str, tuple[np.dtype, tuple[int, ...]]]
    flats: tuple[Flat, ...]
    where: dict[str, int]

    @classmethod
    def of(cls, state: str, specs: dict[str, Any], flats: Sequence[Flat]) -> Reference:
        """Builds the table of places."""
        where = {name: k for k, flat in enumerate(flats) for name in flat.names}
        return cls(state, specs, tuple(flats), where)

    @classmethod
    def from_values(cls, state: str, values: dict[str, np.ndarray]) -> Reference:
        """A reference over arrays by leaf name, each in its leaf's dtype and shape."""
        specs = {name: (value.dtype, value.shape) for name, value in values.items()}
        return cls.of(state, specs, [_alone(name, v.reshape(-1)) for name, v in values.items()])

    def value(self, name: str) -> np.ndarray:
        """A leaf's flat values on the host; do not change them."""
        return _host_part(self.flats[self.where[name]], name, self.specs[name][0])

    def gather(self, names: Sequence[str], dtype: np.dtype, on_host: bool) -> Any:
        """The named leaves of one dtype, joined in that order."""
        homes = {self.where[n] for n in names}
        if len(homes) == 1:
            array = _take(self.flats[homes.pop()], names, dtype)
        else:
            array = concatenate(names, [self.value(n) for n in names], dtype).array
        if on_host:
            return np.asarray(array).view(dtype)
        import jax.numpy as jnp

        return jnp.asarray(lc.words(array))


class Encoded(NamedTuple):
    """What ``encode`` made of a snapshot.

    Attributes:
      chain: the segment that later saves build on; None without chained leaves.
      own: the segment of the leaves that only this save needs; None without any.
      reference: the new reference.
      is_key: whether ``chain`` stands by itself.
      fidelity: what the lossy leaves lost, None if there are none.
    """

    chain: Container | None
    own: Container | None
    reference: Reference
    is_key: bool
    fidelity: lc.Fidelity | None


def encode(snapshot: Snapshot, reference: Reference | None, preset: Preset) -> Encoded:
    """Encodes a snapshot, as deltas against a reference where there is one.

    A leaf that the reference lacks, or has in another dtype or shape, is stored by itself.
    Where the lossy delta is as large as the state itself (``rms(u - c) > rms(u) / 2``), the
    reference is of no use and a key frame is written.
    """
    chained = [i for i in snapshot.items if i.codec != "alone"]
    alone = [i for i in snapshot.items if i.codec == "alone"]
    usable = reference is not None and any(_has(reference, i) for i in chained)
    if chained:
        encoded = _encode_chain(snapshot, chained, reference if usable else None, preset)
        if encoded is None:
            encoded = _encode_chain(snapshot, chained, None, preset)
        assert encoded is not None
        chain, new, is_key, fidelity = encoded
    else:
        chain, new, is_key, fidelity = None, Reference.of("", {}, ()), True, None
    own = None
    if alone:
        jobs = [_ExactJob(i, box, snapshot.host(i), None) for i in alone for box in _boxes(i)]
        own, _ = _assemble("own", alone, jobs, [], None)
    return Encoded(chain, own, new, is_key, fidelity)


def _encode_chain(
    snapshot: Snapshot, chained: list[Item], reference: Reference | None, preset: Preset
) -> tuple[Container, Reference, bool, lc.Fidelity | None] | None:
    """None where the reference turns out to be of no use."""
    jobs: dict[str, list[_Job]] = {}
    tables: list[np.ndarray] = []
    flats: list[Flat] = []
    fidelity: lc.Fidelity | None = None
    lossy = [i for i in chained if i.codec == "lc" and _has(reference, i)]
    for members in _scopes(lossy, preset):
        assert reference is not None
        groups = _by_dtype(members)
        pairs = []
        for dtype, items in groups:
            names = [i.name for i in items]
            u = snapshot.gather(names, dtype)
            pairs.append((u, reference.gather(names, dtype, isinstance(u, np.ndarray))))
        result = lc.quantize(pairs, preset.bits)
        fidelity = result.fidelity if fidelity is None else fidelity + result.fidelity
        for (_, items), group in zip(groups, result.groups, strict=True):
            flat = _flat_of(items, group.reference)
            flats.append(flat)
            _lc_jobs(items, flat, group, len(tables), jobs)
        tables.append(result.table)
    if fidelity is not None and fidelity.delta_squares > fidelity.state_squares / 4:
        return None

    for item in chained:
        if item.name in jobs:
            continue
        values = snapshot.host(item)
        base = None
        if item.codec == "delta" and _has(reference, item):
            assert reference is not None
            base = reference.value(item.name)
        jobs[item.name] = [_ExactJob(item, box, values, base) for box in _boxes(item)]
        flats.append(_alone(item.name, values))

    is_key = reference is None
    ordered = [job for item in chained for job in jobs[item.name]]
    base_id = None if reference is None else reference.state
    container, state = _assemble("chain", chained, ordered, tables, base_id)
    specs = {i.name: (i.dtype, i.shape) for i in chained}
    return container, Reference.of(state, specs, flats), is_key, fidelity


class _ExactJob(NamedTuple):
    item: Item
    box: Box
    values: np.ndarray
    base: np.ndarray | None

    def run(self) -> tuple[dict[str, Any], bytes]:
        span = _span(self.item, self.box)
        base = None if self.base is None else self.base[span]
        entry, payload = segment.encode_exact(self.values[span], base)
        entry["hash"] = boxes.box_hash(self.values[span], self.box, self.item.shape)
        return entry, payload


class _LcJob(NamedTuple):
    item: Item
    box: Box
    codes: np.ndarray
    table: int
    where: np.ndarray
    exact: np.ndarray
    hash: Callable[[], str]

    def run(self) -> tuple[dict[str, Any], bytes]:
        entry, payload = segment.encode_lc(self.codes, self.table, self.where, self.exact)
        entry["hash"] = self.hash()
        return entry, payload


_Job = _ExactJob | _LcJob


def _lc_jobs(
    items: list[Item], flat: Flat, group: lc.Quantized, table: int, jobs: dict[str, list[_Job]]
) -> None:
    """Cuts a quantized group into the chunks of its leaves."""
    pieces = [(item, box) for item in items for box in _boxes(item)]
    hashes = _piece_hashes(pieces, flat)
    for (item, box), digest in zip(pieces, hashes, strict=True):
        offset = flat.offsets[item.name][0]
        span = _span(item, box)
        start, stop = offset + span.start, offset + span.stop
        first, last = np.searchsorted(group.exceptions, [start, stop])
        jobs.setdefault(item.name, []).append(
            _LcJob(
                item,
                box,
                group.codes[start:stop],
                table,
                group.exceptions[first:last] - start,
                group.exact[first:last],
                digest,
            )
        )


def _piece_hashes(pieces: list[tuple[Item, Box]], flat: Flat) -> list[Callable[[], str]]:
    """Value hashes of the new reference's chunks, computed where the reference is."""
    spans = [_span(item, box) for item, box in pieces]
    if isinstance(flat.array, np.ndarray):

        def on_host(item: Item, box: Box, span: slice) -> str:
            offset = flat.offsets[item.name][0]
            return boxes.box_hash(
                flat.array[offset + span.start : offset + span.stop], box, item.shape
            )

        return [
            lambda i=i, b=b, s=s: on_host(i, b, s)  # type: ignore[misc]
            for (i, b), s in zip(pieces, spans, strict=True)
        ]
    import jax

    with neutral():
        lanes = np.asarray(
            jax.jit(hashing.value_hash_device, static_argnums=3)(
                flat.array,
                np.array([s.start for s in spans], np.uint32).astype(np.int32),
                np.array([s.stop - s.start for s in spans], np.int32),
                int(flat.array.shape[0]),
            )
        )
    texts = [f"{int(high) << 32 | int(low):016x}" for low, high in lanes]
    return [lambda t=t: t for t in texts]  # type: ignore[misc]


def _assemble(
    kind: str,
    items: list[Item],
    jobs: Sequence[_Job],
    tables: list[np.ndarray],
    base: str | None,
) -> tuple[Container, str]:
    """Runs the jobs side by side and writes their chunks in order."""
    writer = Writer()
    leaves = {
        i.name: {"name": i.name, "dtype": i.dtype.name, "shape": list(i.shape), "chunks": []}
        for i in items
    }
    hashes: dict[str, list[str]] = {i.name: [] for i in items}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for job, (entry, payload) in zip(jobs, pool.map(lambda j: j.run(), jobs), strict=True):
            writer.add(payload)
            segment.describe_box(entry, job.box, job.item.shape)
            leaves[job.item.name]["chunks"].append(entry)  # type: ignore[attr-defined]
            hashes[job.item.name].append(entry["hash"])
    state = segment.state_id(hashes)
    meta = {
        "kind": kind,
        "base": base,
        "state": state,
        "tables": [t.astype("<f4").tobytes().hex() for t in tables],
        "leaves": list(leaves.values()),
    }
    return writer.finish(meta), state


def _boxes(item: Item) -> list[Box]:
    return boxes.split(item.shape)


def _span(item: Item, box: Box) -> slice:
    start = boxes.flat_start(box, item.shape)
    return slice(start, start + math.prod(boxes.box_shape(box)))


def _has(reference: Reference | None, item: Item) -> bool:
    return reference is not None and reference.specs.get(item.name) == (item.dtype, item.shape)


def _scopes(items: list[Item], preset: Preset) -> list[list[Item]]:
    """Leaves that share a code table."""
    if not items:
        return []
    return [items] if preset.scope == "model" else [[i] for i in items]


def _by_dtype(items: list[Item]) -> list[tuple[np.dtype, list[Item]]]:
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.dtype.name, []).append(item)
    return [(members[0].dtype, members) for members in groups.values()]


def _flat_of(items: list[Item], array: Any) -> Flat:
    offsets, at = {}, 0
    for item in items:
        size = math.prod(item.shape)
        offsets[item.name] = (at, at + size)
        at += size
    return Flat(tuple(i.name for i in items), array, offsets)

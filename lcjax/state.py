"""One save's arrays: a snapshot of what the trainer holds, encoded against a reference.

The *reference* is the state that a reader will rebuild. It is the base of the next delta,
so what one save drops the next one picks up, and errors never accumulate.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from lcjax import boxes, hashing, scales, segment
from lcjax._jax_context import neutral
from lcjax.boxes import Box
from lcjax.codecs import lc, levels, moments, steps
from lcjax.container import Container, Writer
from lcjax.jobs import (
    BoundedJob,
    Done,
    ExactJob,
    Item,
    Job,
    LcJob,
    LevelJob,
    Loss,
    MomentJob,
    StepJob,
    span,
)
from lcjax.policy import CHAINED, Bounded, Lc, Level, Moment, Step
from lcjax.scales import Note


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
      notes: leaf name -> what its last save left over, for leaves stored in steps.
      trails: where parameters that moments are predicted from have been going, flat float32.
    """

    state: str
    specs: dict[str, tuple[np.dtype, tuple[int, ...]]]
    flats: tuple[Flat, ...]
    where: dict[str, int]
    notes: dict[str, Note] = field(default_factory=dict)
    trails: dict[moments.Recipe, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        state: str,
        specs: dict[str, Any],
        flats: Sequence[Flat],
        notes: dict[str, Note] | None = None,
    ) -> Reference:
        """Builds the table of places."""
        where = {name: k for k, flat in enumerate(flats) for name in flat.names}
        return cls(state, specs, tuple(flats), where, notes or {})

    @classmethod
    def from_values(
        cls,
        state: str,
        values: dict[str, np.ndarray],
        notes: dict[str, Note] | None = None,
        trails: dict[moments.Recipe, np.ndarray] | None = None,
    ) -> Reference:
        """A reference over arrays by leaf name, each in its leaf's dtype and shape."""
        specs = {name: (value.dtype, value.shape) for name, value in values.items()}
        flats = [_alone(name, v.reshape(-1)) for name, v in values.items()]
        return replace(cls.of(state, specs, flats, notes), trails=trails or {})

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
      fidelity: what the parameters lost together, None if none is stored with loss.
      losses: what each lossy leaf lost, by name.
      moments: the rebuilt values, flat, of lossy leaves outside the chain.
    """

    chain: Container | None
    own: Container | None
    reference: Reference
    is_key: bool
    fidelity: Loss | None
    losses: dict[str, Loss]
    moments: dict[str, np.ndarray]


def encode(
    snapshot: Snapshot, reference: Reference | None, notes: Mapping[str, Note] | None = None
) -> Encoded:
    """Encodes a snapshot, as deltas against a reference where there is one.

    A leaf that the reference lacks, or has in another dtype or shape, is stored by itself,
    and so is one whose delta is as large as itself (root mean square above half of the
    leaf's). Where LC-Checkpoint's whole delta is, the reference is of no use and a key frame
    is written.

    Args:
      snapshot: what to store.
      reference: what a reader has, or None for a key frame.
      notes: of the save before, where a key frame is wanted although there was one.
    """
    chained = [i for i in snapshot.items if i.plan.kind in CHAINED]
    own = [i for i in snapshot.items if i.plan.kind not in CHAINED]
    if reference is not None:
        notes = reference.notes
    usable = reference is not None and any(_has(reference, i) for i in chained)
    part = _Chain(None, Reference.of("", {}, ()), True, None, {})
    if chained:
        encoded = _encode_chain(snapshot, chained, reference if usable else None, notes or {})
        if encoded is None:
            encoded = _encode_chain(snapshot, chained, None, notes or {})
        assert encoded is not None
        part = encoded
    container, losses, values = None, dict(part.losses), {}
    if own:
        part = part._replace(
            reference=replace(
                part.reference,
                trails=_trails(own, part.reference, None if part.is_key else reference),
            )
        )
        jobs = [job for i in own for job in _own_jobs(i, snapshot.host(i), part.reference)]
        made = _assemble("own", own, jobs, None)
        container = made.container
        # Moments stored exactly name no trail, so that a reader makes none.
        trails = {r: t for r, t in part.reference.trails.items() if r in made.recipes}
        part = part._replace(reference=replace(part.reference, trails=trails))
        losses |= made.losses
        values = {i.name: made.values[i.name] for i in own if i.plan.kind == "moment"}
    return Encoded(
        part.container, container, part.reference, part.is_key, part.fidelity, losses, values
    )


class _Chain(NamedTuple):
    container: Container | None
    reference: Reference
    is_key: bool
    fidelity: Loss | None
    losses: dict[str, Loss]


def _encode_chain(
    snapshot: Snapshot,
    chained: list[Item],
    reference: Reference | None,
    notes: Mapping[str, Note],
) -> _Chain | None:
    """None where the reference turns out to be of no use."""
    jobs: dict[str, list[Job]] = {}
    flats: list[Flat] = []
    fidelity: Loss | None = None
    lossy = [i for i in chained if i.plan.kind == "lc" and _has(reference, i)]
    for bits, members in _scopes(lossy):
        assert reference is not None
        groups = _by_dtype(members)
        pairs = []
        for dtype, items in groups:
            names = [i.name for i in items]
            u = snapshot.gather(names, dtype)
            pairs.append((u, reference.gather(names, dtype, isinstance(u, np.ndarray))))
        result = lc.quantize(pairs, bits)
        lost = _lc_loss(result)
        fidelity = lost if fidelity is None else fidelity + lost
        for (_, items), group in zip(groups, result.groups, strict=True):
            flat = _flat_of(items, group.reference)
            flats.append(flat)
            _lc_jobs(items, flat, group, result.table, jobs)
    if fidelity is not None and fidelity.delta_squares > fidelity.state_squares / 4:
        return None

    in_jobs = [i for i in chained if i.name not in jobs]
    sizes = _Sizes(snapshot, reference, notes, in_jobs)
    for item in in_jobs:
        jobs[item.name] = _chain_jobs(item, sizes)
    ordered = [job for item in chained for job in jobs[item.name]]
    made = _assemble("chain", chained, ordered, None if reference is None else reference.state)
    flats += [_alone(i.name, made.values[i.name]) for i in in_jobs]
    for item in in_jobs:
        if item.plan.kind == "step":
            mine = made.losses.get(item.name)
            if mine is not None:
                fidelity = mine if fidelity is None else fidelity + mine
    fresh = {
        name: Note(step, made.losses[name].error_squares)
        for name, step in sizes.steps.items()
        if name in made.losses
    }
    specs = {i.name: (i.dtype, i.shape) for i in chained}
    new = Reference.of(made.state, specs, flats, fresh)
    return _Chain(made.container, new, reference is None, fidelity, made.losses)


class _Sizes:
    """Measures leaves, and decides from that how finely each is stored.

    Attributes:
      steps: leaf name -> step, of leaves stored in steps.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        reference: Reference | None,
        notes: Mapping[str, Note],
        items: Sequence[Item],
    ) -> None:
        self.values = {i.name: snapshot.host(i) for i in items}
        self._bases = {
            i.name: reference.value(i.name)
            for i in items
            if reference is not None and i.plan.kind != "lc" and _has(reference, i)
        }
        measured = [i for i in items if i.plan.kind in ("step", "bounded")]
        with _pool() as pool:
            found = pool.map(
                lambda i: steps.measure(self.values[i.name], self._bases.get(i.name)), measured
            )
            self._measures = dict(zip((i.name for i in measured), found, strict=True))
            paired = [i for i in items if i.plan.kind == "step" and i.plan.nu in self.values]
            means = pool.map(
                lambda i: float(np.mean(self.values[i.plan.nu], dtype=np.float64)), paired
            )
            mean_nu = dict(zip((i.name for i in paired), means, strict=True))
        for name, m in self._measures.items():
            # A delta as large as the leaf says nothing that a key frame would not.
            if name in self._bases and m.delta_squares > m.state_squares / 4:
                del self._bases[name]
        self.steps = scales.step_sizes(
            {
                i.name: scales.Leaf(
                    i.plan.codec,
                    self._measures[i.name],
                    notes.get(i.name),
                    mean_nu.get(i.name),
                    i.name not in self._bases,
                )
                for i in items
                if isinstance(i.plan.codec, Step)
            }
        )

    def base(self, name: str) -> np.ndarray | None:
        """What a reader has of a leaf, or None where it is of no use."""
        return self._bases.get(name)

    def top(self, name: str) -> float:
        """The leaf's largest finite magnitude."""
        return self._measures[name].top


def _chain_jobs(item: Item, sizes: _Sizes) -> list[Job]:
    """The jobs of one leaf of the chain, all but LC-Checkpoint's deltas."""
    u, base = sizes.values[item.name], sizes.base(item.name)
    codec, parts = item.plan.codec, _boxes(item)
    if isinstance(codec, Step):
        step, top = sizes.steps[item.name], sizes.top(item.name)
        return [StepJob(item, box, u, base, step, top) for box in parts]
    if isinstance(codec, Level):
        shift = 0
        if base is not None:
            total, count = levels.drift(u, base)
            shift = round(total / count) if count else 0
        return [LevelJob(item, box, u, base, shift) for box in parts]
    if isinstance(codec, Bounded):
        return [BoundedJob(item, box, u, base, sizes.top(item.name)) for box in parts]
    return [ExactJob(item, box, u, base) for box in parts]


def _trails(
    own: Sequence[Item], new: Reference, old: Reference | None
) -> dict[moments.Recipe, np.ndarray]:
    """The trails that this save's moments are predicted from, each a delta longer than before."""
    made: dict[moments.Recipe, np.ndarray] = {}
    if old is None:
        return made
    for item in own:
        codec, param = item.plan.codec, item.plan.param
        if not isinstance(codec, Moment) or param is None:
            continue
        if new.specs[param][1] != item.shape or old.specs.get(param) != new.specs[param]:
            continue
        memory = round(codec.memory * moments.MEMORY_UNIT)
        known = [r for r in old.trails if (r.param, r.memory) == (param, memory)]
        span, trail = (known[0].span, old.trails[known[0]]) if known else (0, None)
        recipe = moments.Recipe(param, span + 1, memory)
        if recipe not in made:
            made[recipe] = moments.extended(trail, new.value(param), old.value(param), memory)
    return made


def _own_jobs(item: Item, values: np.ndarray, new: Reference) -> list[Job]:
    """The jobs of one leaf outside the chain."""
    codec, plan = item.plan.codec, item.plan
    if not isinstance(codec, Moment):
        return [ExactJob(item, box, values, None) for box in _boxes(item)]
    memory = round(codec.memory * moments.MEMORY_UNIT)
    known = [r for r in new.trails if (r.param, r.memory) == (plan.param, memory)]
    recipe = known[0] if known and new.specs[known[0].param][1] == item.shape else None
    nu = plan.nu if plan.nu is not None and new.specs[plan.nu][1] == item.shape else None
    item = item._replace(plan=plan._replace(nu=nu))
    trail = np.zeros(values.size, np.float32) if recipe is None else new.trails[recipe]
    root = np.ones(values.size, np.float32) if nu is None else moments.root_of(new.value(nu))
    scale = scales.moment_scale(codec, moments.fit(values, trail, root))
    return [
        MomentJob(item, box, values, recipe, trail, root, scale.gain, scale.step)
        for box in _boxes(item)
    ]


def _lc_loss(result: lc.Result) -> Loss:
    lost = result.fidelity
    odd = sum(int(g.exceptions.size) for g in result.groups)
    zeros = sum(int(g.codes.size - np.count_nonzero(g.codes)) for g in result.groups) - odd
    return Loss(
        lost.delta_squares, lost.error_squares, lost.state_squares, lost.max_error, zeros, odd
    )


def _lc_jobs(
    items: list[Item],
    flat: Flat,
    group: lc.Quantized,
    table: np.ndarray,
    jobs: dict[str, list[Job]],
) -> None:
    """Cuts a quantized group into the chunks of its leaves."""
    pieces = [(item, box) for item in items for box in _boxes(item)]
    hashes = _piece_hashes(pieces, flat)
    for (item, box), digest in zip(pieces, hashes, strict=True):
        offset = flat.offsets[item.name][0]
        part = span(item, box)
        start, stop = offset + part.start, offset + part.stop
        first, last = np.searchsorted(group.exceptions, [start, stop])
        jobs.setdefault(item.name, []).append(
            LcJob(
                item,
                box,
                group.codes[start:stop],
                table,
                group.exceptions[first:last] - start,
                group.exact[first:last],
                digest,
                functools.partial(_on_host, flat, item.dtype, start, stop),
            )
        )


def _on_host(flat: Flat, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    """Part of a flat's values."""
    part = np.asarray(flat.array[start:stop])
    return part if part.dtype == dtype else np.ascontiguousarray(part).view(dtype)


def _piece_hashes(pieces: list[tuple[Item, Box]], flat: Flat) -> list[Callable[[], str]]:
    """Value hashes of the new reference's chunks, computed where the reference is."""
    spans = [span(item, box) for item, box in pieces]
    if isinstance(flat.array, np.ndarray):

        def on_host(item: Item, box: Box, part: slice) -> str:
            offset = flat.offsets[item.name][0]
            return boxes.box_hash(
                flat.array[offset + part.start : offset + part.stop], box, item.shape
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


class _Assembled(NamedTuple):
    """A segment, and what was made on the way.

    Attributes:
      container: the segment.
      state: id of the state it leads to.
      values: the leaves' new values, flat; not those of ``lc``.
      losses: of lossy leaves.
      recipes: of the trails that moments in it name.
    """

    container: Container
    state: str
    values: dict[str, np.ndarray]
    losses: dict[str, Loss]
    recipes: set[moments.Recipe]


def _assemble(
    kind: str, items: Sequence[Item], jobs: Sequence[Job], base: str | None
) -> _Assembled:
    """Runs the jobs side by side and writes their chunks in order."""
    writer = Writer()
    leaves: dict[str, dict[str, Any]] = {
        i.name: {"name": i.name, "dtype": i.dtype.name, "shape": list(i.shape), "chunks": []}
        for i in items
    }
    hashes: dict[str, list[str]] = {i.name: [] for i in items}
    parts: dict[str, list[np.ndarray]] = {}
    losses: dict[str, Loss] = {}
    tables: dict[bytes, int] = {}
    recipes: set[moments.Recipe] = set()
    with _pool() as pool:
        for job, done in zip(jobs, pool.map(_run, jobs), strict=True):
            entry, name = done.entry, job.item.name
            writer.add(done.payload)
            if "table" in entry:
                text = entry["table"].astype("<f4").tobytes()
                entry["table"] = tables.setdefault(text, len(tables))
            if "trail" in entry:
                recipes.add(moments.Recipe(entry["given"][0], *entry["trail"]))
            segment.describe_box(entry, job.box, job.item.shape)
            leaves[name]["chunks"].append(entry)
            hashes[name].append(entry["hash"])
            if done.values is not None:
                parts.setdefault(name, []).append(done.values)
            if done.loss is not None:
                losses[name] = losses[name] + done.loss if name in losses else done.loss
    state = segment.state_id(hashes)
    meta = {
        "kind": kind,
        "base": base,
        "state": state,
        "tables": [text.hex() for text in tables],
        "leaves": list(leaves.values()),
    }
    values = {n: p[0] if len(p) == 1 else np.concatenate(p) for n, p in parts.items()}
    return _Assembled(writer.finish(meta), state, values, losses, recipes)


def _run(job: Job) -> Done:
    return job.run()


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1)


def _boxes(item: Item) -> list[Box]:
    return boxes.split(item.shape)


def _has(reference: Reference | None, item: Item) -> bool:
    return reference is not None and reference.specs.get(item.name) == (item.dtype, item.shape)


def _scopes(items: list[Item]) -> list[tuple[int, list[Item]]]:
    """Leaves that share a code table, with the width of its codes."""
    groups: dict[tuple[int, str], list[Item]] = {}
    for item in items:
        codec = item.plan.codec
        assert isinstance(codec, Lc)
        key = (codec.bits, "" if codec.scope == "model" else item.name)
        groups.setdefault(key, []).append(item)
    return [(bits, members) for (bits, _), members in groups.items()]


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

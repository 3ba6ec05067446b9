"""Writing and reading the item of one step, and remembering what the next may build on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from etils import epath

from lcjax import chain, segment, storage
from lcjax import state as states
from lcjax.capture import Capture
from lcjax.chain import ChainOptions, SegmentRef
from lcjax.codecs import moments
from lcjax.container import Writer
from lcjax.errors import CorruptDataError, LcjaxError, MissingFileError
from lcjax.policy import Preset
from lcjax.record import Record, fidelity_to_json, from_meta, read_leaves, with_losses

NOTE = """\
This was written by {producer}, a checkpoint codec for JAX, with preset {preset}. To read it:
    pip install lcjax
    import lcjax, orbax.checkpoint as ocp
    state = ocp.Checkpointer(lcjax.CheckpointHandler()).restore(path_of_this_directory)
or give a CheckpointManager handler_registry=lcjax.handler_registry(preset=...). The files'
format is in lcjax/FORMAT.md.
"""
_REMEMBERED = 16


class Key(NamedTuple):
    """What chains are kept apart by: one handler serves every item of every directory."""

    root: str
    item: str


@dataclass(frozen=True)
class Saved:
    """A step's item as it will be, or is, on disk: a possible base.

    Attributes:
      step: its training step; None never serves as a base.
      item: its directory after commit.
      name: content hash of its manifest.
      refs: its chain segments, oldest first.
      marker: a file that exists once the step is committed, where a directory's name alone
        does not tell.
      reference: the state itself, if it is in memory.
    """

    step: int | None
    item: epath.Path
    name: str
    refs: tuple[SegmentRef, ...]
    marker: epath.Path | None
    reference: states.Reference | None

    def is_there(self) -> bool:
        """Whether its step has not been deleted."""
        try:
            return (self.item / chain.MANIFEST_FILE).exists()
        except OSError:
            return False

    def is_usable(self) -> bool:
        """Whether it was committed, and is still there, as it was written."""
        try:
            if self.marker is not None and not self.marker.exists():
                return False
            with storage.File(self.item / chain.MANIFEST_FILE) as file:
                if file.reader.name != self.name:
                    return False
        except (OSError, LcjaxError):
            return False
        return chain.is_whole(self.item, self.refs)


class Memory:
    """What a handler remembers of the saves and restores of this process, per chain.

    The reference of the last committed save stays in memory; of older saves and of restored
    steps only their place is kept, as long as they exist, and their state is read from disk
    if it is needed.
    A save that was not committed is forgotten when the next one begins.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[Key, Saved] = {}
        self._pending: dict[Key, Saved] = {}
        self._known: dict[Key, list[Saved]] = {}

    def base_for(self, key: Key, step: int | None) -> Saved | None:
        """The best base of a save: of an earlier step, committed and whole.

        A step that is not earlier means that training went back, so what was saved since is
        another future; the restored step, or an older save, is the base then.
        """
        if step is None:
            return None
        with self._lock:
            pending = self._pending.pop(key, None)
            if pending is not None and pending.is_usable():
                self._forget_live(key)
                self._live[key] = pending
            live = self._live.get(key)
            others = sorted(self._known.get(key, []), key=lambda s: s.step or 0, reverse=True)
            for saved in [live, *others]:
                earlier = saved is not None and saved.step is not None and saved.step < step
                if earlier and saved is not None and saved.is_usable():
                    return saved
        return None

    def wrote(self, key: Key, saved: Saved) -> None:
        """Notes a save whose commit is still to come."""
        with self._lock:
            self._pending[key] = saved

    def restored(self, key: Key, saved: Saved) -> None:
        """Notes that a step was restored; the live chain is not disturbed."""
        with self._lock:
            self._remember(key, saved)

    def release(self) -> None:
        """Lets go of the references, keeping their steps' places."""
        with self._lock:
            for saved in (self._live, self._pending):
                saved.update({key: replace(s, reference=None) for key, s in saved.items()})

    def segments_in_use(self) -> set[str]:
        """Names of all segments that a coming save may build on."""
        with self._lock:
            every = [*self._live.values(), *self._pending.values()]
            every += [s for known in self._known.values() for s in known]
        return {ref.name for saved in every for ref in saved.refs}

    def _forget_live(self, key: Key) -> None:
        live = self._live.pop(key, None)
        if live is not None:
            self._remember(key, live)

    def _remember(self, key: Key, saved: Saved) -> None:
        known = [s for s in self._known.get(key, []) if s.item != saved.item]
        known.append(replace(saved, reference=None))
        self._known[key] = [s for s in known if s.is_there()][-_REMEMBERED:]


class Request(NamedTuple):
    """Everything that writing an item needs, decided before the save returns to its caller."""

    taken: Capture
    preset: Preset
    options: ChainOptions
    base: Saved | None
    step: int | None
    root: epath.Path | None
    final_item: epath.Path
    marker: epath.Path | None
    shardings: tuple[str, ...] = ()
    custom: str | None = None


class Encoding(NamedTuple):
    """An encoded snapshot, and the save that its deltas build on."""

    encoded: states.Encoded
    base: Saved | None


def encode(request: Request) -> Encoding:
    """Encodes what an item is to hold, against its base where that pays.

    The same request gives the same bytes, so this also tells what a save would store.
    """
    base = request.base
    notes = None if base is None or base.reference is None else base.reference.notes
    if base is not None and chain.wants_key_frame(base.refs, request.options):
        base = None
    reference = None
    if base is not None:
        reference = base.reference or _load_reference(base)
    encoded = states.encode(request.taken.snapshot, reference, notes)
    return Encoding(encoded, None if encoded.is_key else base)


def write_item(item: epath.Path, request: Request) -> Saved:
    """Writes an item's files into its (temporary) directory, durably.

    Args:
      item: an existing directory.
      request: what to write.

    Returns:
      What to remember of it.
    """
    encoded, base = encode(request)
    refs: tuple[SegmentRef, ...] = ()
    if base is not None:
        try:
            refs = chain.carry_segments(base.item, item, base.refs)
        except MissingFileError as e:
            logging.warning("lcjax: the base of this save went away, writing a key frame: %s", e)
            encoded = states.encode(request.taken.snapshot, None, encoded.reference.notes)
            refs = ()
    pooled = refs[-1].pooled if refs else chain.choose_layout(item, request.root, request.options)
    own: list[SegmentRef] = []
    if encoded.chain is not None:
        refs += (chain.add_segment(item, request.root, encoded.chain, "chain", pooled),)
    if encoded.own is not None:
        own.append(chain.add_segment(item, request.root, encoded.own, "own", False))
    record = Record(
        request.taken.flat.skeleton,
        with_losses(request.taken.flat.skeleton.names, request.taken.leaves, encoded),
        request.preset.to_json(),
        encoded.is_key,
        request.step,
        request.shardings,
        fidelity_to_json(encoded.fidelity),
        request.custom,
    )
    meta = record.to_meta("manifest")
    meta["segments"] = [ref.to_json() for ref in (*refs, *own)]
    meta["states"] = {"0": encoded.reference.state} if encoded.chain is not None else {}
    manifest = Writer().finish(meta)
    note = NOTE.format(producer=record.producer, preset=request.preset.name)
    storage.write(item / chain.NOTE_FILE, [note.encode()])
    storage.write_container(item / chain.MANIFEST_FILE, manifest)
    storage.sync_directory(item)
    storage.sync_directory(item.parent)
    logging.info(
        "lcjax: wrote %s, %s frame, %d segments in its chain, %d bytes new",
        request.final_item,
        "key" if encoded.is_key else "delta",
        len(refs),
        sum(r.size for r in own) + (refs[-1].size if encoded.chain is not None else 0),
    )
    return Saved(
        request.step,
        request.final_item,
        manifest.name,
        refs,
        request.marker,
        encoded.reference,
    )


class Opened:
    """A step's item opened for reading; close it, or use it as a context manager.

    Attributes:
      record: the saved tree's record.
      refs: all its segments.
      name: content hash of its manifest.
    """

    def __init__(self, item: epath.Path) -> None:
        """Reads the manifest.

        Raises:
          MissingFileError: there is none.
          CorruptDataError: it is damaged.
        """
        self.item = item
        with storage.File(item / chain.MANIFEST_FILE) as file:
            where = file.reader.where
            self.record = from_meta(file.reader.meta, "manifest", where)
            self.refs = chain.refs_from_json(file.reader.meta.get("segments"), where)
            self._states = file.reader.meta.get("states")
            self.name = file.reader.name
        self._files: list[storage.File] = []

    @property
    def chain_refs(self) -> tuple[SegmentRef, ...]:
        """Its chain segments, oldest first."""
        return tuple(ref for ref in self.refs if ref.kind == "chain")

    def segments(self) -> tuple[list[list[segment.Segment]], list[segment.Segment]]:
        """Opens all segments: each writing process's chain, checked to be one, and the others.

        Raises:
          MissingFileError: a file is not there.
          CorruptDataError: a file is damaged.
          BaseMismatchError: a chain is not one.
        """
        files, parsed = chain.open_segments(self.item, self.refs)
        self._files += files
        chains: dict[int, list[segment.Segment]] = {}
        own = []
        for ref, opened in zip(self.refs, parsed, strict=True):
            if ref.kind == "chain":
                chains.setdefault(ref.process, []).append(opened)
            else:
                own.append(opened)
        for one in chains.values():
            segment.check_chain(one)
        reached = {str(process): one[-1].state for process, one in chains.items()}
        if reached != self._states:
            raise CorruptDataError(
                f"{self.item / chain.MANIFEST_FILE}: its chains lead to {reached}, expected "
                f"{self._states}; segments are missing from its list"
            )
        return list(chains.values()), own

    def leaves(self, wanted: Sequence[int], max_bytes: int | None) -> list[Any]:
        """Values of leaves, see ``record.read_leaves``."""
        chains, own = self.segments()
        read = read_leaves(
            self.record, wanted, chains, own, max_bytes=max_bytes, where=str(self.item)
        )
        return read.values

    def as_saved(self) -> Saved:
        """What to remember of it as a possible base."""
        return Saved(self.record.step, self.item, self.name, self.chain_refs, None, None)

    def close(self) -> None:
        """Closes the segments' files."""
        for file in self._files:
            file.close()
        self._files = []

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _recipes(own: Sequence[segment.Segment]) -> set[moments.Recipe]:
    """How the trails were made that a step's moments are predicted from."""
    return {
        chunk.given.recipe
        for one in own
        for leaf in one.leaves.values()
        for chunk in leaf.chunks.values()
        if chunk.given.recipe is not None
    }


def _load_reference(base: Saved) -> states.Reference | None:
    """The state of a base that is not in memory; None where it cannot be read."""
    try:
        with Opened(base.item) as opened:
            chains, own = opened.segments()
            if len(chains) != 1:
                return None  # nothing chained, or the shards of several processes
            last = chains[0][-1]
            values: dict[str, np.ndarray] = {}
            trails: dict[moments.Recipe, np.ndarray] = {}
            recipes = _recipes(own)
            for name in last.leaves:
                mine = sorted(recipe for recipe in recipes if recipe.param == name)
                if mine:
                    values[name], made = segment.decode_trails(chains, mine)
                    trails |= made
                else:
                    values[name] = segment.decode_leaf(chains, name)
            return states.Reference.from_values(last.state, values, opened.record.notes(), trails)
    except (OSError, LcjaxError) as e:
        logging.warning(
            "lcjax: step %s cannot serve as a base, writing a key frame: %s", base.step, e
        )
        return None

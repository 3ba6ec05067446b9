"""Saving through Orbax v1: what outlives the handler, which v1 builds anew for each call.

The memory of the chains lives here, one writer per directory of steps. v1 calls no hook when a
step's items are complete, so pooled segments are collected when the last running save below the
directory has written its manifest: then every segment that a step needs is named by a manifest
or known to the memory.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from etils import epath

from lcjax import policy, session
from lcjax.chain import ChainOptions, collect
from lcjax.orbax import place
from lcjax.orbax.args import Save
from lcjax.orbax.handler import CheckpointHandler
from lcjax.orbax.v1_marker import write_marker
from lcjax.policy import Preset

_KEPT = 4  # directories whose last state stays in memory; of others it is read from disk


class Settings(NamedTuple):
    """How to save.

    Attributes:
      preset: of items that have none of their own: a preset, or a function that chooses one.
      bits: for presets that the function gives by name.
      scope: as ``bits``.
      items: names and presets of items that have their own.
      chain: how chains are laid out and how long they grow.
    """

    preset: Preset | Callable[[int | None, str], str | Preset]
    bits: int | None
    scope: str | None
    items: tuple[tuple[str, Preset], ...]
    chain: ChainOptions

    def preset_of(self, at: place.Place) -> Preset:
        """The preset of an item.

        Raises:
          PresetError: the function gave no preset.
        """
        own = dict(self.items).get(at.item)
        if own is not None:
            return own
        if callable(self.preset):
            return policy.resolve(self.preset(at.step, at.item), self.bits, self.scope)
        return self.preset


class _Ticket:
    """Held by a save until its files are written; gone with it if Orbax never runs it."""


class Writer(CheckpointHandler):
    """The saves of all items below one directory of steps."""

    def __init__(self) -> None:
        super().__init__()
        self._running: weakref.WeakSet[_Ticket] = weakref.WeakSet()
        self._lock = threading.Lock()

    def begin(
        self, directory: epath.Path, pytree: Any, save_args: Any, settings: Settings
    ) -> Callable[[epath.Path], None]:
        """Takes a snapshot of a tree.

        Args:
          directory: the item's directory, which need not exist yet.
          pytree: the tree.
          save_args: tree of ``ocp.SaveArgs``, or None; their ``dtype`` is honoured.
          settings: how to save.

        Returns:
          A function that encodes and writes the item, given its directory, which exists then.

        Raises:
          PresetError: no preset was chosen for the item.
          UnsupportedLeafError: a leaf that cannot be stored.
        """
        preset = settings.preset_of(place.find(directory))
        ticket = _Ticket()
        with self._lock:
            self._running.add(ticket)
        self._told = preset in _told
        request, key = self._request(directory, None, None, Save(pytree, save_args, preset=preset))
        if self._told:
            _told.add(preset)

        def write(item: epath.Path) -> None:
            if request is None:  # another process writes it
                return
            try:
                write_marker(item)
                self._write(item, request._replace(options=settings.chain), key)
            finally:
                self._ended(ticket)
            self._collect(request.root, settings.chain.grace_seconds)

        return write

    def note_restored(self, directory: epath.Path, opened: session.Opened) -> None:
        """Notes that a step's item was restored: a later save may build on it."""
        at = place.find(directory)
        self._memory.restored(session.Key(str(at.root), at.item), opened.as_saved())

    def _ended(self, ticket: _Ticket) -> None:
        with self._lock:
            self._running.discard(ticket)

    def _collect(self, root: epath.Path | None, grace_seconds: float) -> None:
        if root is None or jax.process_index() != 0:
            return
        with self._lock:  # no save begins meanwhile
            if not self._running:
                collect(root, self._memory.segments_in_use(), grace_seconds)


_writers: collections.OrderedDict[str, Writer] = collections.OrderedDict()
_writers_lock = threading.Lock()
_told: set[Preset] = set()


def writer_for(directory: epath.Path, *, saving: bool) -> Writer:
    """The writer of an item's directory; of one without a step, a new one each time.

    Args:
      directory: the item's directory.
      saving: whether something is saved; reading pushes no state out of memory.
    """
    at = place.find(directory)
    if at.root is None:
        return Writer()
    root = str(at.root)
    with _writers_lock:
        writer = _writers.get(root)
        if writer is None:
            writer = _writers[root] = Writer()
            _writers.move_to_end(root, last=False)
        if saving:
            _writers.move_to_end(root)
        idle = list(_writers.values())[:-_KEPT]
    for other in idle:
        other.close()
    return writer


def release() -> None:
    """Forgets all chains of this process; the next save of each begins with a key frame."""
    with _writers_lock:
        _writers.clear()
    _told.clear()

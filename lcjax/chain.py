"""Chains on disk: where a step's segments lie, and how they outlive the steps before it.

A step's item directory holds ``manifest.lcjax``, which names the segments that the step
needs, oldest first; the first is a key frame, each other one a delta on the state before
it. Retention knows nothing of chains and may delete any step, so no step may depend on
another one's directory. Two layouts see to that:

* **linked** (file systems with hard links): the item directory holds every segment of its
  chain, the older ones as hard links to the files of the step before. Deleting a step
  removes names; the bytes go with the last step that needs them. A step's directory can be
  copied or moved by itself. Nothing is ever collected.
* **pooled** (buckets, FUSE mounts and other places without links): chain segments lie in
  one directory ``lcjax_segments`` beside the steps, which Orbax ignores, under names made
  from their content; they never change. A segment that no step names is deleted after a
  grace period.

A new chain begins (a key frame is written) when there is no usable base, when the chain has
``max_chain`` segments, or when its deltas together would outweigh ``delta_budget`` times its
key frame: with keep = 1 the disk then holds at most ``1 + delta_budget`` key frames and a
delta, and a restore reads at most that.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from absl import logging
from etils import epath

from lcjax import segment, storage
from lcjax.container import Container
from lcjax.errors import CorruptDataError, LcjaxError, MissingFileError

MANIFEST_FILE = "manifest.lcjax"
NOTE_FILE = "LCJAX.txt"
POOL_DIRECTORY = "lcjax_segments"
# In commit-file mode Orbax's clean-up deletes every directory without this file.
COMMIT_MARKER = "commit_success.txt"
_MARKER_TEXT = b"Segments of the steps beside this directory; see lcjax/FORMAT.md.\n"
SUFFIX = ".lcx"
LAYOUTS = ("auto", "linked", "pooled")
Layout = Literal["auto", "linked", "pooled"]
_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class ChainOptions:
    """How chains are laid out and how long they grow.

    Attributes:
      layout: ``"auto"`` tries whether hard links work, else ``"linked"`` or ``"pooled"``.
      max_chain: most segments a step may need.
      delta_budget: most bytes of deltas, as a multiple of their key frame's bytes.
      grace_seconds: age below which an unnamed pooled segment is left alone.
    """

    layout: Layout = "auto"
    max_chain: int = 64
    delta_budget: float = 4.0
    grace_seconds: float = 3600.0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.max_chain < 1:
            raise ValueError(f"max_chain must be at least 1, got {self.max_chain}")


class SegmentRef(NamedTuple):
    """A segment as a manifest names it.

    Attributes:
      name: content hash, 32 hexadecimal digits; the file is ``name + ".lcx"``.
      size: bytes.
      kind: ``"chain"`` or ``"own"``.
      pooled: whether it lies in the pool rather than in the item's directory.
      process: number of the process that wrote it; each has a chain of its own.
    """

    name: str
    size: int
    kind: str
    pooled: bool
    process: int = 0

    def to_json(self) -> dict[str, Any]:
        """The manifest's entry."""
        return self._asdict()


def refs_from_json(raw: Any, where: str) -> tuple[SegmentRef, ...]:
    """Checks a manifest's list of segments.

    Raises:
      CorruptDataError: an entry is damaged; names that are not hashes are refused, so no
        path can lead out of the checkpoint.
    """
    refs = []
    for entry in raw if isinstance(raw, list) else [None]:
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and _NAME.fullmatch(entry["name"])
            and type(entry.get("size")) is int
            and entry["size"] >= 0
            and entry.get("kind") in ("chain", "own")
            and type(entry.get("pooled")) is bool
            and type(entry.get("process")) is int
        ):
            raise CorruptDataError(f"{where}: its list of segments is damaged")
        refs.append(SegmentRef(*(entry[field] for field in SegmentRef._fields)))
    return tuple(refs)


def locate(item: epath.Path, ref: SegmentRef) -> epath.Path:
    """The file of a segment of a step's item."""
    if not ref.pooled:
        return item / (ref.name + SUFFIX)
    # The item is the step's own directory, or one below it: the pool is beside the steps.
    for root in (item.parent.parent, item.parent):
        path = root / POOL_DIRECTORY / (ref.name + SUFFIX)
        if path.exists():
            return path
    raise MissingFileError(
        f"{item.parent.parent / POOL_DIRECTORY / (ref.name + SUFFIX)}: the pooled segment that "
        f"{item / MANIFEST_FILE} names is missing. A step of the pooled layout cannot be copied "
        f"without the directory {POOL_DIRECTORY} beside it"
    )


def open_segments(
    item: epath.Path, refs: Iterable[SegmentRef]
) -> tuple[list[storage.File], list[segment.Segment]]:
    """Opens and checks segments; the caller closes the files.

    Raises:
      MissingFileError: a file is not there.
      CorruptDataError: a file is damaged or not the one that the manifest names.
    """
    files: list[storage.File] = []
    segments: list[segment.Segment] = []
    try:
        for ref in refs:
            path = locate(item, ref)
            found = storage.size_of(path)
            if found is not None and found != ref.size:
                raise CorruptDataError(
                    f"{path}: has {found} bytes, expected {ref.size}; the file is truncated or "
                    "was replaced"
                )
            file = storage.File(path)
            files.append(file)
            if file.reader.name != ref.name:
                raise CorruptDataError(
                    f"{path}: has content {file.reader.name}, expected {ref.name}"
                )
            segments.append(segment.parse(file.reader, [ref.kind]))
    except BaseException:
        for file in files:
            file.close()
        raise
    return files, segments


def is_whole(item: epath.Path, refs: Iterable[SegmentRef]) -> bool:
    """Whether all files of a chain are where they should be, by size."""
    try:
        return all(storage.size_of(locate(item, ref)) == ref.size for ref in refs)
    except (OSError, LcjaxError):
        return False


def wants_key_frame(refs: Sequence[SegmentRef], options: ChainOptions) -> bool:
    """Whether a chain has grown so long that the next save should begin a new one.

    Every process of a job sees the same committed manifest, hence decides alike.
    """
    if not refs or len(refs) >= options.max_chain:
        return True
    return sum(ref.size for ref in refs[1:]) > options.delta_budget * refs[0].size


def choose_layout(item: epath.Path, root: epath.Path | None, options: ChainOptions) -> bool:
    """Whether a new chain is pooled; decided once, when its key frame is written.

    Args:
      item: the directory being written.
      root: directory of the steps; None where a save stands alone, which is never pooled.
      options: see ``ChainOptions``.
    """
    if root is None or options.layout == "linked":
        return False
    return options.layout == "pooled" or not storage.has_links(item)


def add_segment(
    item: epath.Path, root: epath.Path | None, container: Container, kind: str, pooled: bool
) -> SegmentRef:
    """Writes a new segment where its layout wants it."""
    ref = SegmentRef(container.name, container.size, kind, pooled)
    if pooled:
        assert root is not None
        pool = root / POOL_DIRECTORY
        pool.mkdir(parents=True, exist_ok=True)
        if not (pool / COMMIT_MARKER).exists():
            storage.write_atomic(pool / COMMIT_MARKER, [_MARKER_TEXT])
            storage.sync_directory(root)
        path = pool / (ref.name + SUFFIX)
        # Written even where it exists: that renews its age before the collector looks.
        storage.write_atomic(path, container.parts)
    else:
        path = item / (ref.name + SUFFIX)
        # A state that stands still gives the same delta again; the chain has it already, as a
        # link that must not be written through.
        if not path.exists():
            storage.write_container(path, container)
    return ref


def carry_segments(
    source: epath.Path, item: epath.Path, refs: Iterable[SegmentRef]
) -> tuple[SegmentRef, ...]:
    """Makes the segments of an earlier step part of a new one.

    Linked segments are linked; where that fails (links exhausted, another device) copied.

    Raises:
      MissingFileError: a file of the earlier step is gone.
    """
    refs = tuple(refs)
    for ref in dict.fromkeys(refs):
        path = locate(source, ref)
        if not ref.pooled:
            target = item / (ref.name + SUFFIX)
            if not storage.link(path, target):
                logging.warning("lcjax: no hard link from %s, copying %d bytes", path, ref.size)
                storage.copy(path, target)
    return refs


def collect(root: epath.Path, in_use: set[str], grace_seconds: float) -> list[str]:
    """Deletes pooled segments that no step names.

    A segment stays if any manifest under the root names it (temporary directories of
    running saves included), if it is in ``in_use``, or if it is younger than the grace
    period, which covers saves of other processes that have not written a manifest yet.
    If any manifest cannot be read, nothing is deleted.

    Returns:
      The names of the deleted segments.
    """
    pool = root / POOL_DIRECTORY
    try:
        candidates = [p for p in pool.iterdir() if p.name.endswith((SUFFIX, ".tmp"))]
    except OSError:
        return []  # as a rule there is no pool
    now = time.time()
    old = [p for p in candidates if _age(p, now) > grace_seconds]
    if not old:
        return []
    named = set(in_use)
    try:
        for manifest in _manifests(root):
            with storage.File(manifest) as file:
                refs = refs_from_json(file.reader.meta.get("segments"), str(manifest))
            named.update(ref.name for ref in refs if ref.pooled)
    except (OSError, LcjaxError) as e:
        logging.warning("lcjax: keeping every pooled segment, a manifest cannot be read: %s", e)
        return []
    gone = []
    for path in old:
        name = path.name.removesuffix(SUFFIX)
        if name in named:
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as e:  # the save is good all the same
            logging.warning("lcjax: cannot delete %s: %s", path, e)
        else:
            gone.append(name)
    return gone


def _age(path: epath.Path, now: float) -> float:
    try:
        return now - float(path.stat().mtime)
    except (OSError, TypeError):
        return 0.0


def _manifests(root: epath.Path) -> Iterable[epath.Path]:
    """Every manifest of the steps under a root: ``step/manifest`` or ``step/item/manifest``."""
    for step in root.iterdir():
        if step.name == POOL_DIRECTORY or not step.is_dir():
            continue
        if (step / MANIFEST_FILE).exists():
            yield step / MANIFEST_FILE
        for item in step.iterdir():
            if item.is_dir() and (item / MANIFEST_FILE).exists():
                yield item / MANIFEST_FILE

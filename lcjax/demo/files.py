"""What a save wrote, counted by inode: a hard link costs nothing."""

from __future__ import annotations

import collections
import os
import pathlib

Identity = tuple[int, int, int]


def _files(folder: pathlib.Path) -> dict[pathlib.Path, os.stat_result]:
    """Lists the regular files below a folder; those that vanish meanwhile are left out."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = pathlib.Path(parent, name)
            try:
                found[path] = path.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
    return found


def _identity(stat: os.stat_result) -> Identity:
    """Names the content of a file: inode numbers return, but not with the same time."""
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def bytes_on_disk(root: pathlib.Path) -> int:
    """Sums the sizes of all files below a folder, each inode once."""
    return sum({_identity(stat): stat.st_size for stat in _files(root).values()}.values())


class Ledger:
    """Tells the files of a new step from those that it shares with earlier ones.

    Args:
        root: the folder of the checkpoint manager. What is in it already counts as seen.
    """

    def __init__(self, root: pathlib.Path):
        self._root = root
        self._seen = {_identity(stat) for stat in _files(root).values()}

    def new_bytes(self, step: int) -> dict[str, int]:
        """Counts what was written since the last call.

        Args:
            step: the step that was just committed.

        Returns:
            Bytes by item of that step. ``other`` has the files that belong to no item, and
            those that lie outside of all steps.
        """
        steps = [entry for entry in self._root.iterdir() if entry.name == str(step)]
        outside = [entry for entry in self._root.iterdir() if not entry.name[:1].isdigit()]
        written: collections.Counter[str] = collections.Counter()
        for folder in steps + outside:
            for path, stat in _files(folder).items():
                if _identity(stat) not in self._seen:
                    self._seen.add(_identity(stat))
                    parts = path.relative_to(folder).parts
                    item = parts[0] if folder in steps and len(parts) > 1 else "other"
                    written[item] += stat.st_size
        return dict(written)

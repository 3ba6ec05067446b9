"""Lines of JSON from a training process to the one that watches it."""

from __future__ import annotations

import json
import pathlib
import threading
from typing import Any

Event = dict[str, Any]


class Journal:
    """Appends events to a file, each on a line of its own and at once visible to others.

    Args:
        path: the file; a second process of the same run continues it.
    """

    def __init__(self, path: pathlib.Path):
        self._file = path.open("a", buffering=1)
        self._file.write("\n" if self._file.tell() else "")  # ends the line of a killed process
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event."""
        with self._lock:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")


class Tail:
    """Reads a growing journal.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """Returns the events that were completed since the last call.

        Half a line, left by a process that was killed, is dropped.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [event for line in complete.splitlines() if (event := _parse(line))]


def _parse(line: bytes) -> Event | None:
    """Reads one line; None for one that a killed process left unfinished."""
    try:
        return json.loads(line)
    except ValueError:
        return None

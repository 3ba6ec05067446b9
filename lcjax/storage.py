"""Files: durable writes, hard links and random reads, on local disks and on buckets.

Paths are ``etils.epath`` paths, as Orbax uses them. What only a local file system can do
(fsync, links, positioned reads) is done through ``os`` there; elsewhere an object is
written in one piece, which is atomic on object stores.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterable

from etils import epath

from lcjax.container import Container, Reader
from lcjax.errors import MissingFileError

_NO_LINKS = {
    errno.EPERM,
    errno.EXDEV,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EMLINK,
    errno.EACCES,
    errno.EINVAL,
}


def is_local(path: epath.Path) -> bool:
    """Whether the path lies on a mounted file system."""
    return "://" not in str(path)


def write(path: epath.Path, parts: Iterable[bytes]) -> None:
    """Writes a file and forces it to the disk; the directory is synced by the caller."""
    if not is_local(path):
        path.write_bytes(b"".join(parts))
        return
    with open(os.fspath(path), "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: epath.Path, parts: Iterable[bytes]) -> None:
    """Writes a file so that it is never seen unfinished, and syncs its directory."""
    if not is_local(path):
        write(path, parts)
        return
    passing = path.parent / f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
    try:
        write(passing, parts)
        os.replace(os.fspath(passing), os.fspath(path))
    except BaseException:
        passing.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: epath.Path) -> None:
    """Forces a directory's entries to the disk, where the file system knows how."""
    if not is_local(path):
        return
    try:
        handle = os.open(os.fspath(path), os.O_RDONLY)
    except OSError:
        return  # some systems do not open directories
    try:
        os.fsync(handle)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def link(source: epath.Path, target: epath.Path) -> bool:
    """Makes a hard link; False where the file system has none, or no more of them.

    Raises:
      MissingFileError: the source is gone.
    """
    if not (is_local(source) and is_local(target)):
        return False
    try:
        os.link(os.fspath(source), os.fspath(target))
    except FileNotFoundError as e:
        raise MissingFileError(f"{source}: gone while a later save was linking it") from e
    except OSError as e:
        if e.errno in _NO_LINKS:
            return False
        raise
    return True


def has_links(directory: epath.Path) -> bool:
    """Tries whether hard links work in a directory."""
    if not is_local(directory):
        return False
    probe = directory / f"probe-{uuid.uuid4().hex[:8]}.tmp"
    other = directory / f"{probe.name}.link"
    try:
        probe.write_bytes(b"")
        return link(probe, other)
    except (OSError, MissingFileError):
        return False
    finally:
        probe.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def copy(source: epath.Path, target: epath.Path) -> None:
    """Copies a file durably.

    Raises:
      MissingFileError: the source is gone.
    """
    try:
        data = source.read_bytes()
    except FileNotFoundError as e:
        raise MissingFileError(f"{source}: gone while a later save was copying it") from e
    write(target, [data])


def size_of(path: epath.Path) -> int | None:
    """A file's size in bytes, None where there is no such file."""
    try:
        return int(path.stat().length)
    except (FileNotFoundError, NotADirectoryError):
        return None


class File:
    """An open container file; close it, or use it as a context manager.

    Attributes:
      reader: its ``container.Reader``; safe to use from several threads.
    """

    def __init__(self, path: epath.Path) -> None:
        """Opens and checks a file.

        Raises:
          MissingFileError: there is no such file.
          CorruptDataError: its header, trailer or index is damaged.
        """
        self._close: Callable[[], None] = lambda: None
        try:
            read, size = self._open_local(path) if is_local(path) else self._open_remote(path)
            self.reader = Reader(read, size, str(path))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
            self._close()
            raise MissingFileError(
                f"{path}: this file of the checkpoint is missing; restore it from a copy, or "
                "restore another step"
            ) from e
        except BaseException:
            self._close()
            raise

    def _open_local(self, path: epath.Path) -> tuple[Callable[[int, int], bytes], int]:
        handle = os.open(os.fspath(path), os.O_RDONLY)
        self._close = lambda: os.close(handle)

        def read(offset: int, size: int) -> bytes:
            parts = []
            while size > 0:
                part = os.pread(handle, min(size, 1 << 30), offset)
                if not part:
                    break  # shorter than at opening: the hash check reports it
                parts.append(part)
                offset += len(part)
                size -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

        return read, os.fstat(handle).st_size

    def _open_remote(self, path: epath.Path) -> tuple[Callable[[int, int], bytes], int]:
        size = int(path.stat().length)
        handle = path.open("rb")
        lock = threading.Lock()
        self._close = handle.close

        def read(offset: int, count: int) -> bytes:
            with lock:
                handle.seek(offset)
                return bytes(handle.read(count))

        return read, size

    def close(self) -> None:
        """Closes the file; its reader must not be used any more."""
        self._close()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_container(path: epath.Path, container: Container) -> None:
    """Writes a container as a file, durably."""
    write(path, container.parts)

"""Text for the demo: the Python standard library's own source, as bytes.

Nothing is downloaded. Every file belongs to one side of the split, and a batch depends on
nothing but the seed and the step, so a resumed run sees the batches it would have seen.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig

import numpy as np

PACKAGES = ("asyncio", "collections", "email", "http", "importlib", "json", "logging", "unittest")
MAX_BYTES = 6_000_000
VALIDATION_EVERY = 12


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The two sides of the split.

    Attributes:
        train: bytes to train on, uint8.
        validation: bytes of other files, uint8.
        train_files: names of the files in ``train``, in order.
        validation_files: names of the files in ``validation``, in order.
    """

    train: np.ndarray
    validation: np.ndarray
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]


def source_files(stdlib: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Lists the source files in a fixed order: the top level, then a few packages.

    Args:
        stdlib: the folder to read; that of the running interpreter if None.

    Returns:
        The paths, sorted within each folder.
    """
    root = stdlib or pathlib.Path(sysconfig.get_path("stdlib"))
    folders = [root, *(root / name for name in PACKAGES)]
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def load_corpus(max_bytes: int = MAX_BYTES, stdlib: pathlib.Path | None = None) -> Corpus:
    """Reads the source files and splits them by file, every 12th one for validation.

    Args:
        max_bytes: stop before the file that would exceed this many bytes in total.
        stdlib: the folder to read; that of the running interpreter if None.

    Returns:
        The corpus.

    Raises:
        FileNotFoundError: if the interpreter comes without the source of its library.
    """
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    names: tuple[list[str], list[str]] = ([], [])
    root = stdlib or pathlib.Path(sysconfig.get_path("stdlib"))
    total = 0
    for index, path in enumerate(source_files(root)):
        text = path.read_bytes()
        if total + len(text) > max_bytes:
            break
        total += len(text)
        side = int(index % VALIDATION_EVERY == VALIDATION_EVERY - 1)
        sides[side].append(text)
        names[side].append(path.relative_to(root).as_posix())
    if not sides[1]:
        raise FileNotFoundError(f"no Python source to train on in {root}")
    train, validation = (np.frombuffer(b"".join(side), np.uint8) for side in sides)
    return Corpus(train, validation, tuple(names[0]), tuple(names[1]))


def batch(text: np.ndarray, seed: int, step: int, size: int, length: int) -> np.ndarray:
    """Draws the batch of one step.

    Args:
        text: the bytes to draw from.
        seed: the seed of the run.
        step: the number of the step; the same (seed, step) gives the same batch.
        size: sequences per batch.
        length: bytes to predict per sequence.

    Returns:
        int32 of shape ``(size, length + 1)``: inputs and, shifted by one, targets.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - length, size)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def validation_set(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """Cuts sequences that do not overlap, evenly spaced over the validation text.

    Args:
        text: the validation bytes.
        count: how many sequences.
        length: bytes to predict per sequence.

    Returns:
        int32 of shape ``(count, length + 1)``.

    Raises:
        ValueError: if the text is too short for that many sequences.
    """
    stride = len(text) // count
    if stride < length + 1:
        raise ValueError(f"{len(text)} bytes hold no {count} sequences of {length + 1} bytes")
    return text[np.arange(count)[:, None] * stride + np.arange(length + 1)].astype(np.int32)

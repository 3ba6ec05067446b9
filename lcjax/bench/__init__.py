"""Benchmarks against what users would run instead; each is a module named below.

A module has ``HELP`` (a line), ``add_arguments(parser)`` and ``run(options)``, which returns
the rows to show: dictionaries with the same keys throughout.
"""

from __future__ import annotations

import importlib
import os
import pathlib
from types import ModuleType

from lcjax.errors import LcjaxError

NAMES = ("fidelity", "lossless", "restores")
DATA_VARIABLE = "LCJAX_DATA"


class BenchError(LcjaxError):
    """A benchmark cannot run here: something is missing, or its arguments make no sense."""


def load(name: str) -> ModuleType:
    """The module of one benchmark."""
    return importlib.import_module(f"lcjax.bench.{name}")


def data_file(name: str, what: str, source: str) -> pathlib.Path:
    """A data file that is not part of the package.

    Args:
      name: the file's name in the folder that ``LCJAX_DATA`` names.
      what: what it holds, in words.
      source: where to get it, in words.

    Raises:
      BenchError: the variable is not set, or the file is not there.
    """
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        raise BenchError(
            f"{what} is needed: set {DATA_VARIABLE} to a folder with {name} ({source})"
        )
    path = pathlib.Path(folder) / name
    if not path.is_file():
        raise BenchError(f"{what} is needed, but there is no {path} ({source})")
    return path

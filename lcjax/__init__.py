"""lcjax: Orbax checkpoints of JAX and Flax training as small, verified deltas.

    manager = ocp.CheckpointManager(path, handler_registry=lcjax.handler_registry(preset="paper"))

Names are loaded when first used, so that the pure functions (``encode``, ``decode``) work
without importing Orbax. If Orbax is imported already, the handler is registered at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lcjax._version import __version__
from lcjax.errors import (
    BaseMismatchError,
    CorruptDataError,
    LcjaxError,
    MissingFileError,
    PresetError,
    TreeMismatchError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)

if TYPE_CHECKING:
    from lcjax import entropy
    from lcjax.chain import ChainOptions
    from lcjax.messages import Ref, decode, encode
    from lcjax.orbax import CheckpointHandler, args, handler_registry
    from lcjax.policy import Preset

_LAZY = {
    "ChainOptions": ("lcjax.chain", "ChainOptions"),
    "CheckpointHandler": ("lcjax.orbax", "CheckpointHandler"),
    "Preset": ("lcjax.policy", "Preset"),
    "Ref": ("lcjax.messages", "Ref"),
    "args": ("lcjax.orbax.args", None),
    "decode": ("lcjax.messages", "decode"),
    "encode": ("lcjax.messages", "encode"),
    "entropy": ("lcjax.entropy", None),
    "handler_registry": ("lcjax.orbax", "handler_registry"),
}

__all__ = [
    "BaseMismatchError",
    "ChainOptions",
    "CheckpointHandler",
    "CorruptDataError",
    "LcjaxError",
    "MissingFileError",
    "Preset",
    "PresetError",
    "Ref",
    "TreeMismatchError",
    "UnsupportedFormatError",
    "UnsupportedLeafError",
    "__version__",
    "args",
    "decode",
    "encode",
    "entropy",
    "handler_registry",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    if module_name == "lcjax.orbax.args":
        importlib.import_module("lcjax.orbax")  # registers the arguments with their handler
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if "orbax.checkpoint" in sys.modules:
    importlib.import_module("lcjax.orbax")

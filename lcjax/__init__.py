"""lcjax: Orbax checkpoints of JAX and Flax training as small, verified deltas.

    registry = lcjax.handler_registry(preset="balanced")
    manager = ocp.CheckpointManager(path, handler_registry=registry)

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
    from lcjax.explain import Explanation, explain
    from lcjax.messages import Ref, decode, encode
    from lcjax.orbax import CheckpointHandler, args, handler_registry
    from lcjax.orbax.v1 import install, uninstall
    from lcjax.policy import Bounded, Exact, Lc, Level, Moment, Preset, Rule, Step

_LAZY = {
    "Bounded": ("lcjax.policy", "Bounded"),
    "ChainOptions": ("lcjax.chain", "ChainOptions"),
    "CheckpointHandler": ("lcjax.orbax", "CheckpointHandler"),
    "Exact": ("lcjax.policy", "Exact"),
    "Explanation": ("lcjax.explain", "Explanation"),
    "Lc": ("lcjax.policy", "Lc"),
    "Level": ("lcjax.policy", "Level"),
    "Moment": ("lcjax.policy", "Moment"),
    "Preset": ("lcjax.policy", "Preset"),
    "Ref": ("lcjax.messages", "Ref"),
    "Rule": ("lcjax.policy", "Rule"),
    "Step": ("lcjax.policy", "Step"),
    "args": ("lcjax.orbax.args", None),
    "decode": ("lcjax.messages", "decode"),
    "encode": ("lcjax.messages", "encode"),
    "entropy": ("lcjax.entropy", None),
    "explain": ("lcjax.explain", "explain"),
    "handler_registry": ("lcjax.orbax", "handler_registry"),
    "install": ("lcjax.orbax.v1", "install"),
    "uninstall": ("lcjax.orbax.v1", "uninstall"),
}

__all__ = [
    "BaseMismatchError",
    "Bounded",
    "ChainOptions",
    "CheckpointHandler",
    "CorruptDataError",
    "Exact",
    "Explanation",
    "Lc",
    "LcjaxError",
    "Level",
    "MissingFileError",
    "Moment",
    "Preset",
    "PresetError",
    "Ref",
    "Rule",
    "Step",
    "TreeMismatchError",
    "UnsupportedFormatError",
    "UnsupportedLeafError",
    "__version__",
    "args",
    "decode",
    "encode",
    "entropy",
    "explain",
    "handler_registry",
    "install",
    "uninstall",
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

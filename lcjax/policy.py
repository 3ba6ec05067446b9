"""Presets, and which codec a leaf gets under each.

Codecs, as this module names them:

* ``lc``: chained; LC-Checkpoint's lossy delta (``lcjax.codecs.lc``).
* ``delta``: chained; bit-exact, against the previous state where that is smaller.
* ``alone``: bit-exact, by itself; no later save needs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lcjax.codecs import lc
from lcjax.errors import PresetError

PRESETS = ("paper", "lossless")
SCOPES = ("model", "leaf")
_PLANNED = ("balanced", "extreme")
# First moments do not resemble their past selves, so a delta only costs an older file.
_NEVER_CHAINED = ("mu", "trace", "count", "rng")
_SMALL = 64  # bytes; below, a leaf by itself costs less than keeping it in the chain


@dataclass(frozen=True)
class Preset:
    """A named fidelity with its options.

    Attributes:
      name: ``"paper"`` or ``"lossless"``.
      bits: code width of ``paper``, 1 to 8; the paper finds 3 enough for most models.
      scope: whether ``paper`` picks its buckets over the whole ``"model"``, as published,
        or per ``"leaf"``.
    """

    name: str
    bits: int = 3
    scope: Literal["model", "leaf"] = "model"

    @property
    def is_lossy(self) -> bool:
        """Whether what is restored may differ from what was saved."""
        return self.name != "lossless"

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, for a step's metadata."""
        if self.name == "lossless":
            return {"name": self.name}
        return {"name": self.name, "bits": self.bits, "scope": self.scope}


def resolve(
    preset: str | Preset | None, bits: int | None = None, scope: str | None = None
) -> Preset:
    """Checks a preset's name and options.

    Args:
      preset: the name, or a finished ``Preset``; there is no default.
      bits: overrides ``Preset.bits``.
      scope: overrides ``Preset.scope``.

    Raises:
      PresetError: no name, an unknown name, or options out of range.
    """
    if preset is None:
        raise PresetError(
            "name a preset to save: preset='lossless' restores every bit, preset='paper' is "
            "LC-Checkpoint's lossy delta. There is no default, so that nobody loses precision "
            "unasked"
        )
    if isinstance(preset, str):
        if preset in _PLANNED:
            raise PresetError(f"preset {preset!r} is not in this release; {_choices()}")
        if preset not in PRESETS:
            raise PresetError(f"unknown preset {preset!r}; {_choices()}")
        preset = Preset(preset)
    if preset.name == "lossless" and (bits is not None or scope is not None):
        raise PresetError("preset 'lossless' takes neither bits nor scope")
    bits = preset.bits if bits is None else bits
    wanted = preset.scope if scope is None else scope
    if type(bits) is not int or not lc.MIN_BITS <= bits <= lc.MAX_BITS:
        raise PresetError(f"bits must be an int from {lc.MIN_BITS} to {lc.MAX_BITS}, got {bits!r}")
    if wanted == "model":
        return Preset(preset.name, bits, "model")
    if wanted == "leaf":
        return Preset(preset.name, bits, "leaf")
    raise PresetError(f"scope must be one of {', '.join(SCOPES)}, got {wanted!r}")


def codec_for(preset: Preset, dtype: np.dtype, shape: tuple[int, ...], role: str) -> str:
    """Which codec an array leaf gets: ``lc``, ``delta`` or ``alone``.

    Args:
      preset: the save's preset.
      dtype: the leaf's stored dtype.
      shape: the leaf's stored shape.
      role: as found by ``lcjax.tree``: ``param``, ``mu``, ``nu``, ...
    """
    size = math.prod(shape)
    if preset.name == "paper":
        # The paper speaks of model parameters; what else training needs stays exact.
        is_param = role == "param" and dtype.name in lc.SUPPORTED_DTYPES
        return "lc" if is_param and size else "alone"
    if role in _NEVER_CHAINED or size * dtype.itemsize < _SMALL:
        return "alone"
    return "delta"


def _choices() -> str:
    return f"choose one of {', '.join(repr(p) for p in PRESETS)}"

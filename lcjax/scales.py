"""How fine each leaf is stored: steps that follow what training does to the leaf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lcjax.codecs import moments, steps
from lcjax.policy import Moment, Step

# A leaf counts as still where what it moved is below this share of what the save before had
# left over; only then is there nothing that a finer step would show.
_STILL = 1e-4
# No step is finer than this share of the leaf's root mean square: floats themselves are not.
_FINEST = 2.0**-18


class Note(NamedTuple):
    """What a save remembers of a leaf for the next one.

    Attributes:
      step: the step it was stored with.
      left: sum of ``(u - c)^2``, what that save left over.
    """

    step: float
    left: float


class Leaf(NamedTuple):
    """What a step is chosen from.

    Attributes:
      codec: the leaf's codec.
      measured: against the reference, or the leaf alone for a key frame.
      note: of the save before, if there was one.
      mean_nu: mean of the second moment, where there is one.
      is_key: whether there is no reference.
    """

    codec: Step
    measured: steps.Measure
    note: Note | None
    mean_nu: float | None
    is_key: bool


def step_sizes(leaves: Mapping[str, Leaf]) -> dict[str, float]:
    """The step of each leaf, in the leaf's units.

    What a leaf moved since the save before is what its delta holds beyond what that save
    left over. The step is ``size`` times its root mean square, and finer for leaves with
    larger second moments: where gradients are large, an error costs more.
    """
    weights = _weights(leaves)
    return {name: _step(leaf, weights[name]) for name, leaf in leaves.items()}


def _step(leaf: Leaf, weight: float) -> float:
    count = max(leaf.measured.elements, 1)
    size = math.sqrt(leaf.measured.state_squares / count)
    first = size * 2.0**-leaf.codec.key_bits
    if leaf.is_key:
        return leaf.note.step if leaf.note is not None and leaf.note.step > 0 else first
    moved = leaf.measured.delta_squares
    if leaf.note is not None:
        moved -= leaf.note.left
        if moved <= _STILL * leaf.note.left:
            return leaf.note.step
    step = leaf.codec.size * math.sqrt(moved / count) * weight
    return max(step, size * _FINEST) if moved > 0 else first


def _weights(leaves: Mapping[str, Leaf]) -> dict[str, float]:
    """``mean(v)^-weight`` of each leaf, over its average weighted by elements and movement."""
    raw = {
        name: leaf.mean_nu**-leaf.codec.weight
        for name, leaf in leaves.items()
        if leaf.mean_nu is not None and leaf.mean_nu > 0 and math.isfinite(leaf.mean_nu)
    }
    total = sum(leaves[n].measured.elements for n in raw)
    if not total:
        return dict.fromkeys(leaves, 1.0)
    logs = sum(leaves[n].measured.elements * math.log(w) for n, w in raw.items()) / total
    return {name: raw[name] / math.exp(logs) if name in raw else 1.0 for name in leaves}


class MomentScale(NamedTuple):
    """How a moment is coded: the prediction's gain, and the step for the rest or None."""

    gain: float
    step: float | None


def moment_scale(codec: Moment, fit: moments.Fit) -> MomentScale:
    """Least squares for the gain; the step from what the prediction misses."""
    gain = 0.0
    if fit.delta_squares > 0:
        gain = codec.boost * fit.cross / fit.delta_squares
    gain = float(np.float32(gain))
    if not math.isfinite(gain):
        gain = 0.0
    if codec.size is None or not fit.elements:
        return MomentScale(gain, None)
    rest = fit.own_squares - 2 * gain * fit.cross + gain * gain * fit.delta_squares
    return MomentScale(gain, codec.size * math.sqrt(max(rest, 0.0) / fit.elements) or None)

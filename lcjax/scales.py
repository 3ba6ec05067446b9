"""How fine each leaf is stored: steps that follow what training does to the leaf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lcjax.codecs import moments, steps
from lcjax.policy import Moment, Step

# A leaf counts as still where its delta is what the save before left over, to the digits that a
# manifest keeps; only then is there nothing that a finer step would show.
_STILL = 1e-5
# In the long run a delta is partly what was left over, partly what training moved. Where a
# learning rate fades, the first part would keep steps as they were: so they also follow the
# second, which is this much below the whole in the long run.
_LEAD = 1.8
# Steps shrink at most so much from save to save; a delta of more steps costs too much.
_SHRINK = 16.0
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

    Leaves with a second moment share one scale, the root mean square of all their deltas:
    ``size`` times that, times ``mean(v)^-weight`` over its own root mean square. Where
    gradients are large an error costs more, and what a leaf moved does not matter beside
    that. A leaf without a second moment goes by its own delta.
    """
    weights = _weights(leaves)
    shared = _shared_scale(leaves, weights)
    return {name: _step(leaf, weights.get(name), shared) for name, leaf in leaves.items()}


def _step(leaf: Leaf, weight: float | None, shared: float) -> float:
    count = max(leaf.measured.elements, 1)
    size = math.sqrt(leaf.measured.state_squares / count)
    first = size * 2.0**-leaf.codec.key_bits
    if leaf.is_key:
        return leaf.note.step if leaf.note is not None and leaf.note.step > 0 else first
    delta = leaf.measured.delta_squares
    if leaf.note is not None and abs(delta - leaf.note.left) <= _STILL * leaf.note.left:
        return leaf.note.step
    scale = math.sqrt(_scale_squares(leaf) / count) if weight is None else shared * weight
    step = max(leaf.codec.size * scale, size * _FINEST)
    if leaf.note is not None:
        step = max(step, leaf.note.step / _SHRINK)
    return step if step > 0 else first


def _scale_squares(leaf: Leaf) -> float:
    """A leaf's delta, or what it moved where that is much less; sum of squares."""
    delta = leaf.measured.delta_squares
    if leaf.note is None:
        return delta
    return min(delta, _LEAD**2 * max(delta - leaf.note.left, 0.0))


def _weights(leaves: Mapping[str, Leaf]) -> dict[str, float]:
    """``mean(v)^-weight`` of each leaf with a second moment, its mean square over elements 1."""
    raw = {
        name: leaf.mean_nu**-leaf.codec.weight
        for name, leaf in leaves.items()
        if leaf.mean_nu is not None and leaf.mean_nu > 0 and math.isfinite(leaf.mean_nu)
    }
    total = sum(leaves[n].measured.elements for n in raw)
    squares = sum(leaves[n].measured.elements * w * w for n, w in raw.items())
    scale = math.sqrt(squares / total) if total and squares > 0 else 1.0
    return {name: w / scale for name, w in raw.items()}


def _shared_scale(leaves: Mapping[str, Leaf], weights: Mapping[str, float]) -> float:
    """Root mean square over all weighted leaves that have a reference."""
    taken = [leaves[n] for n in weights if not leaves[n].is_key]
    count = sum(leaf.measured.elements for leaf in taken)
    return math.sqrt(sum(map(_scale_squares, taken)) / count) if count else 0.0


class MomentScale(NamedTuple):
    """How a moment is coded: the prediction's gain, and the step for the rest or None."""

    gain: float
    step: float | None


def moment_scale(codec: Moment, fit: moments.Fit) -> MomentScale:
    """The gain that makes the prediction ``norm`` times as large as the moment, and the step.

    Least squares would shrink a prediction by its correlation with the moment, and a shrunk
    moment is movement lost when training resumes: the trail points to where the parameters
    have been going on average, which is better than where one noisy mean points. The step,
    for what the prediction misses, is in root mean squares of that.
    """
    gain = 0.0
    if fit.predicted_squares > 0 and fit.cross != 0:
        gain = codec.norm * math.sqrt(fit.own_squares / fit.predicted_squares)
        gain = float(np.float32(math.copysign(gain, fit.cross)))
    if not math.isfinite(gain):
        gain = 0.0
    size = codec.size if gain else codec.key_size
    if size is None or not fit.elements:
        return MomentScale(gain, None)
    rest = fit.scaled_squares - 2 * gain * fit.scaled_cross + gain * gain * fit.trail_squares
    return MomentScale(gain, size * math.sqrt(max(rest, 0.0) / fit.elements) or None)

"""From paired validation losses to *lost steps*: how much longer the same training would take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

OFFSET = 60  # steps; with it the logarithm fits a curve that starts with a warmup


class Curve(NamedTuple):
    """``loss = level - fall * log(step + OFFSET)``, fitted to a run's validation losses."""

    level: float
    fall: float

    def slope(self, step: float) -> float:
        """How much the loss falls per step."""
        return self.fall / (step + OFFSET)


class Outcome(NamedTuple):
    """What restoring cost.

    Attributes:
      gap: mean difference of the losses, in nats.
      lost_steps: the gap over the slope of the curve.
      upper: one-sided 95% bound of the lost steps, from the spread over batch orders
        (Student's t); equal to them where nothing differs, NaN for a single order.
    """

    gap: float
    lost_steps: float
    upper: float


def fit(losses: Mapping[int, float]) -> Curve:
    """Fits the curve by least squares to ``{step: loss}``."""
    steps = np.array(sorted(losses))
    fall, level = np.polyfit(-np.log(steps + OFFSET), [losses[s] for s in steps], 1)
    return Curve(float(level), float(fall))


def estimate(
    exact: Mapping[tuple[int, int], Sequence[float]],
    restored: Mapping[tuple[int, int], Sequence[float]],
    curve: Curve,
    after: Sequence[int],
) -> Outcome:
    """Compares runs that go on from the true and from the restored state.

    Args:
      exact: validation losses by ``(point, order)``: the step of the restore, the batch order.
      restored: the same for restored states; pairs that ``exact`` has as well.
      curve: of the uninterrupted run.
      after: steps after the restore at which the losses were taken.
    """
    gaps: dict[int, list[float]] = {}
    slopes: dict[int, list[float]] = {}
    for point, order in sorted(restored):
        pairs = zip(restored[point, order], exact[point, order], strict=True)
        gaps.setdefault(order, []).extend(ours - true for ours, true in pairs)
        slopes.setdefault(order, []).extend(curve.slope(point + n) for n in after)
    lost = [sum(gaps[order]) / sum(slopes[order]) for order in gaps]
    gap = float(np.mean([g for each in gaps.values() for g in each]))
    mean = float(np.mean(lost))
    return Outcome(gap, mean, mean + _margin(lost))


def _margin(values: Sequence[float]) -> float:
    """Half of a one-sided 95% interval of the mean."""
    from scipy import stats

    if not any(value != values[0] for value in values) and values[0] == 0:
        return 0.0
    if len(values) < 2:
        return math.nan
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(stats.t.ppf(0.95, len(values) - 1)) * spread

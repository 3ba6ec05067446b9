"""One chunk to encode, by each codec; jobs run side by side and share nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lcjax import boxes, segment
from lcjax.boxes import Box
from lcjax.codecs import levels, moments, steps
from lcjax.policy import Bounded, Level, Moment, Plan, Step

# Share of a chunk's elements from which on exceptions, which take 10 or 12 bytes each, may be more
# than all elements stored exactly.
_MANY_EXCEPTIONS = 1 / 64


class Item(NamedTuple):
    """An array leaf ready to be encoded.

    Attributes:
      name: the leaf's name.
      dtype: stored dtype, native byte order.
      shape: stored shape.
      plan: how it is stored.
      array: the flat values, numpy ``(elements,)``; None where they are in a device flat.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    plan: Plan
    array: np.ndarray | None


class Loss(NamedTuple):
    """What a chunk, or a leaf, lost.

    Attributes:
      delta_squares: sum of ``(u - c_old)^2``; of ``u^2`` where nothing was known before.
      error_squares: sum of ``(u - c_new)^2``.
      state_squares: sum of ``u^2``. All three over elements that are finite.
      max_error: largest ``|u - c_new|``.
      zeros: elements with code 0: postponed, or dropped.
      odd: elements stored exactly because they are not finite or out of range.
    """

    delta_squares: float
    error_squares: float
    state_squares: float
    max_error: float
    zeros: int
    odd: int

    def __add__(self, other: object) -> Loss:
        assert isinstance(other, Loss)
        sums = [a + b for a, b in zip(self, other, strict=True)]
        sums[3] = max(self.max_error, other.max_error)
        return Loss(*sums)  # type: ignore[arg-type]


class Done(NamedTuple):
    """A chunk's description, its payload, and what a reader rebuilds.

    Attributes:
      entry: the description; a ``table`` in it is an array that still needs a number.
      payload: the bytes.
      values: the chunk's new values, flat; None where they are in a device flat.
      loss: None for exact chunks.
    """

    entry: dict[str, Any]
    payload: bytes
    values: Any
    loss: Loss | None


def span(item: Item, box: Box) -> slice:
    """Where a box lies in its leaf's flat values."""
    start = boxes.flat_start(box, item.shape)
    return slice(start, start + math.prod(boxes.box_shape(box)))


class ExactJob(NamedTuple):
    """Bit-exact, against a base where that is smaller."""

    item: Item
    box: Box
    values: np.ndarray
    base: np.ndarray | None

    def run(self) -> Done:
        """Encodes it."""
        part = span(self.item, self.box)
        base = None if self.base is None else self.base[part]
        values = self.values[part]
        entry, payload = segment.encode_exact(values, base)
        return Done(_hashed(entry, values, self.item, self.box), payload, values, None)


class LcJob(NamedTuple):
    """A chunk that LC-Checkpoint's quantizer has coded already."""

    item: Item
    box: Box
    codes: np.ndarray
    table: np.ndarray
    where: np.ndarray
    exact: np.ndarray
    hash: Callable[[], str]
    kept: Callable[[], np.ndarray]

    def run(self) -> Done:
        """Encodes it."""
        entry, payload = segment.encode_lc(self.codes, self.table, self.where, self.exact)
        done = Done(entry, payload, None, None)
        if self.where.size > self.codes.size * _MANY_EXCEPTIONS:
            done = _smaller(done, self.kept(), None)
        done.entry["hash"] = self.hash()
        return done


class StepJob(NamedTuple):
    """A parameter's delta of a given step, or its key frame where there is no base."""

    item: Item
    box: Box
    values: np.ndarray
    base: np.ndarray | None
    step: float
    top: float

    def run(self) -> Done:
        """Encodes it; 16-bit floats exactly where that is smaller."""
        codec = self.item.plan.codec
        assert isinstance(codec, Step)
        part = span(self.item, self.box)
        u = self.values[part]
        base = None if self.base is None else self.base[part]
        if base is None:
            done = _key(u, steps.grid_exponent(self.step, self.top))
        else:
            done = _delta(u, base, self.step, codec.dead_zone, codec.reach)
        if u.dtype.itemsize < 4:
            entry, payload = segment.encode_exact(u, base)
            if len(payload) <= len(done.payload):
                nothing = steps.Losses(0.0, 0.0, 0, 0)
                done = Done(entry, payload, u, _loss(nothing, steps.measure(u, base)))
        else:
            done = _unless_odd(done, base)
        return done._replace(entry=_hashed(done.entry, done.values, self.item, self.box))


class LevelJob(NamedTuple):
    """A second moment."""

    item: Item
    box: Box
    values: np.ndarray
    base: np.ndarray | None
    shift: int

    def run(self) -> Done:
        """Encodes it."""
        codec = self.item.plan.codec
        assert isinstance(codec, Level)
        part = span(self.item, self.box)
        u = self.values[part]
        base = None if self.base is None else self.base[part]
        made = levels.encode(u, base, codec.octaves, codec.dead_zone, self.shift)
        entry = _entry("levels:key" if base is None else "levels", made.exceptions)
        entry["spec"] = list(made.spec[:4])
        if made.spec.edges:
            entry["edges"] = list(made.spec.edges)
        lost = made.losses
        loss = Loss(
            steps.measure(u, base).delta_squares,
            lost.error_squares,
            lost.state_squares,
            lost.max_error,
            lost.zeros,
            lost.odd,
        )
        done = _unless_odd(Done(entry, made.payload, made.reference, loss), base)
        return done._replace(entry=_hashed(done.entry, done.values, self.item, self.box))


class MomentJob(NamedTuple):
    """A first moment, given its parameter's trail and the root of the second moment.

    ``recipe`` is how the trail was made; None where there is none, and ``trail`` is 0.
    """

    item: Item
    box: Box
    values: np.ndarray
    recipe: moments.Recipe | None
    trail: np.ndarray
    root: np.ndarray
    gain: float
    step: float | None

    def run(self) -> Done:
        """Encodes it."""
        codec, plan = self.item.plan.codec, self.item.plan
        assert isinstance(codec, Moment)
        part = span(self.item, self.box)
        m = self.values[part]
        made = moments.encode(
            m, self.trail[part], self.root[part], self.gain, self.step, codec.dead_zone
        )
        entry = _entry("moment", made.exceptions) | {
            "table": made.table,
            "gain": segment.float_text(self.gain),
            "given": [None if self.recipe is None else self.recipe.param, plan.nu],
        }
        if self.recipe is not None:
            entry["trail"] = [self.recipe.span, self.recipe.memory]
        loss = _loss(made.losses, steps.measure(m, None))
        done = _unless_odd(Done(entry, made.payload, made.values, loss), None)
        return done._replace(entry=_hashed(done.entry, done.values, self.item, self.box))


class BoundedJob(NamedTuple):
    """Every element within a bound, checked here."""

    item: Item
    box: Box
    values: np.ndarray
    base: np.ndarray | None
    top: float

    def run(self) -> Done:
        """Encodes it."""
        codec = self.item.plan.codec
        assert isinstance(codec, Bounded)
        part = span(self.item, self.box)
        u = self.values[part]
        base = None if self.base is None else self.base[part]
        done = None
        if codec.absolute is not None and base is None:
            done = _key(u, steps.grid_exponent(2 * codec.absolute, self.top))
        elif codec.absolute is not None and base is not None:
            done = _delta(u, base, steps.bounded_step(codec.absolute), 0.5, None)
        if done is None or not within(u, done.values, codec):
            # Rounded to fewer bits, then stored as it is: any float can be stored so.
            kept = rounded(u, base, codec)
            entry, payload = segment.encode_exact(kept, base)
            lost = steps.Losses(*steps.losses(u, kept), 0, 0)
            done = Done(entry, payload, kept, _loss(lost, steps.measure(u, base)))
        done = _unless_odd(done, base)
        return done._replace(entry=_hashed(done.entry, done.values, self.item, self.box))


def within(u: np.ndarray, kept: np.ndarray, codec: Bounded) -> bool:
    """Whether a bounded codec's promise holds for every element.

    Elements that are not finite must be the same, bit for bit.
    """
    same = _words(u) == _words(kept)
    return bool(np.all(same | (_near(u, kept, codec) & np.isfinite(u.astype(np.float64)))))


def rounded(u: np.ndarray, base: np.ndarray | None, codec: Bounded) -> np.ndarray:
    """The reference where it is within the bound, else ``u`` with fewer mantissa bits.

    What no rounding brings within the bound stays as it is.
    """
    if codec.relative is not None:
        kept_bits = max(0, math.ceil(-math.log2(codec.relative)) - 1)
        short = steps.shorten(u, kept_bits)
    else:
        short = u
    kept = np.where(_near(u, short, codec), short, u)
    if base is not None:
        kept = np.where(_near(u, base, codec), base, kept)
    # ``where`` on these dtypes copies values; NaN payloads are put back as they were.
    odd = ~np.isfinite(u.astype(np.float32))
    kept[odd] = u[odd]
    return kept


def _near(u: np.ndarray, c: np.ndarray, codec: Bounded) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        x, y = u.astype(np.float64), c.astype(np.float64)
        bound = codec.absolute if codec.absolute is not None else codec.relative * np.abs(x)
        return np.abs(x - y) <= bound


def _words(values: np.ndarray) -> np.ndarray:
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def _delta(
    u: np.ndarray, base: np.ndarray, step: float, dead_zone: float, reach: float | None
) -> Done:
    """A chunk's quantized delta, without its hash."""
    made = steps.quantize(u, base, step, dead_zone, reach)
    entry, payload = segment.encode_lc(made.codes, made.table, made.where, made.exact)
    return Done(entry, payload, made.reference, _loss(made.losses, steps.measure(u, base)))


def _key(u: np.ndarray, exponent: int) -> Done:
    """A chunk by itself on a grid, without its hash."""
    key = steps.encode_key(u, exponent)
    entry = _entry("grid", key.exceptions) | {"exponent": key.exponent}
    return Done(entry, key.payload, key.reference, _loss(key.losses, steps.measure(u, None)))


def _unless_odd(done: Done, base: np.ndarray | None) -> Done:
    """A lossy chunk, its values coded exactly where many exceptions make that smaller."""
    many = done.entry.get("exceptions", 0) > done.values.size * _MANY_EXCEPTIONS
    return _smaller(done, done.values, base) if many else done


def _smaller(done: Done, values: np.ndarray, base: np.ndarray | None) -> Done:
    """The same values, coded exactly if that is smaller; a reader gets the same."""
    entry, payload = segment.encode_exact(values, base)
    return (
        done if len(done.payload) <= len(payload) else done._replace(entry=entry, payload=payload)
    )


def _entry(codec: str, exceptions: int) -> dict[str, Any]:
    """A description's beginning; exceptions are left out where there are none."""
    entry: dict[str, Any] = {"codec": codec}
    if exceptions:
        entry["exceptions"] = exceptions
    return entry


def _hashed(entry: dict[str, Any], values: np.ndarray, item: Item, box: Box) -> dict[str, Any]:
    entry["hash"] = boxes.box_hash(values, box, item.shape)
    return entry


def _loss(lost: steps.Losses, measured: steps.Measure) -> Loss:
    return Loss(
        measured.delta_squares,
        lost.error_squares,
        measured.state_squares,
        lost.max_error,
        lost.zeros,
        lost.odd,
    )


Job: TypeAlias = ExactJob | LcJob | StepJob | LevelJob | MomentJob | BoundedJob

"""``lcjax.explain``: what each leaf of a state will get, and why."""

from __future__ import annotations

import io
import math
from typing import Any, NamedTuple

from lcjax import policy, roles, tree
from lcjax.policy import Bounded, Exact, Lc, Level, Moment, Plan, Preset, Step


class Explained(NamedTuple):
    """One leaf.

    Attributes:
      name: the leaf's name, as rules' paths and errors have it.
      dtype: its dtype, or the Python type of a scalar.
      shape: its shape; empty for scalars.
      role: the part it plays, as rules' roles have it.
      codec: what stores it, in words.
      reason: the rule that chose it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    codec: str
    reason: str


class Explanation(tuple[Explained, ...]):
    """The leaves of a state in order; printed as a table."""

    preset: Preset

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.preset.name}: {self.preset.promise}", title_justify="left")
        for field in Explained._fields:
            table.add_column(field, overflow="fold")
        for leaf in self:
            shape = "x".join(map(str, leaf.shape))
            table.add_row(leaf.name, leaf.dtype, shape, leaf.role, leaf.codec, leaf.reason)
        out = io.StringIO()
        Console(file=out, width=160).print(table)
        return out.getvalue().rstrip()


def explain(state: Any, *, preset: str | Preset) -> Explanation:
    """Tells what each leaf of a state gets under a preset, without storing anything.

    Args:
      state: any pytree, with arrays or with ``jax.ShapeDtypeStruct`` in their place.
      preset: a preset's name, or a ``Preset`` with rules and roles of one's own.

    Returns:
      One ``Explained`` per leaf; ``print`` shows a table.

    Raises:
      PresetError: an unknown preset.
      UnsupportedLeafError: a leaf that cannot be stored.

    Example:
      >>> import numpy as np
      >>> for leaf in explain({"w": np.ones((8, 8), np.float32)}, preset="balanced"):
      ...     print(leaf.name, leaf.role, "|", leaf.reason)
      w param | role param|ema
    """
    chosen = policy.resolve(preset)
    leaves = tree.flatten(state, target=True).leaves
    rows = []
    plans = policy.plans(chosen, leaves)
    for leaf, role, plan in zip(leaves, roles.stated(leaves, chosen.roles), plans, strict=True):
        if plan is None or leaf.spec is None:
            rows.append(Explained(leaf.name, leaf.kind, (), role, "in the record", "not an array"))
            continue
        dtype = leaf.spec.dtype if leaf.spec.impl is None else f"key<{leaf.spec.impl}>"
        rows.append(Explained(leaf.name, dtype, leaf.spec.shape, role, in_words(plan), plan.reason))
    made = Explanation(rows)
    made.preset = chosen
    return made


def in_words(plan: Plan) -> str:
    """A leaf's codec in words."""
    codec = plan.codec
    if isinstance(codec, Exact):
        return "exact, delta if smaller" if plan.kind == "delta" else "exact, by itself"
    if isinstance(codec, Lc):
        return f"LC-Checkpoint, {codec.bits} bits, scope {codec.scope}"
    if isinstance(codec, Step):
        whose = f"all deltas, by mean({plan.nu})^-{codec.weight:g}" if plan.nu else "its delta"
        return f"steps of {codec.size:g} rms of {whose}"
    if isinstance(codec, Level):
        return f"levels of log2, {codec.octaves:g} octaves apart"
    if isinstance(codec, Moment):
        source = f"predicted from the delta of {plan.param}" if plan.param else "not predicted"
        if codec.size is None:
            return f"{source}; the rest is dropped" if plan.param else "dropped: restarts at 0"
        return f"{source}; the rest in steps of {codec.size:g} rms"
    assert isinstance(codec, Bounded)
    if codec.absolute is not None:
        return f"every element within {codec.absolute:g}"
    digits = -math.floor(math.log10(codec.relative or 1)) + 1
    return f"every element within {100 * (codec.relative or 0):.{digits}g} %"

"""The demo's table and picture."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from lcjax import policy
from lcjax.demo.figures import Run
from lcjax.demo.run import KILLED, PLAIN, TITLES, WHOLE, Result

SMOOTHING = 10
COLORS = {KILLED: "tab:orange", WHOLE: "tab:blue", PLAIN: "tab:gray"}


def _size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} GB"


def table(result: Result) -> Table:
    """Lays the two codecs side by side."""
    left, right = result.lcjax, result.orbax
    settings = result.settings
    preset = policy.resolve(settings.preset, settings.bits).to_json()
    name = preset.pop("name")
    options = "".join(f", {key} {value}" for key, value in preset.items())
    deltas = sum(len(result.runs[name].deltas()) for name in (KILLED, WHOLE))
    grid = Table(
        title=f"{settings.steps} steps, a save every {settings.save_every}",
        caption=f"lcjax: preset {name}{options}; bytes and ratios are "
        f"medians over {deltas} delta saves, times over the saves of one run",
    )
    grid.add_column("")
    grid.add_column("lcjax", justify="right")
    grid.add_column("plain Orbax", justify="right")
    grid.add_column("Orbax / lcjax", justify="right")

    def size(label: str, a: float, b: float) -> None:
        grid.add_row(label, _size(a), _size(b), f"{b / a:.1f}")

    def seconds(label: str, a: float, b: float) -> None:
        grid.add_row(label, f"{a * 1e3:.0f} ms", f"{b * 1e3:.0f} ms", f"{b / a:.1f}")

    size("parameters, written per save", left.params_bytes, right.params_bytes)
    grid.add_row("  float32 over that", f"{left.params_ratio:.1f}x", f"{right.params_ratio:.2f}x")
    size("whole state, written per save", left.state_bytes, right.state_bytes)
    grid.add_row("  in memory over that", f"{left.state_ratio:.2f}x", f"{right.state_ratio:.2f}x")
    size("written by all saves of a run", left.written, right.written)
    size(f"on disk at the end, {settings.keep} steps kept", left.on_disk, right.on_disk)
    seconds("save, until committed", left.save_s, right.save_s)
    seconds("  of which the step loop waits", left.blocked_s, right.blocked_s)
    seconds("restore in a new process", left.restore_s, right.restore_s)
    seconds("  once more", left.restore_again_s, right.restore_again_s)
    return grid


def losses(result: Result) -> Table:
    """Lists the validation loss of each run."""
    count = result.settings.validation_sequences
    whole = result.runs[WHOLE].validation_loss
    grid = Table(title=f"validation loss on {count} sequences, nats per byte")
    grid.add_column("run")
    grid.add_column("loss", justify="right")
    grid.add_column("against uninterrupted", justify="right")
    for name, run in result.runs.items():
        title = TITLES[name]
        if run.killed_at is not None:
            title += f" (killed while saving step {run.killed_at}, resumed from {run.resumed_from})"
        gap = "" if name == WHOLE else f"{run.validation_loss - whole:+.4f}"
        grid.add_row(title, f"{run.validation_loss:.4f}", gap)
    return grid


def _smooth(values: Sequence[float]) -> np.ndarray:
    """Averages each value with those just before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - SMOOTHING)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _draw_saves(axes: object, run: Run, item: str | None, **style: object) -> None:
    """Draws the bytes of each save, of one item or of all."""
    points = [(s.step, s.written[item] if item else s.state_bytes) for s in run.saves]
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, **style)  # type: ignore[attr-defined]


def picture(result: Result, path: pathlib.Path) -> None:
    """Draws the loss curves and the bytes per save.

    Args:
        result: outcome of the demo.
        path: the PNG file to write.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in (WHOLE, KILLED):
        run = result.runs[name]
        steps = sorted(run.losses)
        style = "-" if name == WHOLE else "--"
        values = _smooth([run.losses[step] for step in steps])
        left.plot(steps, values, style, color=COLORS[name], label=TITLES[name], linewidth=1.3)
    killed = result.runs[KILLED]
    if killed.killed_at is not None:
        left.axvline(killed.killed_at, color="tab:red", linestyle=":", label="SIGKILL")
        left.axvline(killed.resumed_from, color="tab:green", linestyle=":", label="restored step")
    left.set(xlabel="step", ylabel=f"training loss, mean of {SMOOTHING} steps (nats per byte)")
    left.legend()
    for name in (WHOLE, PLAIN):
        run, color = result.runs[name], COLORS[name]
        _draw_saves(right, run, None, color=color, label=f"{TITLES[name]}: whole state")
        label = f"{TITLES[name]}: parameters"
        _draw_saves(right, run, "params", color=color, linestyle=":", label=label)
    right.set(xlabel="step", ylabel="bytes written by the save", yscale="log")
    right.legend()
    figure.savefig(path, dpi=120)

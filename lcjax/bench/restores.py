"""Trains, kills the process in the middle of a save and restores, many times over.

Beside it the same training runs without interruption, also in other batch orders from the same
initial parameters: their final losses show how much chance alone is worth.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shutil
import statistics
import sys
from typing import Any, NamedTuple

from lcjax.bench import BenchError
from lcjax.demo import process
from lcjax.demo.journal import Event
from lcjax.demo.settings import Settings, quick
from lcjax.policy import PRESETS

HELP = "train, save, kill and restore twenty times over, beside uninterrupted training"
OUT = "lcjax-bench-restores"


class Ran(NamedTuple):
    """A run to its end.

    Attributes:
      loss: of validation, in nats per byte.
      kills: times it was killed.
      repeated: steps that were trained again after a restore.
    """

    loss: float
    kills: int
    repeated: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments."""
    add = parser.add_argument
    add("--kills", type=int, default=20, help="kills of each run (default: 20)")
    add("--orders", type=int, default=6, help="uninterrupted runs (default: 6)")
    add("--presets", default="lossless,balanced,extreme", help="some of " + ",".join(PRESETS))
    add("--quick", action="store_true", help="a tiny model and a few steps")
    add("--out", type=pathlib.Path, default=pathlib.Path(OUT), metavar="DIR")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs everything and prints the outcome.

    Raises:
      BenchError: arguments that make no sense, or a run that failed.
    """
    presets = options.presets.split(",")
    for name in presets:
        if name not in PRESETS:
            raise BenchError(f"unknown preset {name!r}; choose from {', '.join(PRESETS)}")
    if options.orders < 2 or options.kills < 1:
        raise BenchError("--orders must be at least 2, --kills at least 1")
    settings = quick(Settings()) if options.quick else Settings()
    # Two saves for each kill: what a kill leaves unfinished is trained again.
    every = max(1, settings.steps // (2 * options.kills + 2))
    settings = dataclasses.replace(settings, save_every=every)
    folder = options.out.resolve()
    wholes = []
    for order in range(options.orders):
        _say(f"uninterrupted, batch order {order}")
        wholes.append(_run(folder / f"order{order}", dataclasses.replace(settings, order=order), 0))
    spread = statistics.stdev(ran.loss for ran in wholes)
    rows = []
    for name in presets:
        _say(f"{name}: killed {options.kills} times")
        ran = _run(folder / name, dataclasses.replace(settings, preset=name), options.kills)
        difference = ran.loss - wholes[0].loss
        rows.append(
            {
                "preset": name,
                "kills": ran.kills,
                "steps": settings.steps,
                "repeated_steps": ran.repeated,
                "loss": ran.loss,
                "loss_uninterrupted": wholes[0].loss,
                "difference": difference,
                "spread": spread,
                "within": abs(difference) <= 2 * spread,
            }
        )
    return rows


def _run(folder: pathlib.Path, settings: Settings, kills: int) -> Ran:
    """Trains to the end, killed at so many saves, evenly spaced."""
    if folder.exists() and not (folder / "settings.json").is_file():
        raise BenchError(f"{folder} is in the way: name another folder with --out")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings.dump(folder / "settings.json")
    killed_at: list[int] = []
    starts: list[int] = []
    reached: list[int] = []
    losses: list[float] = []

    def on_event(event: Event) -> bool:
        if event["event"] == "start":
            starts.append(event["step"])
        elif event["event"] == "done":
            losses.append(event["validation_loss"])
        elif event["event"] == "step":
            reached.append(event["step"])
        wanted = (len(killed_at) + 1) * settings.steps / (kills + 1)
        dies = event["event"] == "save" and len(killed_at) < kills and event["step"] >= wanted
        if dies:
            killed_at.append(event["step"])
        return dies

    try:
        while process.run(folder, "run", "lcjax", on_event):
            pass
    except process.TrainingError as error:
        raise BenchError(str(error)) from error
    if len(starts) != kills + 1 or len(killed_at) != kills:
        raise BenchError(f"{folder}: {len(killed_at)} kills instead of {kills}")
    shutil.rmtree(folder / "run")
    return Ran(losses[-1], len(killed_at), len(reached) - settings.steps)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

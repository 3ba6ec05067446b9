"""The course of the demo: three runs of one training, and what they cost."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

from lcjax.demo import process
from lcjax.demo.figures import Cost, Run, cost
from lcjax.demo.files import bytes_on_disk
from lcjax.demo.journal import Event
from lcjax.demo.settings import Settings

Progress = Callable[[str, int], None]

KILLED, WHOLE, PLAIN = "killed", "uninterrupted", "orbax"
TITLES = {
    KILLED: "lcjax, killed and resumed",
    WHOLE: "lcjax, uninterrupted",
    PLAIN: "plain Orbax",
}
SETTINGS_FILE = "settings.json"


class ForeignFolderError(RuntimeError):
    """The folder for the demo has contents that no demo wrote."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of the demo.

    Attributes:
        settings: what was run.
        runs: the three runs by name.
        lcjax: what saving through lcjax costs.
        orbax: what saving through plain Orbax costs.
        seconds: how long the demo took.
    """

    settings: Settings
    runs: dict[str, Run]
    lcjax: Cost
    orbax: Cost
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The figures as plain numbers; seconds, bytes, nats per byte."""
        killed, whole, plain = (self.runs[name] for name in (KILLED, WHOLE, PLAIN))
        return {
            "params_ratio": self.lcjax.params_ratio,
            "state_ratio": self.lcjax.state_ratio,
            "params_ratio_orbax": self.orbax.params_ratio,
            "state_ratio_orbax": self.orbax.state_ratio,
            "loss_uninterrupted": whole.validation_loss,
            "loss_resumed": killed.validation_loss,
            "loss_orbax": plain.validation_loss,
            "bytes_lcjax": self.lcjax.on_disk,
            "bytes_orbax": self.orbax.on_disk,
            "written_lcjax": self.lcjax.written,
            "written_orbax": self.orbax.written,
            "save_s_lcjax": self.lcjax.save_s,
            "save_s_orbax": self.orbax.save_s,
            "blocked_s_lcjax": self.lcjax.blocked_s,
            "blocked_s_orbax": self.orbax.blocked_s,
            "restore_s_lcjax": self.lcjax.restore_s,
            "restore_s_orbax": self.orbax.restore_s,
            "restore_again_s_lcjax": self.lcjax.restore_again_s,
            "restore_again_s_orbax": self.orbax.restore_again_s,
            "delta_saves": len(killed.deltas()) + len(whole.deltas()),
            "killed_at_step": killed.killed_at,
            "resumed_from_step": killed.resumed_from,
            "seconds": self.seconds,
            "settings": dataclasses.asdict(self.settings),
        }


def prepare(folder: pathlib.Path, settings: Settings) -> None:
    """Makes the demo's folder, or clears what an earlier demo left in it.

    Args:
        folder: the folder.
        settings: written into it; they also mark it as the demo's.

    Raises:
        ForeignFolderError: if there is anything in it and no demo wrote it.
    """
    marker = folder / SETTINGS_FILE
    if folder.exists() and any(folder.iterdir()) and not marker.is_file():
        raise ForeignFolderError(f"{folder} is not empty and not from an earlier demo")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir(exist_ok=True)
    settings.dump(marker)
    for name in TITLES:
        shutil.rmtree(folder / name, ignore_errors=True)
        for file in (folder / f"{name}.jsonl", folder / f"{name}.log"):
            file.unlink(missing_ok=True)


def _train(folder: pathlib.Path, name: str, codec: str, progress: Progress) -> Run:
    """Trains without interruption."""
    run = Run()

    def on_event(event: Event) -> bool:
        run.take(event)
        progress(name, event["step"])
        return False

    process.run(folder, name, codec, on_event)
    return run


def _train_killed(
    folder: pathlib.Path, name: str, codec: str, progress: Progress, kill_from: int
) -> Run:
    """Trains, kills the process as soon as a save in the middle has begun, and resumes."""
    run = Run()

    def on_event(event: Event) -> bool:
        run.take(event)
        progress(name, event["step"])
        doomed = run.killed_at is None and event["event"] == "save" and event["step"] >= kill_from
        if doomed:
            run.killed_at = event["step"]
        return doomed

    if process.run(folder, name, codec, on_event):
        process.run(folder, name, codec, on_event)
    return run


def _restore_seconds(folder: pathlib.Path, name: str, codec: str) -> list[float]:
    """Times the first two restores of a fresh process."""
    seconds: list[float] = []

    def on_event(event: Event) -> bool:
        seconds.extend(event["restore_s"])
        return False

    process.run(folder, name, codec, on_event, restore_only=True)
    return seconds


def run_demo(
    folder: pathlib.Path, settings: Settings, progress: Progress, codec: str = "lcjax"
) -> Result:
    """Runs the demo.

    Args:
        folder: where everything goes; made if missing.
        settings: what to train.
        progress: called with the name of a run and the step it has reached.
        codec: what the first two runs save with.

    Returns:
        The outcome.

    Raises:
        ForeignFolderError: if the folder holds anything else.
        TrainingError: if a training process fails by itself.
    """
    started = time.monotonic()
    folder = folder.resolve()
    prepare(folder, settings)
    killed = _train_killed(folder, KILLED, codec, progress, settings.steps // 2)
    whole = _train(folder, WHOLE, codec, progress)
    plain = _train(folder, PLAIN, "orbax", progress)
    lcjax_cost = cost(
        killed.deltas() + whole.deltas() or whole.saves,
        whole,
        bytes_on_disk(folder / WHOLE),
        *_restore_seconds(folder, WHOLE, codec),
    )
    orbax_cost = cost(
        plain.saves, plain, bytes_on_disk(folder / PLAIN), *_restore_seconds(folder, PLAIN, "orbax")
    )
    runs = {KILLED: killed, WHOLE: whole, PLAIN: plain}
    return Result(settings, runs, lcjax_cost, orbax_cost, time.monotonic() - started)


def write_json(result: Result, path: pathlib.Path) -> None:
    """Writes the figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.as_json(), indent=1) + "\n")

"""A training process: started, watched through its journal, killed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

from lcjax.demo.journal import Event, Tail

POLL_SECONDS = 0.02
STALL_SECONDS = 300.0
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # glibc then keeps freed memory instead of returning it, which saves a fifth of each step.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


class TrainingError(RuntimeError):
    """A training process failed by itself."""


def run(
    folder: pathlib.Path,
    name: str,
    codec: str,
    on_event: Callable[[Event], bool],
    *,
    restore_only: bool = False,
) -> bool:
    """Runs the training script until it ends, or until it is told to die.

    Args:
        folder: the demo's folder, with the settings in it.
        name: name of the run; a second process of that name resumes it.
        codec: ``lcjax`` or ``orbax``.
        on_event: called with each event; if it returns True, the process gets SIGKILL.
        restore_only: only restore the newest step.

    Returns:
        True if the process was killed, False if it came to its end.

    Raises:
        TrainingError: if the process failed, or was silent for five minutes.
    """
    journal = folder / f"{name}.jsonl"
    tail = Tail(journal)
    tail.read()
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "lcjax.demo.train", "--codec", codec]
    command += ["--settings", str(folder / "settings.json"), "--root", str(folder / name)]
    command += ["--journal", str(journal), "--cache", str(folder / "cache")]
    command += ["--restore-only"] if restore_only else []
    with log.open("ab") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=output, env={**ENVIRONMENT, **os.environ}
        )
    try:
        last = time.monotonic()
        ended = False
        while not ended:
            ended = child.poll() is not None
            for event in tail.read():
                last = time.monotonic()
                if on_event(event):
                    child.kill()
                    child.wait()
                    return True
            if time.monotonic() - last > STALL_SECONDS:
                raise TrainingError(f"no sign of life for {STALL_SECONDS:.0f} s, see {log}")
            time.sleep(POLL_SECONDS)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode:
        last_lines = log.read_text(errors="replace").splitlines()[-15:]
        raise TrainingError(
            f"the training process ended with code {child.returncode}, see {log}:\n"
            + "\n".join(last_lines)
        )
    return False

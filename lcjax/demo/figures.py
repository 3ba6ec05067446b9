"""From the journals of the runs to the figures that the demo shows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable

from lcjax.demo.journal import Event


@dataclasses.dataclass
class Save:
    """One committed save.

    Attributes:
        step: the step that was saved.
        written: bytes of the files it wrote, by item.
        save_s: seconds from the call of ``save`` until the step was committed.
        blocked_s: seconds for which ``save`` kept the step loop waiting.
        delta: whether its parameters build on an earlier save.
    """

    step: int
    written: dict[str, int]
    save_s: float
    blocked_s: float
    delta: bool

    @property
    def state_bytes(self) -> int:
        """Bytes of everything that the save wrote."""
        return sum(self.written.values())


@dataclasses.dataclass
class Run:
    """What one run told in its journal, over all of its processes.

    Attributes:
        losses: training loss by step, as the last process to reach that step saw it.
        discarded: losses of steps that were lost in the kill and trained again.
        saves: the committed saves, in order.
        raw: bytes of the state in memory, by item.
        killed_at: the step at which the process was killed, if it was.
        resumed_from: the step that the second process restored, if there was one.
        validation_loss: loss of the final parameters on the validation sequences.
    """

    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    discarded: dict[int, float] = dataclasses.field(default_factory=dict)
    saves: list[Save] = dataclasses.field(default_factory=list)
    raw: dict[str, int] = dataclasses.field(default_factory=dict)
    killed_at: int | None = None
    resumed_from: int | None = None
    validation_loss: float = float("nan")
    _blocked: dict[int, float] = dataclasses.field(default_factory=dict)
    _committed: dict[int, Event] = dataclasses.field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Adds one event of the journal."""
        step = event["step"]
        match event["event"]:
            case "start":
                self.raw = event["raw"]
                if self.losses:
                    self.resumed_from = step
                    self.discarded = {s: v for s, v in self.losses.items() if s > step}
            case "step":
                self.losses[step] = event["loss"]
            case "save":
                self._blocked[step] = event["blocked_s"]
            case "commit":
                self._committed[step] = event
            case "done":
                self.validation_loss = event["validation_loss"]
        if step in self._blocked and step in self._committed:
            commit = self._committed.pop(step)
            blocked = self._blocked.pop(step)
            self.saves.append(
                Save(step, commit["written"], commit["save_s"], blocked, commit["delta"])
            )

    def deltas(self) -> list[Save]:
        """The saves that are deltas; the others are key frames."""
        return [save for save in self.saves if save.delta]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one codec costs.

    Attributes:
        params_bytes: median bytes that a save writes for the parameters.
        state_bytes: median bytes that a save writes in all.
        params_ratio: median of float32 bytes of the parameters over bytes written for them.
        state_ratio: the same for everything that is saved.
        written: bytes of all saves of one uninterrupted run.
        on_disk: bytes in the manager's folder at the end of that run, by inode.
        save_s: median seconds from the call of ``save`` to the commit.
        blocked_s: median seconds for which ``save`` kept the step loop waiting.
        restore_s: seconds of the first restore of a fresh process, loading of code included.
        restore_again_s: seconds of its second restore.
    """

    params_bytes: float
    state_bytes: float
    params_ratio: float
    state_ratio: float
    written: int
    on_disk: int
    save_s: float
    blocked_s: float
    restore_s: float
    restore_again_s: float


def cost(
    saves: Iterable[Save], whole: Run, on_disk: int, restore_s: float, restore_again_s: float
) -> Cost:
    """Sums up one codec.

    Args:
        saves: the saves to take bytes and ratios of.
        whole: the uninterrupted run, for the times and the sum of all bytes.
        on_disk: bytes in its folder.
        restore_s: see ``Cost``.
        restore_again_s: see ``Cost``.

    Returns:
        The figures.
    """
    saves = list(saves)
    raw_params, raw_state = whole.raw["params"], sum(whole.raw.values())
    return Cost(
        params_bytes=statistics.median(save.written["params"] for save in saves),
        state_bytes=statistics.median(save.state_bytes for save in saves),
        params_ratio=statistics.median(raw_params / save.written["params"] for save in saves),
        state_ratio=statistics.median(raw_state / save.state_bytes for save in saves),
        written=sum(save.state_bytes for save in whole.saves),
        on_disk=on_disk,
        save_s=statistics.median(save.save_s for save in whole.saves),
        blocked_s=statistics.median(save.blocked_s for save in whole.saves),
        restore_s=restore_s,
        restore_again_s=restore_again_s,
    )

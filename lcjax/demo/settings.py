"""Everything that decides what a demo run computes, in one record."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from lcjax.demo.model import Config


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the demo, equal for all of its runs.

    Attributes:
        model: shape of the transformer.
        batch: sequences per step.
        steps: optimizer steps per run.
        save_every: steps between two saves.
        keep: steps the manager keeps (``max_to_keep``).
        warmup: steps over which the learning rate grows from 0 to ``learning_rate``.
        learning_rate: the highest learning rate of AdamW; the rest is as Optax has it.
        seed: of the initial parameters and of the batches.
        order: another seed for the batches alone; None takes ``seed``.
        validation_sequences: how many sequences the validation loss is taken over.
        preset: the lcjax preset.
        bits: bits per symbol of that preset; its own choice if None.
    """

    model: Config = dataclasses.field(default_factory=Config)
    batch: int = 8
    steps: int = 400
    save_every: int = 20
    keep: int = 3
    warmup: int = 50
    learning_rate: float = 2e-3
    seed: int = 0
    order: int | None = None
    validation_sequences: int = 512
    preset: str = "paper"
    bits: int | None = None

    def dump(self, path: pathlib.Path) -> None:
        """Writes the settings as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: pathlib.Path) -> Settings:
        """Reads what ``dump`` wrote."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "model": Config(**fields["model"])})


def quick(settings: Settings) -> Settings:
    """Shrinks the settings to a run of seconds that still saves, dies and resumes."""
    model = Config(width=32, depth=1, heads=2, length=32)
    return dataclasses.replace(
        settings, model=model, steps=20, save_every=4, warmup=4, validation_sequences=256
    )

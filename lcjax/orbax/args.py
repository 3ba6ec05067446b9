"""``lcjax.args``: what to give ``save`` and ``restore`` by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import orbax.checkpoint as ocp


@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """Saves a pytree with lcjax.

    Attributes:
      item: the pytree.
      save_args: tree of ``ocp.SaveArgs``; their ``dtype`` is honoured.
      custom_metadata: JSON-able, given back by ``metadata``.
      preset: overrides the handler's preset for this save.
      bits: overrides the preset's code width.
      scope: overrides the preset's scope, ``"model"`` or ``"leaf"``.
      step: the training step, where the directory's name does not tell.
      key_frame: makes this save independent of earlier ones.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None
    preset: Any = None
    bits: int | None = None
    scope: str | None = None
    step: int | None = None
    key_frame: bool = False


@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    """Restores a pytree that lcjax saved, or one that plain Orbax saved.

    Attributes:
      item: target tree: arrays, ``jax.ShapeDtypeStruct``, Python scalars. Its containers,
        dtypes, shardings and memory kinds win. None restores plain containers.
      restore_args: tree of ``ocp.RestoreArgs`` or ``ocp.ArrayRestoreArgs``, as the target.
      partial_restore: allow a target that leaves out saved leaves.
      fallback_sharding: for arrays whose saved sharding names devices that are not here.
      max_bytes: limit on what is unpacked without a target; by default this machine's memory.
    """

    item: Any = None
    restore_args: Any = None
    partial_restore: bool = False
    fallback_sharding: Any = None
    max_bytes: int | None = None

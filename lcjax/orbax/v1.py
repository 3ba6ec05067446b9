"""lcjax under Orbax v1: for a whole process, or for one ``ocp.Context``.

For a process, code that cannot be edited included::

    lcjax.install(preset="lossless")

For a context:

>>> import tempfile
>>> import jax.numpy as jnp
>>> import lcjax.orbax.v1
>>> from orbax.checkpoint import v1 as ocp
>>> root = tempfile.mkdtemp()
>>> context = ocp.Context()
>>> context.checkpointables.registry = lcjax.orbax.v1.handler_registry(preset="lossless")
>>> with ocp.training.Checkpointer(root, context=context) as checkpointer:
...     for step in range(2):
...         _ = checkpointer.save(step, {"w": jnp.full(4, step)})
...     print(checkpointer.load(0)["w"], checkpointer.load(1)["w"])
[0 0 0 0] [1 1 1 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax.checkpoint import v1 as ocp

from lcjax import policy
from lcjax.chain import ChainOptions
from lcjax.orbax import v1_writer
from lcjax.orbax.handler import Chosen
from lcjax.orbax.v1_handler import CheckpointableHandler, handler_class
from lcjax.orbax.v1_marker import recognise_items
from lcjax.orbax.v1_writer import Settings
from lcjax.policy import Preset

__all__ = ["checkpointables_options", "handler_registry", "install", "uninstall"]


def install(
    preset: Chosen,
    *,
    bits: int | None = None,
    scope: str | None = None,
    items: Mapping[str, str | Preset] | None = None,
    chain: ChainOptions | None = None,
) -> None:
    """Makes Orbax v1 store every pytree with lcjax, in this process, from now on.

    Covered are ``ocp.save``, ``ocp.load``, ``ocp.save_checkpointables``,
    ``ocp.training.Checkpointer`` and their asynchronous twins, under any name, also where
    they are called by code that cannot be edited. What is no pytree (datasets, JSON, metrics)
    stays with Orbax, and so does ``ocp.partial``. Steps that plain Orbax wrote are still read.

    Call it first: an ``ocp.Context`` or a ``Checkpointer`` keeps the handlers that there were
    when it was made. Calling it again with the same options changes nothing, with others it
    replaces them. ``uninstall`` undoes it.

    Args:
      preset: see ``lcjax.CheckpointHandler``; no default.
      bits: see ``lcjax.CheckpointHandler``.
      scope: see ``lcjax.CheckpointHandler``.
      items: see ``lcjax.CheckpointHandler``.
      chain: see ``lcjax.CheckpointHandler``.

    Raises:
      PresetError: an unknown preset or option.
    """
    handler = _handler(preset, bits, scope, items, chain)
    entries = _entries(ocp.handlers.global_registry())
    entries[:] = _with(handler, _without(entries))


def uninstall() -> None:
    """Undoes ``install``, and lets go of the states in memory; does nothing if there was none.

    Steps that lcjax wrote are not read by plain Orbax: install again, or give
    ``handler_registry`` to a context.
    """
    entries = _entries(ocp.handlers.global_registry())
    entries[:] = _without(entries)
    v1_writer.release()


def handler_registry(
    preset: Chosen,
    *,
    bits: int | None = None,
    scope: str | None = None,
    items: Mapping[str, str | Preset] | None = None,
    chain: ChainOptions | None = None,
) -> ocp.handlers.CheckpointableHandlerRegistry:
    """A registry for one ``ocp.Context``: Orbax's handlers, with lcjax for pytrees.

    Args:
      preset: see ``lcjax.CheckpointHandler``; no default.
      bits: see ``lcjax.CheckpointHandler``.
      scope: see ``lcjax.CheckpointHandler``.
      items: see ``lcjax.CheckpointHandler``.
      chain: see ``lcjax.CheckpointHandler``.

    Raises:
      PresetError: an unknown preset or option.
    """
    handler = _handler(preset, bits, scope, items, chain)
    registry = ocp.handlers.local_registry()
    entries = _entries(registry)
    entries[:] = _with(handler, _without(entries))
    return registry


def checkpointables_options(
    preset: Chosen,
    *,
    bits: int | None = None,
    scope: str | None = None,
    items: Mapping[str, str | Preset] | None = None,
    chain: ChainOptions | None = None,
) -> ocp.options.CheckpointablesOptions:
    """``handler_registry`` as options, for ``ocp.Context(checkpointables_options=...)``.

    Args:
      preset: see ``lcjax.CheckpointHandler``; no default.
      bits: see ``lcjax.CheckpointHandler``.
      scope: see ``lcjax.CheckpointHandler``.
      items: see ``lcjax.CheckpointHandler``.
      chain: see ``lcjax.CheckpointHandler``.

    Raises:
      PresetError: an unknown preset or option.
    """
    registry = handler_registry(preset, bits=bits, scope=scope, items=items, chain=chain)
    return ocp.options.CheckpointablesOptions(registry=registry)


def _handler(
    preset: Chosen,
    bits: int | None,
    scope: str | None,
    items: Mapping[str, str | Preset] | None,
    chain: ChainOptions | None,
) -> type[CheckpointableHandler]:
    own = tuple((name, policy.resolve(p)) for name, p in (items or {}).items())
    chosen = preset if callable(preset) else policy.resolve(preset, bits, scope)
    recognise_items()
    return handler_class(Settings(chosen, bits, scope, own, chain or ChainOptions()))


_Entries = list[tuple[type, str | None]]


def _entries(registry: Any) -> _Entries:
    """A registry's own list of entries, to be changed in place."""
    entries = registry.get_all_entries()
    if not isinstance(entries, list):
        raise NotImplementedError(
            "lcjax does not know how to change the handlers of this version of Orbax: its "
            f"registry gives a {type(entries).__name__}, not a list; please report it"
        )
    return entries


def _with(handler: type, entries: _Entries) -> _Entries:
    """Gives a handler all names of Orbax's pytree handler, and precedence just above it."""
    # Orbax copies registries by entry, and takes a class without a name only before its names.
    orbax = ocp.handlers.PyTreeHandler
    named = [(handler if cls is orbax and name else cls, name) for cls, name in entries]
    above = 1 + max((k for k, e in enumerate(named) if e == (orbax, None)), default=-1)
    return [*named[:above], (handler, None), *named[above:]]


def _without(entries: _Entries) -> _Entries:
    """Gives the names back to Orbax."""
    orbax = ocp.handlers.PyTreeHandler
    return [
        (orbax if issubclass(cls, CheckpointableHandler) else cls, name)
        for cls, name in entries
        if name is not None or not issubclass(cls, CheckpointableHandler)
    ]

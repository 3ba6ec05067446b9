"""The Orbax v1 handler: a class per setting, of which Orbax builds an object for each call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Generator
from typing import Any, ClassVar

import jax
import orbax.checkpoint as ocp_v0
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1._src.context.context import get_context
from orbax.checkpoint.experimental.v1._src.serialization.options_resolution import (
    resolve_storage_options,
)

from lcjax import session, tree
from lcjax.chain import MANIFEST_FILE, NOTE_FILE
from lcjax.errors import LcjaxError
from lcjax.orbax import place, v1_restoring
from lcjax.orbax.restoring import is_orbax_pytree, nothing_here
from lcjax.orbax.v1_writer import Settings, writer_for


class _Deferred:
    """An awaitable that may be dropped without a warning, as Orbax does when a save fails."""

    def __init__(self, run: Callable[[], Awaitable[Any]]) -> None:
        self._run = run

    def __await__(self) -> Generator[Any, None, Any]:
        return self._run().__await__()


class CheckpointableHandler(ocp.CheckpointableHandler):
    """Saves and loads pytrees with lcjax; see ``handler_class``.

    Items that plain Orbax wrote are read by Orbax.
    """

    settings: ClassVar[Settings | None] = None

    def __init__(self) -> None:
        self._context = get_context()

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Takes a snapshot; what is returned encodes and writes it when awaited.

        Raises:
          UnsupportedLeafError: a leaf that cannot be stored.
        """
        assert self.settings is not None
        save_args = _save_args(self._context, checkpointable)
        writer = writer_for(directory.path, saving=True)
        write = writer.begin(directory.path, checkpointable, save_args, self.settings)

        async def background() -> None:
            await asyncio.to_thread(write, await directory.await_creation())

        return _Deferred(background)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Loads an item.

        Raises:
          MissingFileError: a file of the checkpoint is not there.
          CorruptDataError: damaged data.
          TreeMismatchError: the abstract tree has other leaves or shapes.
        """
        # Everything happens now: Orbax hides errors that come out of the awaitable.
        directory = epath.Path(directory)
        if not (directory / MANIFEST_FILE).exists():
            return await self._orbax(directory).load(directory, abstract_checkpointable)
        with session.Opened(directory) as opened:
            loaded = v1_restoring.restore(
                opened,
                abstract_checkpointable,
                partial=self._context.pytree.loading.partial_load,
                strict=not self._context.array.loading.enable_padding_and_truncation,
            )
            if place.find(directory).step is not None:
                writer_for(directory, saving=False).note_restored(directory, opened)

        async def result() -> Any:
            return loaded

        return _Deferred(result)

    async def metadata(self, directory: Any) -> Any:
        """What was saved, as Orbax's PyTreeHandler describes it."""
        directory = epath.Path(directory)
        if not (directory / MANIFEST_FILE).exists():
            return await self._orbax(directory).metadata(directory)
        with session.Opened(directory) as opened:
            return v1_restoring.metadata(opened.record)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it is a tree that lcjax stores, or one that Orbax's PyTreeHandler would take.

        Of the latter, ``save`` refuses what lcjax does not store, with the leaf's name: nothing
        is quietly stored in another way.
        """
        if ocp.handlers.PyTreeHandler(context=self._context).is_handleable(checkpointable):
            return True
        try:
            tree.flatten(checkpointable)
        except LcjaxError:
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether it is an abstract tree."""
        return v1_restoring.is_abstract(abstract_checkpointable) or ocp.handlers.PyTreeHandler(
            context=self._context
        ).is_abstract_handleable(abstract_checkpointable)

    def _orbax(self, directory: epath.Path) -> Any:
        """Orbax's handler, for what Orbax wrote."""
        if (directory / NOTE_FILE).exists() or not is_orbax_pytree(directory):
            raise nothing_here(directory)
        return ocp.handlers.PyTreeHandler(context=self._context)


def _save_args(context: Any, pytree: Any) -> Any:
    """``ocp.SaveArgs`` with the dtypes that the context asks for; None where it asks for none."""
    saving = context.array.saving
    general = None if saving.storage_options is None else saving.storage_options.dtype
    if general is None and saving.scoped_storage_options_creator is None:
        return None

    def arg(path: Any, leaf: Any) -> ocp_v0.SaveArgs:
        return ocp_v0.SaveArgs(dtype=resolve_storage_options(path, leaf, saving).dtype)

    return jax.tree.map_with_path(arg, pytree)


@functools.lru_cache(maxsize=64)
def handler_class(settings: Settings) -> type[CheckpointableHandler]:
    """The handler class for some settings; the same one for the same settings.

    Orbax writes the class's module and name into each step. They are those of the v0 handler,
    whatever the settings, so that either API finds its own handler for what the other wrote.
    """
    name = "CheckpointHandler"
    members = {"settings": settings, "__module__": "lcjax", "__qualname__": name}
    return type(name, (CheckpointableHandler,), members)

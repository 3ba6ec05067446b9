"""The Orbax side: a thin handler over ``lcjax.session``; nothing else imports Orbax."""

from lcjax.orbax import args
from lcjax.orbax.handler import CheckpointHandler, handler_registry

__all__ = ["CheckpointHandler", "args", "handler_registry"]

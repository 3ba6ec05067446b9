"""The JAX settings under which lcjax computes, whatever the training script has set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def neutral(on_host: bool = False) -> Iterator[None]:
    """Makes JAX compute as the format says, in this thread, for as long as it is entered.

    Scripts switch on 64 bits, strict promotion, NaN checks or transfer guards for their own
    arithmetic; a checkpoint holds NaNs on purpose, moves arrays on purpose, and must come
    out the same.

    Args:
      on_host: compute on the CPU, where the arrays are, also where a GPU is the default.
    """
    import jax

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(False))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(jax.transfer_guard("allow"))
        if on_host:
            with contextlib.suppress(RuntimeError):  # a process may have no CPU backend
                stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield

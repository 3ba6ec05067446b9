"""How every numba kernel of the package is compiled.

``nogil`` lets a thread pool run kernels side by side, ``cache`` keeps the machine code
on disk between processes, and fast-math stays off because encoder and decoder must agree
to the last bit. Importing this module imports numba, so only kernel modules do it, and they
are imported inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def kernel(signature: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a function without the GIL, cached on disk where there is a place for it.

    Args:
      signature: a numba signature; being explicit keeps a call with another array layout
        from silently compiling a second version. None compiles for what it is called with.

    Returns:
      A decorator.
    """
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            compiled: Callable[..., Any] = njit(signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            # Neither the package nor the user has a writable cache folder.
            compiled = njit(signature, **options)(function)
        return compiled

    return wrap

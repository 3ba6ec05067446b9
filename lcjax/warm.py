"""Loading the compiled kernels ahead of their first use.

numba takes about a second to load, and on a machine's first run many seconds to compile.
A handler starts this when it is made, so that the time passes while the model is being
built rather than in the first save or restore.
"""

from __future__ import annotations

import functools
import threading


def load() -> None:
    """Loads every kernel that saving and restoring float32 state uses."""
    import numpy as np

    from lcjax import hashing
    from lcjax.codecs import exact, lc

    values = np.arange(64, dtype=np.float32)
    hashing.value_hash(values)
    for array in (values, values.astype(np.int32)):  # tokens, and byte planes
        for base in (None, array[::-1].copy()):
            mode, payload = exact.encode(array, base)
            exact.decode(memoryview(payload), mode, array.dtype, array.size, base)
    lc.apply(values, np.zeros(values.size, np.uint8), np.zeros(1, np.float32))


@functools.cache
def start() -> threading.Thread:
    """Runs ``load`` on a thread of its own, once per process."""
    thread = threading.Thread(target=load, name="lcjax_warm")
    thread.start()
    return thread

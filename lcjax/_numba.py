"""How every numba kernel of the package is compiled.

``nogil`` lets a thread pool run kernels side by side, ``cache`` keeps the machine code
on disk between processes, and fast-math stays off because encoder and decoder must agree
to the last bit.
"""

import numba as nb

jit = nb.njit(nogil=True, cache=True, fastmath=False, error_model="numpy", boundscheck=False)

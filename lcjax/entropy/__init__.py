"""Entropy coding of uint8 symbols, down to far below one bit a symbol.

`encode` turns symbols into a self-describing stream, choosing the smallest of a few modes; `decode`
turns it back and treats its input as hostile. `FORMAT.md` describes the stream so that others can
read it.

Example:
    >>> import numpy as np
    >>> from lcjax import entropy
    >>> symbols = np.zeros(1_000_000, np.uint8)
    >>> symbols[::1000] = 3
    >>> data = entropy.encode(symbols)
    >>> len(data) < 1500
    True
    >>> bool((entropy.decode(data, count=symbols.size) == symbols).all())
    True

Nothing here knows of trees, floats or JAX. Kernels are compiled by numba on first use, and cached.
"""

from ._decoder import decode, encoded_symbols
from ._encoder import encode, entropy_bits

__all__ = ["decode", "encode", "encoded_symbols", "entropy_bits"]

"""Two hashes: one of stored bytes, one of array values.

``bytes_hash`` is XXH3, 64 bits, over bytes as they lie in a file.

``value_hash`` is over the *values* of an array and has three properties that a byte hash
lacks: it is a sum, so it does not depend on the order of the elements' visits, nor on how
the array was cut into chunks or shards; it uses 32-bit integers only, so it runs under
``jax.jit`` on CPU, GPU and TPU; and it sees the bits, so -0.0, NaN payloads and
subnormals count. An element of 1, 2 or 4 bytes is one 32-bit word ``x`` (zero-extended),
an element of 8 or 16 bytes is 2 or 4 words, low word first. With ``i`` the word's index
in the whole leaf (row-major, modulo 2^32)::

    t = mix(x ^ (i * 0x9E3779B1 + 0x7F4A7C15))        mix: 32-bit finalizer, see below
    lane 0 += t,   lane 1 += mix(t + 0x6C62272E)      modulo 2^32

and the hash is ``lane1 << 32 | lane0``, written as 16 hexadecimal digits. ``mix`` is
``x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16``.
The sum of the hashes of a leaf's chunks, lane by lane, is the hash of the leaf.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from lcjax._hash_constants import LANE, MUL1, MUL2, START, WEYL


def bytes_hash(data: Any) -> str:
    """XXH3-64 of a bytes-like object, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def content_name(data: Any) -> str:
    """XXH3-128 of a bytes-like object, as 32 hexadecimal digits; names stored files."""
    return xxhash.xxh3_128_hexdigest(data)


def words(array: np.ndarray) -> np.ndarray:
    """The array's elements as a flat unsigned view (uint8, uint16 or uint32 words).

    Args:
      array: C-contiguous, native byte order, itemsize 1, 2, 4, 8 or 16.

    Returns:
      A read-only view; items of 8 and 16 bytes appear as 2 and 4 words of uint32.
    """
    return read_only(array.reshape(-1).view(np.dtype(f"u{min(array.dtype.itemsize, 4)}")))


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written, so that kernels compile for one kind of array only."""
    view = array.view()
    view.flags.writeable = False
    return view


def value_hash(array: np.ndarray, start: int = 0) -> str:
    """Hash of an array's values, see the module's docstring.

    Args:
      array: C-contiguous array of any fixed-size dtype, the elements
        ``start, start + 1, ...`` of a leaf in row-major order.
      start: index of the first element within the whole leaf.

    Returns:
      16 hexadecimal digits.
    """
    from lcjax import _hash_kernels

    flat = words(array)
    per_element = max(1, array.dtype.itemsize // 4)
    lanes = _hash_kernels.hash_words(flat, np.uint32(start * per_element & 0xFFFFFFFF))
    return f"{int(lanes):016x}"


def value_hash_of_runs(array: np.ndarray, starts: np.ndarray, run: int) -> str:
    """``value_hash`` of elements that lie in runs within their leaf.

    Args:
      array: C-contiguous, ``starts.size * run`` elements, run after run.
      starts: int64, the index within the leaf of each run's first element.
      run: elements per run.
    """
    from lcjax import _hash_kernels

    per_element = max(1, array.dtype.itemsize // 4)
    firsts = (starts * per_element).astype(np.uint64).astype(np.uint32)
    lanes = _hash_kernels.hash_runs(words(array), read_only(firsts), run * per_element)
    return f"{int(lanes):016x}"


def combine(hashes: list[str]) -> str:
    """Hash of a whole leaf from the hashes of its chunks."""
    values = [int(h, 16) for h in hashes]
    low = sum(v & 0xFFFFFFFF for v in values) & 0xFFFFFFFF
    high = sum(v >> 32 for v in values) & 0xFFFFFFFF
    return f"{high << 32 | low:016x}"


def value_hash_device(flat: Any, starts: Any, sizes: Any, total: int) -> Any:
    """``value_hash`` of consecutive pieces of a flat device array, under jit.

    Args:
      flat: 1-D jax array of 1, 2 or 4 byte elements, shape ``(total,)``.
      starts: int32 ``(pieces,)``, index of each piece's first element in its leaf.
      sizes: int32 ``(pieces,)``, elements of each piece; they sum to ``total``.
      total: number of elements, static.

    Returns:
      uint32 ``(pieces, 2)``: lanes 0 and 1.
    """
    import jax
    import jax.numpy as jnp

    def mix(x: Any) -> Any:
        x = (x ^ (x >> 16)) * jnp.uint32(MUL1)
        x = (x ^ (x >> 15)) * jnp.uint32(MUL2)
        return x ^ (x >> 16)

    kind = jnp.dtype(f"uint{flat.dtype.itemsize * 8}")
    x = jax.lax.bitcast_convert_type(flat, kind).astype(jnp.uint32)
    ends = jnp.cumsum(sizes)
    shift = (starts - (ends - sizes)).astype(jnp.uint32)
    index = jnp.arange(total, dtype=jnp.uint32) + jnp.repeat(
        shift, sizes, total_repeat_length=total
    )
    t = mix(x ^ (index * jnp.uint32(WEYL) + jnp.uint32(START)))
    lanes = jnp.stack([t, mix(t + jnp.uint32(LANE))])
    # Prefix sums modulo 2^32 turn sums over pieces of any length into two look-ups each.
    prefix = jnp.concatenate(
        [jnp.zeros((2, 1), jnp.uint32), jnp.cumsum(lanes, axis=1, dtype=jnp.uint32)], axis=1
    )
    return (prefix[:, ends] - prefix[:, ends - sizes]).T

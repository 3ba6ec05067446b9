"""LC-Checkpoint's quantizer (Chen, Liu, Ren, Jin; ICML 2020, arXiv 2009.13003).

The delta ``d = u - c`` between the new state and the reference is split into buckets, one
per (sign, exponent) of ``d``. A bucket's representative is ``(max + min) / 2`` of the
values in it. *Priority promotion* with ``bits = x`` keeps the ``2^x - 1`` buckets with the
largest exponents and sends every other element to code 0, whose value is 0: small changes
are postponed, not lost, because the next delta is taken against ``c`` again.

Rules where the paper is silent, all part of the format's meaning:

* Only buckets that hold a value count. Between equal exponents the positive one is first,
  so codes are numbered by (exponent, sign) from ``1``, largest exponent first.
* ``|d| < 2^-125`` always belongs to code 0: accelerators flush the numbers below, and a
  representative must be the same number everywhere.
* Where ``d`` is not finite (``u`` or ``c`` is not, or the difference overflows), the
  element is an *exception*: its code is 0 and ``u`` is stored exactly.
* Reconstruction: ``c`` stays as it is, bit for bit, where the code is 0; elsewhere it is
  ``f(f(c) + table[code])``, one IEEE float32 addition, where ``f`` replaces a subnormal
  by a zero of the same sign. bfloat16 leaves do that sum in float32 and round to nearest,
  ties to even, before the outer ``f``.

The arrays pass through four jitted functions, on the device where they live. Between
them only a few hundred bytes reach the host: which buckets are in use, and the extremes
of the promoted ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lcjax._jax_context import neutral
from lcjax.hashing import read_only

TILE_ROWS = 256
TILE_LANES = 128
TILE = TILE_ROWS * TILE_LANES  # elements; a tile and its masks stay in a core's cache
SLAB_TILES = 64  # tiles per call on CPU: bounds temporaries and the number of programs
SUPPORTED_DTYPES = ("float32", "bfloat16")
MIN_BITS, MAX_BITS = 1, 8


class Quantized(NamedTuple):
    """A group of leaves' quantized delta.

    Attributes:
      codes: uint8 ``(elements,)``, numpy.
      reference: the new reference, same shape, dtype and kind of array as the old one.
      exceptions: int64 indices of elements that are stored exactly, numpy, ascending.
      exact: the exceptions' values, in the leaves' dtype.
    """

    codes: np.ndarray
    reference: Any
    exceptions: np.ndarray
    exact: np.ndarray


class Fidelity(NamedTuple):
    """What a quantization lost.

    Attributes:
      delta_squares: sum of ``(u - c_old)^2`` over finite deltas.
      error_squares: sum of ``(u - c_new)^2`` over finite deltas.
      max_error: largest ``|u - c_new|``.
      state_squares: sum of ``u^2`` over finite deltas.
    """

    delta_squares: float
    error_squares: float
    max_error: float
    state_squares: float

    def __add__(self, other: Any) -> Fidelity:
        return Fidelity(
            self.delta_squares + other.delta_squares,
            self.error_squares + other.error_squares,
            max(self.max_error, other.max_error),
            self.state_squares + other.state_squares,
        )


class Result(NamedTuple):
    """What ``quantize`` returns: one entry of ``groups`` per pair that came in."""

    groups: list[Quantized]
    table: np.ndarray
    fidelity: Fidelity


def quantize(pairs: list[tuple[Any, Any]], bits: int) -> Result:
    """Quantizes ``u - c`` of groups of elements that share one code table.

    Args:
      pairs: ``(u, c)`` of equal shape ``(elements,)`` and equal dtype, float32 or
        bfloat16 (or their bits, uint32 or uint16); both numpy or both jax arrays.
        Whole-model scope passes all groups at once, per-leaf scope calls this once per leaf.
      bits: ``x`` of the paper, 1 to 8; at most ``2^x`` codes.

    Returns:
      A ``Result``; ``table`` is float32 ``(codes,)`` with ``table[0] == 0`` and has one
      entry per promoted bucket besides.
    """
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"bits must be {MIN_BITS} to {MAX_BITS}, got {bits}")
    with neutral(on_host=all(isinstance(u, np.ndarray) for u, _ in pairs)):
        result = _quantize([(words(u), words(c)) for u, c in pairs], 2**bits - 1)
        groups = [
            group._replace(reference=_as(group.reference, c.dtype), exact=_as(group.exact, c.dtype))
            for group, (_, c) in zip(result.groups, pairs, strict=True)
        ]
        return result._replace(groups=groups)


def words(array: Any) -> Any:
    """The array's bits as uint16 or uint32, numpy or jax.

    Everything below computes on these: a backend may treat bfloat16 through float32, which
    rewrites the payloads of NaNs even where values are only copied or selected.
    """
    return _as(array, np.dtype(f"u{array.dtype.itemsize}"))


def _as(array: Any, dtype: np.dtype) -> Any:
    """Another dtype of the same width over the same bits."""
    if array.dtype == dtype:
        return array
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    import jax

    return jax.lax.bitcast_convert_type(array, dtype)


def _quantize(pairs: list[tuple[Any, Any]], promoted: int) -> Result:
    keys = _promoted_keys(pairs, promoted)
    extremes = np.stack([np.full(promoted, -np.inf, "f4"), np.full(promoted, np.inf, "f4")])
    coded: list[list[Any]] = []
    anomalies = 0
    for u, c in pairs:
        parts = []
        for u_slab, c_slab, _, _ in _slabs(u, c):
            codes, high, low, odd = _codes(u_slab, c_slab, keys)
            extremes[0] = np.maximum(extremes[0], np.asarray(high))
            extremes[1] = np.minimum(extremes[1], np.asarray(low))
            anomalies += int(odd)
            parts.append(codes)
        coded.append(parts)
    table = representatives(keys, extremes)

    groups = []
    fidelity = Fidelity(0.0, 0.0, 0.0, 0.0)
    for (u, c), parts in zip(pairs, coded, strict=True):
        group, lost = _apply_group(u, c, parts, table, promoted, anomalies > 0)
        groups.append(group)
        fidelity = fidelity + lost
    return Result(groups, table, fidelity)


def _promoted_keys(pairs: list[tuple[Any, Any]], promoted: int) -> np.ndarray:
    """The promoted buckets' keys, most important first: int32 ``(promoted,)``, padded with -1.

    A key is ``2 * exponent + (1 if positive else 0)``. Each pass over the arrays collects
    the keys in use among the 32 below a ceiling, as one 32-bit word; outliers can leave
    empty windows, so the next ceiling is the largest key below the window.
    """
    found: list[int] = []
    ceiling = 511
    while len(found) < promoted and ceiling >= _LOWEST_KEY:
        top = 0
        for u, c in pairs:
            for u_slab, c_slab, _, _ in _slabs(u, c):
                top = max(top, int(_largest_key(u_slab, c_slab, np.int32(ceiling))))
        if top < _LOWEST_KEY:
            break
        window = 0
        for u, c in pairs:
            for u_slab, c_slab, _, _ in _slabs(u, c):
                window |= int(_key_window(u_slab, c_slab, np.int32(top)))
        found += [top - k for k in range(32) if window >> k & 1 and top - k >= _LOWEST_KEY]
        ceiling = top - 32
    keys = np.full(promoted, -1, np.int32)
    keys[: min(len(found), promoted)] = found[:promoted]
    return keys


def representatives(keys: np.ndarray, extremes: np.ndarray) -> np.ndarray:
    """``(max + min) / 2`` of each promoted bucket, after a leading 0 for code 0.

    Args:
      keys: int32 ``(promoted,)``, -1 where there is no bucket.
      extremes: float32 ``(2, promoted)``: maxima and minima.

    Returns:
      float32 ``(1 + buckets,)``.
    """
    used = int(np.count_nonzero(keys >= 0))
    # In float64 the sum and the halving are exact; one rounding remains.
    middle = extremes[:, :used].astype(np.float64).sum(axis=0) / 2
    return np.concatenate([np.zeros(1, "f4"), middle.astype(np.float32)])


_LOWEST_KEY = 4  # exponent field 2, so |d| >= 2^-125


def _slabs(u: Any, c: Any) -> Iterator[tuple[Any, Any, int, int]]:
    """Cuts a pair into blocks ``(tiles, TILE_ROWS, TILE_LANES)``; yields start and stop too.

    Host arrays are cut into views of at most ``SLAB_TILES`` tiles; a ragged end is copied
    and padded with zeros (a delta of 0, which no result shows) to a power of two of tiles,
    so that a handful of compiled programs serves every model. Device arrays go in whole.
    """
    total = u.shape[0]
    on_host = isinstance(u, np.ndarray)
    step = SLAB_TILES * TILE if on_host else max(TILE, _round_up(total))
    for start in range(0, total, step):
        stop = min(start + step, total)
        u_part, c_part = u[start:stop], c[start:stop]
        size = stop - start
        padded = size if size == SLAB_TILES * TILE else _round_up(size)
        if padded != size:
            if on_host:
                u_part, c_part = (
                    np.concatenate([part, np.zeros(padded - size, part.dtype)])
                    for part in (u_part, c_part)
                )
            else:
                import jax.numpy as jnp

                u_part, c_part = (
                    jnp.concatenate([part, jnp.zeros(padded - size, part.dtype)])
                    for part in (u_part, c_part)
                )
        shape = (-1, TILE_ROWS, TILE_LANES)
        yield u_part.reshape(shape), c_part.reshape(shape), start, stop


def _round_up(size: int) -> int:
    tiles = max(1, -(-size // TILE))
    return TILE << (tiles - 1).bit_length()


def _apply_group(
    u: Any, c: Any, parts: list[Any], table: np.ndarray, promoted: int, anomalies: bool
) -> tuple[Quantized, Fidelity]:
    on_host = isinstance(u, np.ndarray)
    padded_table = np.zeros(promoted + 1, np.float32)
    padded_table[: table.size] = table
    codes = np.empty(u.shape[0], np.uint8)
    reference: Any = np.empty_like(c) if on_host else None
    odd: list[np.ndarray] = []
    lost = Fidelity(0.0, 0.0, 0.0, 0.0)
    for (u_slab, c_slab, start, stop), part in zip(_slabs(u, c), parts, strict=True):
        moved, sums, top = _apply(u_slab, c_slab, part, padded_table)
        codes[start:stop] = np.asarray(part).reshape(-1)[: stop - start]
        flat = moved.reshape(-1)[: stop - start]
        if on_host:
            reference[start:stop] = np.asarray(flat)
        else:
            reference = flat
        if anomalies:
            mask = np.asarray(_anomalous(u_slab, c_slab)).reshape(-1)[: stop - start]
            odd.append(np.flatnonzero(mask) + start)
        delta, error, state = np.asarray(sums, dtype=np.float64).reshape(3, -1).sum(axis=1)
        lost = lost + Fidelity(float(delta), float(error), float(np.max(top)), float(state))
    where = np.concatenate(odd) if odd else np.zeros(0, np.int64)
    exact = np.asarray(u[where]) if where.size else np.zeros(0, u.dtype)
    return Quantized(codes, reference if reference is not None else c, where, exact), lost


# --- jitted parts -----------------------------------------------------------------------
# JAX is imported when a function is first built, so that reading files does not need it.


def _float32(bits: Any) -> Any:
    """The values of float32 or bfloat16 bits, as float32."""
    import jax
    import jax.numpy as jnp

    if bits.dtype.itemsize == 2:
        bits = bits.astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _delta(u: Any, c: Any) -> tuple[Any, Any, Any]:
    """``d`` in float32, its bucket key (0 where the element is not promotable), exponent."""
    import jax
    import jax.numpy as jnp

    d = _float32(u) - _float32(c)
    bits = jax.lax.bitcast_convert_type(d, jnp.uint32)
    exponent = ((bits >> 23) & 0xFF).astype(jnp.int32)
    positive = 1 - (bits >> 31).astype(jnp.int32)
    key = exponent * 2 + positive
    usable = (key >= _LOWEST_KEY) & (exponent < 255)
    return d, jnp.where(usable, key, 0), exponent


def _largest_key(u: Any, c: Any, ceiling: np.int32) -> Any:
    """The largest key up to ``ceiling`` that is in use, 0 if none is."""
    return _built("largest_key")(u, c, ceiling)


def _key_window(u: Any, c: Any, top: np.int32) -> Any:
    """Which of the keys ``top, top - 1, ... top - 31`` are in use: bits of a uint32."""
    return _built("key_window")(u, c, top)


def _codes(u: Any, c: Any, keys: np.ndarray) -> Any:
    """Codes (shape of ``u``), maxima and minima per key, number of exceptions."""
    return _built("codes")(u, c, keys)


def _apply(u: Any, c: Any, codes: Any, table: np.ndarray) -> Any:
    """New reference, per-tile sums ``(3, tiles)`` for the fidelity, and the largest error."""
    return _built("apply")(u, c, codes, table)


def _anomalous(u: Any, c: Any) -> Any:
    """Mask of the elements whose delta is not finite, but for those that stay as they were."""
    return _built("anomalous")(u, c)


@functools.cache
def _built(name: str) -> Any:
    import jax

    return jax.jit(globals()[f"_{name}_body"])


def _scan_reduce(u: Any, c: Any, of_tile: Any, start: Any, join: Any) -> Any:
    """Reduces ``of_tile(u_tile, c_tile)``, shape ``(rows, lanes)``, over all tiles.

    A scan reads each tile once and keeps the temporaries in cache; the same reduction over
    the whole array at once would write them to memory.
    """
    import jax

    def tile(carry: Any, pair: Any) -> tuple[Any, None]:
        return join(carry, jax.lax.reduce(of_tile(*pair), start, join, (0,))), None

    import jax.numpy as jnp

    lanes, _ = jax.lax.scan(tile, jnp.full((TILE_LANES,), start), (u, c))
    return jax.lax.reduce(lanes, start, join, (0,))


def _largest_key_body(u: Any, c: Any, ceiling: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def of_tile(u: Any, c: Any) -> Any:
        key = _delta(u, c)[1]
        return jnp.where(key <= ceiling, key, 0)

    return _scan_reduce(u, c, of_tile, jnp.int32(0), jax.lax.max)


def _key_window_body(u: Any, c: Any, top: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def of_tile(u: Any, c: Any) -> Any:
        below = top - _delta(u, c)[1]
        inside = (below >= 0) & (below < 32)
        return jnp.where(
            inside, jnp.left_shift(jnp.uint32(1), (below & 31).astype(jnp.uint32)), 0
        ).astype(jnp.uint32)

    return _scan_reduce(u, c, of_tile, jnp.uint32(0), jax.lax.bitwise_or)


def _codes_body(u: Any, c: Any, keys: Any) -> Any:
    import jax
    import jax.numpy as jnp

    promoted = keys.shape[0]

    def extremes(mine: Any, d: Any) -> tuple[Any, Any]:
        high = jnp.where(mine, d, -jnp.inf).max(axis=0)
        return high, jnp.where(mine, d, jnp.inf).min(axis=0)

    def tile(carry: Any, pair: Any) -> tuple[Any, Any]:
        high, low, odd = carry
        d, key, exponent = _delta(*pair)
        codes = jnp.zeros(d.shape, jnp.uint8)
        if promoted <= 15:
            masks = [key == keys[j] for j in range(promoted)]
            for j, mine in enumerate(masks):
                codes = jnp.where(mine, jnp.uint8(j + 1), codes)
            pairs = [extremes(mine, d) for mine in masks]
            tops, bottoms = (jnp.stack(part) for part in zip(*pairs, strict=True))
        else:  # too many to unroll; 5 bits and more are rare
            slot = (
                jnp.zeros(512, jnp.uint8)
                .at[keys]
                .set(
                    jnp.arange(1, promoted + 1).astype(jnp.uint8),
                    mode="drop",
                    wrap_negative_indices=False,
                )
            )
            codes = slot[key]
            tops, bottoms = jax.lax.map(lambda wanted: extremes(key == wanted, d), keys)
        odd = odd + (exponent == 255).sum(axis=0, dtype=jnp.int32)
        return (jnp.maximum(high, tops), jnp.minimum(low, bottoms), odd), codes

    start = (
        jnp.full((promoted, TILE_LANES), -jnp.inf, jnp.float32),
        jnp.full((promoted, TILE_LANES), jnp.inf, jnp.float32),
        jnp.zeros((TILE_LANES,), jnp.int32),
    )
    (high, low, odd), codes = jax.lax.scan(tile, start, (u, c))
    return codes, high.max(axis=1), low.min(axis=1), odd.sum()


def _flushed(bits: Any) -> Any:
    """Bits with subnormals replaced by a zero of the same sign."""
    import jax.numpy as jnp

    exponent, sign = (0x7F800000, 0x80000000) if bits.dtype.itemsize == 4 else (0x7F80, 0x8000)
    kind = bits.dtype.type
    return jnp.where((bits & kind(exponent)) == 0, bits & kind(sign), bits)


def _rounded(bits: Any, dtype: Any) -> Any:
    """float32 bits rounded to bfloat16 bits, nearest, ties to even, if ``dtype`` is narrower."""
    import jax.numpy as jnp

    if dtype.itemsize == 4:
        return bits
    half = jnp.uint32(0x7FFF) + ((bits >> 16) & 1)
    return ((bits + half) >> 16).astype(jnp.uint16)


def _apply_body(u: Any, c: Any, codes: Any, table: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def tile(top: Any, part: Any) -> tuple[Any, Any]:
        u, c, codes = part
        d, _, exponent = _delta(u, c)
        value = jnp.zeros(codes.shape, jnp.float32)
        if table.shape[0] <= 16:
            for j in range(1, table.shape[0]):
                value = jnp.where(codes == j, table[j], value)
        else:
            value = table[codes.astype(jnp.int32)]
        total = jax.lax.bitcast_convert_type(_float32(_flushed(c)) + value, jnp.uint32)
        odd = exponent == 255
        moved = jnp.where(codes == 0, c, _flushed(_rounded(_flushed(total), c.dtype)))
        moved = jnp.where(odd, u, moved)
        error = jnp.where(odd, 0, _float32(u) - _float32(moved))
        d = jnp.where(odd, 0, d)
        state = jnp.where(odd, 0, _float32(u))
        sums = jnp.stack([(d * d).sum(), (error * error).sum(), (state * state).sum()])
        return jnp.maximum(top, jnp.abs(error).max()), (moved, sums)

    top, (moved, sums) = jax.lax.scan(tile, jnp.float32(0), (u, c, codes))
    return moved, sums.T, top


def _anomalous_body(u: Any, c: Any) -> Any:
    return (_delta(u, c)[2] == 255) & (u != c)


# --- decoding on the host ---------------------------------------------------------------


def apply(reference: np.ndarray, codes: np.ndarray, table: np.ndarray) -> None:
    """Moves a reference by a delta, in place: ``c <- f(f(c) + table[code])``.

    Args:
      reference: contiguous float32 or bfloat16 ``(elements,)``, changed in place.
      codes: uint8 ``(elements,)``, each below ``table.size``; not checked here.
      table: float32 ``(codes,)``.

    Raises:
      ValueError: the reference is of another dtype or size.
    """
    if reference.dtype.name not in SUPPORTED_DTYPES or reference.shape != codes.shape:
        raise ValueError(
            f"expected {codes.shape} of {' or '.join(SUPPORTED_DTYPES)}, got {reference.shape} of "
            f"{reference.dtype.name}"
        )
    from lcjax.codecs import _lc_kernels

    codes, table = read_only(codes), read_only(table)
    if reference.dtype.itemsize == 4:
        _lc_kernels.apply_float32(
            reference.view(np.float32), reference.view(np.uint32), codes, table
        )
    else:
        _lc_kernels.apply_bfloat16(reference.view(np.uint16), codes, table)

"""Methods without an Orbax handler, coded in memory: SZ3, ExCP, 8-bit moments.

Each stores changes against what its reader has, so that errors do not accumulate, and is
counted without any container: sizes of payloads alone, in their favour.
"""

from __future__ import annotations

import importlib.util
import lzma
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lcjax import roles, tree
from lcjax.bench import BenchError
from lcjax.bench._coders import Saved
from lcjax.bench._tasks import State

BLOCK = 2048  # elements that share a scale, as in "8-bit Optimizers via Block-wise Quantization"
SMALL = 4096  # leaves with fewer elements keep 32 bits there
SECOND_MOMENTS = ("nu", "nu_max")
FIRST_MOMENTS = ("mu", "trace")


class Part(NamedTuple):
    """A leaf of a save.

    Attributes:
      role: as ``lcjax.explain`` has it.
      new: values to store.
      old: what a reader has of the save before.
      group: number that a parameter shares with its moments.
    """

    role: str
    new: np.ndarray
    old: np.ndarray
    group: int


Packed = tuple[int, Any]  # bytes, and what decoding needs
Encode = Callable[[Sequence[Part]], list[Packed]]
Decode = Callable[[Sequence[Any], Sequence[Part]], list[np.ndarray]]


class Memory:
    """A coder that keeps its payloads in memory.

    Args:
      encode: parts to payloads, in order.
      decode: payloads back to values; of the parts it may look at ``old``, ``role`` and
        ``group`` alone.
    """

    def __init__(self, encode: Encode, decode: Decode):
        self._encode, self._decode = encode, decode
        self._values: list[np.ndarray] | None = None
        self._state: State = {}
        self._seconds = 0.0

    def save(self, step: int, state: State) -> Saved:
        """See ``Coder``; the first save counts as raw."""
        flat = tree.flatten(state)
        new = [np.asarray(tree.array_of(leaf)) for leaf in flat.leaves]
        kinds = roles.stated(flat.leaves, ())
        if self._values is None:
            self._values, self._state = new, state
            params = sum(v.nbytes for v, kind in zip(new, kinds, strict=True) if kind == "param")
            return Saved(sum(v.nbytes for v in new), params, 0.0)
        owners = _groups(flat.leaves, kinds)
        parts = [Part(*p) for p in zip(kinds, new, self._values, owners, strict=True)]
        started = time.perf_counter()
        packed = self._encode(parts)
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        self._values = self._decode([payload for _, payload in packed], parts)
        self._seconds = time.perf_counter() - started
        values = self._values
        self._state = tree.build_like(state, flat.skeleton, lambda _, number: values[number])
        sizes = [size for size, _ in packed]
        params = sum(s for s, kind in zip(sizes, kinds, strict=True) if kind == "param")
        return Saved(sum(sizes), params, seconds)

    def restore(self) -> tuple[State, float]:
        """See ``Coder``."""
        return self._state, self._seconds

    def close(self) -> None:
        """See ``Coder``."""


def _groups(leaves: Sequence[Any], kinds: Sequence[str]) -> list[int]:
    """Parameters number themselves, moments take their parameter's number, others -1."""
    params = [leaf.name for leaf, kind in zip(leaves, kinds, strict=True) if kind == "param"]
    paths = {name.removeprefix("params/"): number for number, name in enumerate(params)}
    found = []
    for leaf, kind in zip(leaves, kinds, strict=True):
        ends = [path for path in paths if leaf.name == path or leaf.name.endswith("/" + path)]
        wanted = kind == "param" or kind in FIRST_MOMENTS or kind in SECOND_MOMENTS
        found.append(paths[max(ends, key=len)] if wanted and ends else -1)
    return found


def _raw(part: Part) -> Packed:
    return part.new.nbytes, ("raw", part.new.copy())


# --- SZ3 ----------------------------------------------------------------------------------


def sz3(bound: float, octaves: float) -> Memory:
    """SZ3 with absolute bounds, of what codes best.

    Parameters as changes within ``bound`` rms of the change, first moments within ``bound`` rms
    of themselves, second moments as changes of log2 within ``octaves``.

    Raises:
      BenchError: pysz is not installed.
    """
    if importlib.util.find_spec("pysz") is None:
        raise BenchError("SZ3 needs pysz: pip install 'lcjax[bench]', or leave it out by --methods")
    from pysz import sz, szAlgorithm, szConfig, szErrorBoundMode

    def pack(values: np.ndarray, limit: float) -> Packed:
        flat = np.ascontiguousarray(values, np.float32)
        if not limit > 0 or not np.isfinite(limit):
            return flat.nbytes, ("raw", flat)
        config = szConfig()
        config.setDims(*flat.shape)
        config.errorBoundMode = szErrorBoundMode.ABS
        config.absErrorBound = float(limit)
        config.cmprAlgo = szAlgorithm.INTERP_LORENZO
        data, _ = sz.compress(flat, config)
        return data.nbytes, ("sz", data)

    def unpack(payload: Any, shape: tuple[int, ...]) -> np.ndarray:
        kind, data = payload
        return data if kind == "raw" else sz.decompress(data, np.float32, shape)[0]

    def encode(parts: Sequence[Part]) -> list[Packed]:
        return [_encode(part) for part in parts]

    def _encode(part: Part) -> Packed:
        if part.group < 0 or part.new.size < 16:
            return _raw(part)
        if part.role == "param":
            change = part.new - part.old
            return pack(change, bound * _rms(change))
        if part.role in SECOND_MOMENTS:
            return pack(_log2(part.new) - _log2(part.old), octaves)
        return pack(part.new, bound * _rms(part.new))

    def decode(payloads: Sequence[Any], parts: Sequence[Part]) -> list[np.ndarray]:
        return [_decode(*pair) for pair in zip(payloads, parts, strict=True)]

    def _decode(payload: Any, part: Part) -> np.ndarray:
        if part.group < 0 or part.new.size < 16:
            return payload[1]
        values = unpack(payload, part.old.shape)
        if part.role == "param":
            return part.old + values
        if part.role in SECOND_MOMENTS:
            return np.exp2(_log2(part.old) + values)
        return values

    return Memory(encode, decode)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean())) if values.size else 0.0


def _log2(values: np.ndarray) -> np.ndarray:
    return np.log2(np.maximum(values, np.float32(2.0**-126)))


# --- ExCP ---------------------------------------------------------------------------------


class Excp(NamedTuple):
    """ExCP's constants (Li et al., ICML 2024, arXiv 2406.11257), with the released defaults.

    Attributes:
      alpha: a parameter's change is kept above ``min(2.5, alpha / sqrt(mean(v)))`` medians.
      beta: moments are kept where ``|m|`` is above so many of its means, and the change is kept.
      bits: of a kept value: indices of ``2^bits - 1`` centroids of the leaf, by k-means.
    """

    alpha: float = 5e-5
    beta: float = 2.0
    bits: int = 4

    def __str__(self) -> str:
        return f"alpha {self.alpha:g}, beta {self.beta:g}, {self.bits} bits"


def excp(constants: Excp) -> Memory:
    """ExCP's joint pruning and k-means, its indices packed and compressed by LZMA."""

    def encode(parts: Sequence[Part]) -> list[Packed]:
        by_group: dict[tuple[int, str], np.ndarray] = {}
        for part in parts:
            role = "nu" if part.role in SECOND_MOMENTS else part.role
            by_group[part.group, role] = part.new
        kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for part in parts:
            if part.group >= 0 and part.role == "param":
                m, v = by_group[part.group, "mu"], by_group[part.group, "nu"]
                kept[part.group] = _excp_masks(part.new - part.old, m, v, constants)
        return [_encode(part, kept) for part in parts]

    def _encode(part: Part, kept: dict[int, tuple[np.ndarray, np.ndarray]]) -> Packed:
        if part.group < 0:
            return _raw(part)
        change, moment = kept[part.group]
        if part.role == "param":
            return _clustered(np.where(change, part.new - part.old, 0), constants.bits)
        return _clustered(np.where(moment, part.new, 0), constants.bits)

    def decode(payloads: Sequence[Any], parts: Sequence[Part]) -> list[np.ndarray]:
        return [_decode(*pair) for pair in zip(payloads, parts, strict=True)]

    def _decode(payload: Any, part: Part) -> np.ndarray:
        if part.group < 0:
            return payload[1]
        values = _unclustered(payload, part.old.shape, constants.bits)
        return part.old + values if part.role == "param" else values

    return Memory(encode, decode)


def _excp_masks(
    change: np.ndarray, m: np.ndarray, v: np.ndarray, constants: Excp
) -> tuple[np.ndarray, np.ndarray]:
    """Which changes and which moments are kept."""
    scale = float(np.sqrt(v.mean(dtype=np.float64)))
    factor = min(2.5, constants.alpha / scale) if scale > 0 else 2.5
    kept = np.abs(change) > factor * np.median(np.abs(change))
    return kept, kept & (np.abs(m) > constants.beta * np.abs(m).mean())


def _clustered(values: np.ndarray, bits: int) -> Packed:
    """Zero and the nearest of ``2^bits - 1`` centroids: float16 codebook, packed indices."""
    flat = values.reshape(-1)
    where = np.flatnonzero(flat)
    chosen = flat[where]
    if np.unique(chosen).size < 2**bits:
        data = lzma.compress(flat.tobytes())
        return len(data), ("raw", data)
    centers, labels = _kmeans(chosen, 2**bits - 1)
    indices = np.zeros(flat.size, np.uint8)
    indices[where] = labels + 1
    data = lzma.compress(_pack(indices, bits).tobytes())
    codebook = centers.astype(np.float16) if _fits_half(centers) else centers
    return len(data) + codebook.nbytes, ("clusters", data, codebook)


def _fits_half(values: np.ndarray) -> bool:
    """Whether float16 would not make a centroid 0: where it would, float32 is kept."""
    return bool((values.astype(np.float16) != 0).all())


def _unclustered(payload: Any, shape: tuple[int, ...], bits: int) -> np.ndarray:
    kind, data, *rest = payload
    packed = np.frombuffer(lzma.decompress(data), np.float32 if kind == "raw" else np.uint8)
    if kind == "raw":
        return packed.reshape(shape).copy()
    table = np.concatenate([np.zeros(1, np.float32), rest[0].astype(np.float32)])
    return table[_unpack(packed, bits, int(np.prod(shape)))].reshape(shape)


def _kmeans(values: np.ndarray, count: int, rounds: int = 25) -> tuple[np.ndarray, np.ndarray]:
    """Lloyd's algorithm in one dimension, from quantiles; centroids and labels."""
    ordered = np.sort(values.astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centers = np.quantile(ordered, (np.arange(count) + 0.5) / count)
    for _ in range(rounds):
        ends = np.searchsorted(ordered, (centers[1:] + centers[:-1]) / 2)
        edges = np.concatenate([[0], ends, [ordered.size]])
        sizes = np.diff(edges)
        means = (sums[edges[1:]] - sums[edges[:-1]]) / np.maximum(sizes, 1)
        centers = np.sort(np.where(sizes > 0, means, centers))
    labels = np.searchsorted((centers[1:] + centers[:-1]) / 2, values)
    return centers.astype(np.float32), labels


def _pack(indices: np.ndarray, bits: int) -> np.ndarray:
    """Several indices to a byte; ``bits`` divides 8."""
    per = 8 // bits
    padded = np.zeros(-(-indices.size // per) * per, np.uint8)
    padded[: indices.size] = indices
    shifts = np.arange(per, dtype=np.uint8) * np.uint8(bits)
    return np.bitwise_or.reduce(padded.reshape(-1, per) << shifts, axis=1)


def _unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    return ((packed[:, None] >> shifts) & np.uint8(2**bits - 1)).reshape(-1)[:count]


# --- 8-bit moments ------------------------------------------------------------------------


def eight_bit() -> Memory:
    """Moments in 8 bits by blocks (Dettmers et al., ICLR 2022), the rest as it is."""

    def encode(parts: Sequence[Part]) -> list[Packed]:
        return [_encode(part) for part in parts]

    def _encode(part: Part) -> Packed:
        if part.group < 0 or part.role == "param" or part.new.size < SMALL:
            return _raw(part)
        flat = part.new.reshape(-1)
        padded = np.zeros(-(-flat.size // BLOCK) * BLOCK, np.float32)
        padded[: flat.size] = flat
        blocks = padded.reshape(-1, BLOCK)
        scales = np.abs(blocks).max(axis=1, keepdims=True)
        table = dynamic_map(signed=part.role not in SECOND_MOMENTS)
        share = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0)
        codes = np.searchsorted((table[1:] + table[:-1]) / 2, share).astype(np.uint8)
        return flat.size + scales.nbytes, ("blocks", codes, scales)

    def decode(payloads: Sequence[Any], parts: Sequence[Part]) -> list[np.ndarray]:
        return [_decode(*pair) for pair in zip(payloads, parts, strict=True)]

    def _decode(payload: Any, part: Part) -> np.ndarray:
        if payload[0] == "raw":
            return payload[1]
        table = dynamic_map(signed=part.role not in SECOND_MOMENTS)
        values = table[payload[1]] * payload[2]
        return values.reshape(-1)[: part.old.size].reshape(part.old.shape)

    return Memory(encode, decode)


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values of the dynamic data type between -1 and 1 (or 0 and 1), ascending.

    The longer the run of zero bits, the smaller the decimal exponent and the coarser the linear
    fraction between a tenth and one.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        edges = np.linspace(0.1, 1, count + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values, np.float32))

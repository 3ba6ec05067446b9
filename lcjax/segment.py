"""Segments: one save's leaves as chunks of a container, and a chain of them back to values.

A segment's description (``meta`` of the container) has::

    kind     "chain" (later saves may build on it) or "own" (this save only)
    base     id of the state that its deltas were taken against, or null
    state    id of the state that it leads to
    tables   code tables of ``lc`` chunks, float32 little-endian as hexadecimal
    leaves   [{"name", "dtype", "shape", "chunks": [{"codec", "hash", ...}, ...]}, ...]

Chunks are numbered in the order of this list. A chunk's fields: ``codec``; ``hash``, the
value hash of the elements it leads to; ``lo`` and ``hi``, the bounds of its index range,
left out for a whole leaf; and the codec's own. A leaf may be spread over the segments of
several processes, which together cover it exactly.

Chunks of ``NEEDS_BASE`` start from the same index range of the segment before, the others
stand by themselves; ``moment`` also looks at other leaves of the chain (``given``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lcjax import boxes, entropy, hashing
from lcjax.boxes import Box
from lcjax.codecs import _exceptions, exact, levels, moments, steps
from lcjax.container import Reader
from lcjax.dtypes import dtype_from_name
from lcjax.errors import BaseMismatchError, CorruptDataError

NEEDS_BASE = ("lc", "levels", *(f"exact:{mode}" for mode in exact.NEEDS_BASE))
_EXACT = tuple(f"exact:{mode}" for mode in exact.MODES)
# Lossy codecs and the dtypes that each can hold.
_LOSSY = {
    "lc": steps.DTYPES,
    "grid": steps.DTYPES,
    "levels": levels.DTYPES,
    "levels:key": levels.DTYPES,
    "moment": moments.DTYPES,
}
MAX_DIMS = 64


class Given(NamedTuple):
    """What a moment's chunk was coded with: leaves of the chain, or None."""

    recipe: moments.Recipe | None
    nu: str | None

    @property
    def names(self) -> list[str]:
        """The leaves' names."""
        found = [None if self.recipe is None else self.recipe.param, self.nu]
        return [name for name in found if name is not None]


class Chunk(NamedTuple):
    """One stored chunk of a leaf.

    Attributes:
      number: within the container.
      codec: its codec's name.
      hash: value hash of the elements it leads to.
      box: its index range.
      exceptions: how many elements are stored exactly, of lossy codecs.
      table: number of its table (``lc``, ``moment``).
      exponent: of ``grid``.
      spec: of ``levels``.
      gain: of ``moment``.
      given: of ``moment``.
    """

    number: int
    codec: str
    hash: str
    box: Box
    exceptions: int = 0
    table: int = 0
    exponent: int = 0
    spec: levels.Spec = levels.Spec(0, 1, 0, 0)
    gain: float = 0.0
    given: Given = Given(None, None)


class LeafEntry(NamedTuple):
    """A leaf as a segment holds it; ``chunks`` is keyed by index range."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    chunks: dict[Box, Chunk]


@dataclass(frozen=True)
class Segment:
    """A parsed segment; its chunks are still in the file."""

    reader: Reader
    kind: str
    base: str | None
    state: str
    tables: list[np.ndarray]
    leaves: dict[str, LeafEntry] = field(repr=False)


# --- writing ----------------------------------------------------------------------------


def encode_exact(values: np.ndarray, base: np.ndarray | None) -> tuple[dict[str, Any], bytes]:
    """An exact chunk's description (without hash and box) and its payload."""
    mode, payload = exact.encode(values, base)
    return {"codec": f"exact:{mode}"}, payload


def encode_lc(
    codes: np.ndarray, table: np.ndarray, where: np.ndarray, values: np.ndarray
) -> tuple[dict[str, Any], bytes]:
    """An ``lc`` chunk's description and payload.

    Args:
      codes: uint8 ``(elements,)`` of the chunk.
      table: float32 ``(codes,)``; the caller puts its number in its place.
      where: indices within the chunk that are stored exactly, ascending.
      values: their values.
    """
    entry: dict[str, Any] = {"codec": "lc", "table": table}
    if where.size:
        entry["exceptions"] = int(where.size)
    return entry, _exceptions.pack(where, values) + entropy.encode(codes, threads=1)


def float_text(value: float) -> str:
    """A float32 number as the hexadecimal of its four bytes, as ``gain`` has it."""
    return np.float32(value).tobytes().hex()


def describe_box(entry: dict[str, Any], box: Box, shape: tuple[int, ...]) -> None:
    """Adds ``lo`` and ``hi`` to a chunk's description unless the box is the whole leaf."""
    if boxes.box_shape(box) != shape:
        entry["lo"], entry["hi"] = list(box[0]), list(box[1])


def state_id(hashes: dict[str, list[str]]) -> str:
    """Id of a state: a hash over the names and value hashes of its chained leaves.

    Args:
      hashes: leaf name -> value hashes of all its chunks; their sum counts, so the id does
        not depend on how leaves were cut.
    """
    text = "\n".join(f"{name}\t{hashing.combine(parts)}" for name, parts in sorted(hashes.items()))
    return hashing.content_name(text.encode("utf-8", "surrogatepass"))


# --- reading ----------------------------------------------------------------------------


def parse(reader: Reader, kinds: Sequence[str]) -> Segment:
    """Checks a segment's description.

    Args:
      reader: the open container.
      kinds: which kinds are acceptable here.

    Raises:
      CorruptDataError: a field is missing, of a wrong type or out of range.
    """
    meta, where = reader.meta, reader.where
    kind = meta.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise CorruptDataError(f"{where}: is a {kind!r} file, expected {' or '.join(kinds)}")
    base, state = meta.get("base"), meta.get("state")
    if not (base is None or isinstance(base, str)) or not isinstance(state, str):
        raise CorruptDataError(f"{where}: the ids of its base and state are damaged")
    tables = [_parse_table(t, where) for t in _list(meta, "tables", where)]
    leaves: dict[str, LeafEntry] = {}
    number = 0
    for raw in _list(meta, "leaves", where):
        leaf = _parse_leaf(raw, number, len(tables), kind == "chain", where)
        if leaf.name in leaves:
            raise CorruptDataError(f"{where}: leaf {leaf.name!r} stands in it twice")
        leaves[leaf.name] = leaf
        number += len(leaf.chunks)
    if number != len(reader):
        raise CorruptDataError(
            f"{where}: describes {number} chunks and holds {len(reader)}; the file is damaged"
        )
    return Segment(reader, kind, base, state, tables, leaves)


def check_chain(chain: Sequence[Segment]) -> None:
    """Checks that each segment builds on the one before it.

    Raises:
      BaseMismatchError: it does not.
    """
    before: str | None = None
    for segment in chain:
        if segment.base != before:
            raise BaseMismatchError(
                f"{segment.reader.where}: its deltas start from state {segment.base or 'none'}, "
                f"but the chain before it leads to {before or 'none'}"
            )
        before = segment.state


def decode_leaf(
    chains: Sequence[Sequence[Segment]],
    name: str,
    base: Callable[[str], np.ndarray] | None = None,
    partners: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Rebuilds a leaf from the chains that hold parts of it.

    Args:
      chains: one per writing process, each oldest first; the leaf is taken as the last
        segment of each leaves it, and together they cover it exactly.
      name: the leaf's name.
      base: where a chain's first segment is a delta, gives the leaf's flat values before it.
      partners: for a leaf of codec ``moment``: the parameter's trail and the root of the second
        moment, both float32 and flat, of the whole leaf.

    Returns:
      The leaf, in its stored dtype and shape; always a fresh array.

    Raises:
      CorruptDataError: damaged data, parts that do not cover the leaf, or values that do not
        match their recorded hash.
    """
    parts = _parts(chains, name)
    first = chains[0][-1].leaves[name]
    out = np.empty(first.shape, first.dtype)
    for box, chain in parts:
        if chain[-1].leaves[name].chunks[box].codec == "moment":
            values = _decode_moment(chain[-1], name, box, partners)
        else:
            values = _decode_box(chain, name, box, base)
        _check_hash(values, chain, name, box, base)
        out[boxes.slices(box)] = values.reshape(boxes.box_shape(box))
    return out


def decode_trails(
    chains: Sequence[Sequence[Segment]],
    recipes: Sequence[moments.Recipe],
    base: Callable[[str], np.ndarray] | None = None,
    known: Callable[[moments.Recipe], np.ndarray] | None = None,
) -> tuple[np.ndarray, dict[moments.Recipe, np.ndarray]]:
    """Rebuilds a parameter, and the trails that moments were predicted from.

    Args:
      chains: as ``decode_leaf`` takes them.
      recipes: of the trails, one or more, of one parameter.
      base: as ``decode_leaf`` takes it.
      known: where a trail begins before the chain, gives the one that ``base`` has.

    Returns:
      The leaf; and each trail, float32 and flat.

    Raises:
      CorruptDataError: as ``decode_leaf``, or the chain is too short for a trail.
    """
    name = recipes[0].param
    parts = _parts(chains, name)
    first = chains[0][-1].leaves[name]
    out = np.empty(first.shape, first.dtype)
    trails = {recipe: np.empty(first.shape, np.float32) for recipe in recipes}
    for box, chain in parts:
        # A chain's first segment is a delta only where there is a base.
        deltas = len(chain) - (chain[0].base is None)
        longest = min(max(recipe.span for recipe in recipes), deltas)
        if longest < 1:
            raise _too_short(chain, name)
        before = chain[: len(chain) - longest]
        values = _of_base(chain, name, box, base) if not before else None
        if values is None:
            _chunk(before[-1], name, box)
            _check_same(before[-1], chain[-1].leaves[name])
            values = _decode_box(before, name, box, base)
        mine: dict[moments.Recipe, np.ndarray] = {}
        for left, segment in zip(range(longest, 0, -1), chain[-longest:], strict=True):
            _check_same(segment, chain[-1].leaves[name])
            old = values.copy()
            values = _decode_chunk(segment, name, box, values)
            for recipe in recipes:
                if left == longest and recipe.span > longest:
                    mine[recipe] = _known_trail(chain, recipe, longest, box, known)
                if left <= recipe.span:
                    mine[recipe] = moments.extended(mine.get(recipe), values, old, recipe.memory)
        _check_hash(values, chain, name, box, base)
        out[boxes.slices(box)] = values.reshape(boxes.box_shape(box))
        for recipe, trail in mine.items():
            trails[recipe][boxes.slices(box)] = trail.reshape(boxes.box_shape(box))
    return out, {recipe: trail.reshape(-1) for recipe, trail in trails.items()}


def _too_short(chain: Sequence[Segment], name: str) -> CorruptDataError:
    return CorruptDataError(
        f"{chain[-1].reader.where}: a moment is predicted from more deltas of leaf {name!r} than "
        "its chain has"
    )


def _known_trail(
    chain: Sequence[Segment],
    recipe: moments.Recipe,
    covered: int,
    box: Box,
    known: Callable[[moments.Recipe], np.ndarray] | None,
) -> np.ndarray:
    """One index range of the trail that a chain's base has."""
    if known is None or chain[0].base is None:
        raise _too_short(chain, recipe.param)
    shape = chain[-1].leaves[recipe.param].shape
    whole = known(recipe._replace(span=recipe.span - covered))
    if whole.size != math.prod(shape):
        raise _too_short(chain, recipe.param)
    return np.array(whole.reshape(shape)[boxes.slices(box)], order="C").reshape(-1)


def _parts(chains: Sequence[Sequence[Segment]], name: str) -> list[tuple[Box, Sequence[Segment]]]:
    """The index ranges of a leaf, which cover it exactly, each with its chain."""
    first = chains[0][-1].leaves[name]
    parts: list[tuple[Box, Sequence[Segment]]] = []
    for chain in chains:
        leaf = chain[-1].leaves[name]
        if (leaf.dtype, leaf.shape) != (first.dtype, first.shape):
            raise CorruptDataError(
                f"{chain[-1].reader.where}: leaf {name!r} is {leaf.dtype.name}{list(leaf.shape)}, "
                f"but {first.dtype.name}{list(first.shape)} in {chains[0][-1].reader.where}"
            )
        parts += [(box, chain) for box in leaf.chunks]
    if not boxes.tile_exactly(first.shape, [box for box, _ in parts]):
        raise CorruptDataError(
            f"{chains[0][-1].reader.where}: the chunks of leaf {name!r} do not cover its shape "
            f"{first.shape} exactly"
        )
    return parts


def _check_hash(
    values: np.ndarray,
    chain: Sequence[Segment],
    name: str,
    box: Box,
    base: Callable[[str], np.ndarray] | None,
) -> None:
    leaf = chain[-1].leaves[name]
    found = boxes.box_hash(values, box, leaf.shape)
    expected = leaf.chunks[box].hash
    if found != expected:
        raise CorruptDataError(
            f"{chain[-1].reader.where}: leaf {name!r} has value hash {found}, expected "
            f"{expected}: {_blame(chain, name, box, base)}"
        )


def _decode_box(
    chain: Sequence[Segment],
    name: str,
    box: Box,
    base: Callable[[str], np.ndarray] | None,
) -> np.ndarray:
    """Flat values of one index range after the whole chain."""
    leaf = chain[-1].leaves[name]
    start = len(chain) - 1
    while start >= 0 and _chunk(chain[start], name, box).codec in NEEDS_BASE:
        start -= 1
    # Kernels trust the arrays they get, so every step of the way must speak of the same leaf.
    for used in chain[max(start, 0) :]:
        _check_same(used, leaf)
    if start < 0:
        values = _of_base(chain, name, box, base)
    else:
        values = _decode_chunk(chain[start], name, box, None)
    for segment in chain[max(start + 1, 0) :]:
        values = _decode_chunk(segment, name, box, values)
    return values


def _of_base(
    chain: Sequence[Segment], name: str, box: Box, base: Callable[[str], np.ndarray] | None
) -> np.ndarray:
    """A copy of one index range of the state that the chain's first segment starts from."""
    leaf = chain[-1].leaves[name]
    if base is None:
        raise CorruptDataError(
            f"{chain[0].reader.where}: leaf {name!r} is a delta, and the chain has no key "
            "frame for it"
        )
    whole = base(name)
    if (whole.dtype, whole.size) != (leaf.dtype, math.prod(leaf.shape)):
        raise CorruptDataError(
            f"{chain[0].reader.where}: leaf {name!r} is a delta of {leaf.dtype.name}"
            f"{list(leaf.shape)}, its base has {whole.size} of {whole.dtype.name}"
        )
    whole = whole.reshape(leaf.shape)
    return np.array(whole[boxes.slices(box)], order="C").reshape(-1)


def _decode_moment(
    segment: Segment,
    name: str,
    box: Box,
    partners: tuple[np.ndarray, np.ndarray] | None,
) -> np.ndarray:
    leaf, chunk = segment.leaves[name], _chunk(segment, name, box)
    where = segment.reader.where
    if partners is None:
        raise CorruptDataError(f"{where}: leaf {name!r} is a moment where no other leaf is known")
    trail, root = (
        np.ascontiguousarray(whole.reshape(leaf.shape)[boxes.slices(box)]).reshape(-1)
        for whole in partners
    )
    try:
        return moments.decode(
            segment.reader.chunk(chunk.number),
            trail,
            root,
            chunk.gain,
            segment.tables[chunk.table],
            chunk.exceptions,
            leaf.dtype,
        )
    except CorruptDataError as e:
        raise _in_leaf(e, where, name) from e


def _check_same(segment: Segment, leaf: LeafEntry) -> None:
    found = segment.leaves.get(leaf.name)
    if found is not None and (found.dtype, found.shape) != (leaf.dtype, leaf.shape):
        raise CorruptDataError(
            f"{segment.reader.where}: leaf {leaf.name!r} is {found.dtype.name}{list(found.shape)}, "
            f"but {leaf.dtype.name}{list(leaf.shape)} where a later delta builds on it"
        )


def _decode_chunk(segment: Segment, name: str, box: Box, values: np.ndarray | None) -> np.ndarray:
    """Applies one chunk; ``values`` may be changed in place."""
    leaf = segment.leaves[name]
    chunk = _chunk(segment, name, box)
    count = math.prod(boxes.box_shape(box))
    try:
        payload = segment.reader.chunk(chunk.number)
        if chunk.codec == "lc":
            assert values is not None
            return _decode_lc(payload, chunk, segment.tables[chunk.table], values)
        if chunk.codec == "grid":
            return steps.decode_key(payload, chunk.exponent, chunk.exceptions, leaf.dtype, count)
        if chunk.codec in ("levels", "levels:key"):
            if chunk.codec == "levels:key":
                values = np.zeros(count, leaf.dtype)
            assert values is not None
            levels.decode(payload, chunk.spec, chunk.exceptions, values)
            return values
        mode = chunk.codec.removeprefix("exact:")
        return exact.decode(payload, mode, leaf.dtype, count, values)
    except CorruptDataError as e:
        raise _in_leaf(e, segment.reader.where, name) from e


def _in_leaf(error: CorruptDataError, where: str, name: str) -> CorruptDataError:
    detail = str(error).removeprefix(f"{where}: ")
    return CorruptDataError(f"{where}: leaf {name!r}: {detail}")


def _decode_lc(
    payload: memoryview, chunk: Chunk, table: np.ndarray, values: np.ndarray
) -> np.ndarray:
    where, bits, rest = _exceptions.unpack(
        payload, chunk.exceptions, values.size, values.dtype.itemsize
    )
    codes = entropy.decode(rest, count=values.size, threads=1)
    if codes.size and int(codes.max()) >= table.size:
        raise CorruptDataError(
            f"code {int(codes.max())} is outside its table of {table.size} entries"
        )
    steps.apply(values, codes, table)
    _exceptions.put(values, where, bits)
    return values


def _chunk(segment: Segment, name: str, box: Box) -> Chunk:
    try:
        return segment.leaves[name].chunks[box]
    except KeyError:
        raise CorruptDataError(
            f"{segment.reader.where}: has no chunk {box} of leaf {name!r}, which a later delta "
            "builds on"
        ) from None


def _blame(
    chain: Sequence[Segment],
    name: str,
    box: Box,
    base: Callable[[str], np.ndarray] | None,
) -> str:
    """Which segment first leads to values that do not match their hash."""
    if _chunk(chain[-1], name, box).codec == "moment":
        return "the leaves it was coded with differ from those it is read with"
    for k in range(len(chain)):
        chunk = _chunk(chain[k], name, box)
        values = _decode_box(chain[: k + 1], name, box, base)
        if boxes.box_hash(values, box, chain[-1].leaves[name].shape) != chunk.hash:
            return f"the values go wrong at {chain[k].reader.where}"
    return "the recorded hash is damaged"


def _parse_leaf(raw: Any, number: int, tables: int, chained: bool, where: str) -> LeafEntry:
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        raise CorruptDataError(f"{where}: a leaf's description is damaged")
    name = raw["name"]
    shape = parse_shape(raw.get("shape"), f"{where}: leaf {name!r}")
    dtype = dtype_from_name(raw.get("dtype"), f"{where}: leaf {name!r}")
    chunks: dict[Box, Chunk] = {}
    for entry in _list(raw, "chunks", where):
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("codec"), str)
            and isinstance(entry.get("hash"), str)
        ):
            raise CorruptDataError(f"{where}: a chunk of leaf {name!r} is damaged")
        leaf_where = f"{where}: leaf {name!r}"
        box = _parse_box(entry, shape, leaf_where)
        chunk = _parse_chunk(entry, number + len(chunks), box, tables, dtype, leaf_where)
        if chunk.codec in NEEDS_BASE and not chained:
            raise CorruptDataError(
                f"{where}: leaf {name!r} is a delta in a segment that has no chain"
            )
        if chunk.codec == "moment" and chained:
            raise CorruptDataError(f"{where}: leaf {name!r} is a moment inside a chain")
        if box in chunks:
            raise CorruptDataError(f"{where}: leaf {name!r} has the index range {box} twice")
        chunks[box] = chunk
    return LeafEntry(name, dtype, shape, chunks)


def _parse_chunk(
    entry: dict[str, Any], number: int, box: Box, tables: int, dtype: np.dtype, where: str
) -> Chunk:
    """Checks the fields of a chunk's codec; kernels trust them afterwards."""
    codec, odd = entry["codec"], entry.get("exceptions", 0)
    chunk = Chunk(number, codec, entry["hash"], box)
    if codec in _EXACT:
        return chunk
    if codec not in _LOSSY:
        raise CorruptDataError(f"{where} has the unknown codec {codec!r}")
    good = type(odd) is int and odd >= 0 and dtype.name in _LOSSY[codec]
    if codec in ("lc", "moment"):
        table = entry.get("table", -1)
        good = good and type(table) is int and 0 <= table < tables
        chunk = chunk._replace(table=table)
    if codec == "grid":
        exponent = entry.get("exponent", 1 << 10)
        good = good and type(exponent) is int and -126 <= exponent <= 127
        chunk = chunk._replace(exponent=exponent)
    if codec.startswith("levels"):
        spec = _parse_spec(entry.get("spec"), entry.get("edges", []))
        good = good and spec is not None and levels.valid(spec)
        chunk = chunk._replace(spec=spec or chunk.spec)
    if codec == "moment":
        gain, given = _parse_gain(entry.get("gain")), _parse_given(entry)
        good = good and gain is not None and given is not None
        chunk = chunk._replace(gain=gain or 0.0, given=given or chunk.given)
    if not good:
        raise CorruptDataError(f"{where} has damaged {codec} fields")
    return chunk._replace(exceptions=odd)


def _parse_spec(raw: Any, edges: Any) -> levels.Spec | None:
    if not (isinstance(raw, list) and len(raw) == 4 and isinstance(edges, list)):
        return None
    shift, stride, extra, low = raw
    return levels.Spec(shift, stride, extra, low, tuple(edges))


def _parse_gain(raw: Any) -> float | None:
    try:
        value = np.frombuffer(bytes.fromhex(raw), "<f4")
    except (TypeError, ValueError):
        return None
    return float(value[0]) if value.size == 1 and np.isfinite(value[0]) else None


def _parse_given(entry: dict[str, Any]) -> Given | None:
    names, trail = entry.get("given"), entry.get("trail", [1, 0])
    if not (isinstance(names, list) and len(names) == 2):
        return None
    param, nu = names
    if not all(x is None or isinstance(x, str) for x in names):
        return None
    if not (isinstance(trail, list) and len(trail) == 2 and all(type(x) is int for x in trail)):
        return None
    span, memory = trail
    if not (1 <= span < 1 << 31 and 0 <= memory <= moments.MEMORY_UNIT):
        return None
    return Given(None if param is None else moments.Recipe(param, span, memory), nu)


def _parse_box(entry: dict[str, Any], shape: tuple[int, ...], where: str) -> Box:
    if "lo" not in entry and "hi" not in entry:
        return (0,) * len(shape), shape
    lo, hi = (parse_shape(entry.get(k), where) for k in ("lo", "hi"))
    fits = len(lo) == len(hi) == len(shape) and all(
        a <= b <= size for a, b, size in zip(lo, hi, shape, strict=False)
    )
    if not fits:
        raise CorruptDataError(f"{where}: index range {lo} to {hi} is outside shape {shape}")
    if any(a == b for a, b in zip(lo, hi, strict=True)) and (any(lo) or hi != shape):
        raise CorruptDataError(f"{where}: index range {lo} to {hi} is empty, and not the whole")
    return lo, hi


def parse_shape(raw: Any, where: str) -> tuple[int, ...]:
    """Checks a shape from a file: non-negative ints, less than 2^58 elements.

    numpy refuses empty arrays too if their other dimensions pass 2^63 bytes.
    """
    good = isinstance(raw, list) and len(raw) <= MAX_DIMS
    if not good or not all(type(n) is int and 0 <= n < 1 << 62 for n in raw):
        raise CorruptDataError(f"{where}: {raw!r} is not a shape")
    total = 1
    for n in raw:
        total *= max(n, 1)
    if total >= 1 << 58:
        raise CorruptDataError(f"{where}: shape {raw!r} has too many elements")
    return tuple(raw)


def _parse_table(raw: Any, where: str) -> np.ndarray:
    try:
        table = np.frombuffer(bytes.fromhex(raw), "<f4").astype(np.float32)
    except (TypeError, ValueError) as e:
        raise CorruptDataError(f"{where}: a code table is damaged") from e
    if not 1 <= table.size <= 256 or not np.all(np.isfinite(table)):
        raise CorruptDataError(f"{where}: a code table is damaged")
    return table


def _list(obj: dict[str, Any], key: str, where: str) -> list[Any]:
    value = obj.get(key)
    if not isinstance(value, list):
        raise CorruptDataError(f"{where}: its field {key!r} is missing or damaged")
    return value

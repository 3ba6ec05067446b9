"""Segments: one save's leaves as chunks of a container, and a chain of them back to values.

A segment's description (``meta`` of the container) has::

    kind     "chain" (later saves may build on it) or "own" (this save only)
    base     id of the state that its deltas were taken against, or null
    state    id of the state that it leads to
    tables   code tables of ``lc`` chunks, float32 little-endian as hexadecimal
    leaves   [{"name", "dtype", "shape", "chunks": [{"codec", "hash", ...}, ...]}, ...]

Chunks are numbered in the order of this list. A chunk's fields: ``codec`` is ``lc`` or
``exact:MODE``; ``hash`` is the value hash of the elements it leads to; ``lo`` and ``hi``
bound its index range and are left out for a whole leaf; a leaf may be spread over the
segments of several processes, which together cover it exactly; ``table`` and ``exceptions``
belong to ``lc``. ``lc`` and ``exact:diff`` start from the same index range of the segment
before; the others stand by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lcjax import boxes, entropy, hashing
from lcjax.boxes import Box
from lcjax.codecs import exact, lc
from lcjax.container import Reader
from lcjax.dtypes import dtype_from_name
from lcjax.errors import BaseMismatchError, CorruptDataError

_NEEDS_BASE = ("lc", "exact:diff")
MAX_DIMS = 64


class Chunk(NamedTuple):
    """One stored chunk of a leaf."""

    number: int
    codec: str
    hash: str
    box: Box
    table: int
    exceptions: int


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
    codes: np.ndarray, table: int, where: np.ndarray, values: np.ndarray
) -> tuple[dict[str, Any], bytes]:
    """An ``lc`` chunk's description and payload.

    Args:
      codes: uint8 ``(elements,)`` of the chunk.
      table: number of its code table in the segment.
      where: indices within the chunk that are stored exactly, ascending.
      values: their values.

    Returns:
      Description and payload: ``where`` as uint64, the values, then the codes' stream.
    """
    entry: dict[str, Any] = {"codec": "lc", "table": table}
    head = b""
    if where.size:
        entry["exceptions"] = int(where.size)
        head = where.astype("<u8").tobytes() + hashing.words(values).tobytes()
    return entry, head + entropy.encode(codes, threads=1)


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
) -> np.ndarray:
    """Rebuilds a leaf from the chains that hold parts of it.

    Args:
      chains: one per writing process, each oldest first; the leaf is taken as the last
        segment of each leaves it, and together they cover it exactly.
      name: the leaf's name.
      base: where a chain's first segment is a delta, gives the leaf's flat values before it.

    Returns:
      The leaf, in its stored dtype and shape; always a fresh array.

    Raises:
      CorruptDataError: damaged data, parts that do not cover the leaf, or values that do not
        match their recorded hash.
    """
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
    out = np.empty(first.shape, first.dtype)
    for box, chain in parts:
        values = _decode_box(chain, name, box, base)
        found = boxes.box_hash(values, box, first.shape)
        expected = chain[-1].leaves[name].chunks[box].hash
        if found != expected:
            raise CorruptDataError(
                f"{chain[-1].reader.where}: leaf {name!r} has value hash {found}, expected "
                f"{expected}: {_blame(chain, name, box, base)}"
            )
        out[boxes.slices(box)] = values.reshape(boxes.box_shape(box))
    return out


def _decode_box(
    chain: Sequence[Segment],
    name: str,
    box: Box,
    base: Callable[[str], np.ndarray] | None,
) -> np.ndarray:
    """Flat values of one index range after the whole chain."""
    leaf = chain[-1].leaves[name]
    start = len(chain) - 1
    while start >= 0 and _chunk(chain[start], name, box).codec in _NEEDS_BASE:
        start -= 1
    # Kernels trust the arrays they get, so every step of the way must speak of the same leaf.
    for used in chain[max(start, 0) :]:
        _check_same(used, leaf)
    if start < 0:
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
        values = np.array(whole[boxes.slices(box)], order="C").reshape(-1)
        start = -1
    else:
        values = _decode_chunk(chain[start], name, box, None)
    for segment in chain[start + 1 :]:
        values = _decode_chunk(segment, name, box, values)
    return values


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
        mode = chunk.codec.removeprefix("exact:")
        return exact.decode(payload, mode, leaf.dtype, count, values)
    except CorruptDataError as e:
        where = segment.reader.where
        detail = str(e).removeprefix(f"{where}: ")
        raise CorruptDataError(f"{where}: leaf {name!r}: {detail}") from e


def _decode_lc(
    payload: memoryview, chunk: Chunk, table: np.ndarray, values: np.ndarray
) -> np.ndarray:
    count, itemsize = chunk.exceptions, values.dtype.itemsize
    head = count * (8 + itemsize)
    if head > len(payload):
        raise CorruptDataError(
            f"{count} exceptions take {head} bytes, the chunk has {len(payload)}"
        )
    where = np.frombuffer(payload[: count * 8], "<u8")
    if count and (int(where.max()) >= values.size or np.any(where[1:] <= where[:-1])):
        raise CorruptDataError("the indices of its exceptions are out of order or range")
    codes = entropy.decode(payload[head:], count=values.size, threads=1)
    if codes.size and int(codes.max()) >= table.size:
        raise CorruptDataError(
            f"code {int(codes.max())} is outside its table of {table.size} entries"
        )
    lc.apply(values, codes, table)
    if count:
        raw = np.frombuffer(payload[count * 8 : head], np.dtype(f"u{itemsize}"))
        values.view(raw.dtype)[where.astype(np.int64)] = raw
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
        box = _parse_box(entry, shape, f"{where}: leaf {name!r}")
        codec, table, odd = entry["codec"], entry.get("table", 0), entry.get("exceptions", 0)
        known = codec == "lc" or codec.removeprefix("exact:") in exact.MODES
        if not known or (codec != "lc" and not codec.startswith("exact:")):
            raise CorruptDataError(f"{where}: leaf {name!r} has the unknown codec {codec!r}")
        if codec in _NEEDS_BASE and not chained:
            raise CorruptDataError(
                f"{where}: leaf {name!r} is a delta in a segment that has no chain"
            )
        if codec == "lc" and not (
            type(table) is int
            and 0 <= table < tables
            and type(odd) is int
            and odd >= 0
            and dtype.name in lc.SUPPORTED_DTYPES
        ):
            raise CorruptDataError(f"{where}: leaf {name!r} has damaged lc fields")
        if box in chunks:
            raise CorruptDataError(f"{where}: leaf {name!r} has the index range {box} twice")
        chunks[box] = Chunk(number + len(chunks), codec, entry["hash"], box, table, odd)
    return LeafEntry(name, dtype, shape, chunks)


def _parse_box(entry: dict[str, Any], shape: tuple[int, ...], where: str) -> Box:
    if "lo" not in entry and "hi" not in entry:
        return (0,) * len(shape), shape
    lo, hi = (parse_shape(entry.get(k), where) for k in ("lo", "hi"))
    fits = len(lo) == len(hi) == len(shape) and all(
        a <= b <= size for a, b, size in zip(lo, hi, shape, strict=False)
    )
    if not fits:
        raise CorruptDataError(f"{where}: index range {lo} to {hi} is outside shape {shape}")
    return lo, hi


def parse_shape(raw: Any, where: str) -> tuple[int, ...]:
    """Checks a shape from a file: non-negative ints, at most 2^62 elements."""
    good = isinstance(raw, list) and len(raw) <= MAX_DIMS
    if not good or not all(type(n) is int and 0 <= n < 1 << 62 for n in raw):
        raise CorruptDataError(f"{where}: {raw!r} is not a shape")
    total = 1
    for n in raw:
        total *= max(n, 1)
    if total >= 1 << 62:
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

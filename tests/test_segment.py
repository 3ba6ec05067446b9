"""Segments and records from hostile hands: every claim is checked before it is used."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lcjax
from lcjax import boxes, container, entropy, hashing, record, segment
from lcjax.errors import BaseMismatchError, CorruptDataError

SIZE = 6


def lc_payload(codes, where=(), values=()):
    head = np.array(where, "<u8").tobytes() + np.array(values, "<f4").tobytes()
    return head + entropy.encode(np.array(codes, np.uint8))


def key_segment():
    values = np.arange(SIZE, dtype=np.float32)
    writer = container.Writer()
    entry, payload = segment.encode_exact(values, None)
    writer.add(payload)
    entry["hash"] = hashing.value_hash(values)
    return writer, {
        "kind": "chain",
        "base": None,
        "state": "s0",
        "tables": [],
        "leaves": [{"name": "w", "dtype": "float32", "shape": [SIZE], "chunks": [entry]}],
    }


def delta_segment(codes=(0, 1, 0, 2, 0, 0), where=(), values=(), digest=None):
    table = np.float32([0, 0.5, -0.25])
    expected = np.arange(SIZE, dtype=np.float32) + table[np.minimum(codes, 2)]
    writer = container.Writer()
    writer.add(lc_payload(codes, where, values))
    chunk = {"codec": "lc", "table": 0, "hash": digest or hashing.value_hash(expected)}
    if len(where):
        chunk["exceptions"] = len(where)
    return writer, {
        "kind": "chain",
        "base": "s0",
        "state": "s1",
        "tables": [table.tobytes().hex()],
        "leaves": [{"name": "w", "dtype": "float32", "shape": [SIZE], "chunks": [chunk]}],
    }


def opened(writer, meta):
    return segment.parse(container.from_bytes(writer.finish(meta).to_bytes(), "file"), ["chain"])


def test_a_chain_by_hand():
    chain = [opened(*key_segment()), opened(*delta_segment())]
    segment.check_chain(chain)
    assert segment.decode_leaf([chain], "w").tolist() == [0, 1.5, 2, 2.75, 4, 5]
    assert segment.decode_leaf([chain[:1]], "w").tolist() == [0, 1, 2, 3, 4, 5]


def test_exceptions_are_stored_exactly():
    values = np.float32([0, 1, np.inf, 3, 4, np.nan])
    digest = hashing.value_hash(values)
    delta = delta_segment([0] * 6, [2, 5], [np.inf, np.nan], digest)
    chain = [opened(*key_segment()), opened(*delta)]
    assert segment.decode_leaf([chain], "w").tobytes() == values.tobytes()


def test_a_wrong_chain_is_refused():
    with pytest.raises(BaseMismatchError, match="start from state s0.*leads to none"):
        segment.check_chain([opened(*delta_segment())])
    with pytest.raises(CorruptDataError, match="'w' is a delta.*no key frame"):
        segment.decode_leaf([[opened(*delta_segment())]], "w")


def test_values_that_miss_their_hash_name_the_segment_where_they_went_wrong():
    bad = opened(*delta_segment(digest="0" * 16))
    with pytest.raises(CorruptDataError, match="leaf 'w' has value hash .* expected 0{16}.*file"):
        segment.decode_leaf([[opened(*key_segment()), bad]], "w")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codes": (0, 9, 0, 0, 0, 0)}, "code 9 is outside its table of 3"),
        ({"codes": (0, 1)}, "2 symbols|expected 6|count"),
        ({"where": [2, 2], "values": [1, 1]}, "out of order or range"),
        ({"where": [3, 1], "values": [1, 1]}, "out of order or range"),
        ({"where": [6], "values": [1]}, "out of order or range"),
        ({"where": [2**63], "values": [1]}, "out of order or range"),
        ({"where": range(5), "values": []}, "file: leaf 'w'"),
    ],
)
def test_damaged_lc_chunks(arguments, message):
    codes = arguments.pop("codes", (0, 1, 0, 2, 0, 0))
    writer, meta = delta_segment((0,) * 6, digest="0" * 16)
    writer = container.Writer()
    writer.add(lc_payload(codes, arguments.get("where", ()), arguments.get("values", ())))
    if "where" in arguments:
        meta["leaves"][0]["chunks"][0]["exceptions"] = len(list(arguments["where"]))
    with pytest.raises(CorruptDataError, match=message):
        segment.decode_leaf([[opened(*key_segment()), opened(writer, meta)]], "w")


def edited(path, value, build=delta_segment):
    """A segment with one field of its description replaced (or removed)."""
    writer, meta = build()
    meta = copy.deepcopy(meta)
    at = meta
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return writer, meta


LEAF = ("leaves", 0)
CHUNK = ("leaves", 0, "chunks", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), "own"),
        (("kind",), KeyError),
        (("kind",), ["chain"]),
        (("base",), 7),
        (("state",), None),
        (("tables",), KeyError),
        (("tables",), ["zz"]),
        (("tables",), ["00"]),
        (("tables",), [""]),
        (("tables",), ["0000c07f"]),
        (("tables",), ["00000000" * 257]),
        (("tables",), []),
        (("leaves",), {}),
        (LEAF, []),
        ((*LEAF, "name"), 3),
        ((*LEAF, "dtype"), "object"),
        ((*LEAF, "dtype"), "float64"),
        ((*LEAF, "dtype"), None),
        ((*LEAF, "shape"), [-6]),
        ((*LEAF, "shape"), [True]),
        ((*LEAF, "shape"), "6"),
        ((*LEAF, "shape"), [1 << 61, 1 << 61]),
        ((*LEAF, "shape"), [1] * 100),
        ((*LEAF, "chunks"), None),
        (CHUNK, 1),
        ((*CHUNK, "codec"), "zip"),
        ((*CHUNK, "codec"), "plain"),
        ((*CHUNK, "codec"), None),
        ((*CHUNK, "hash"), 5),
        ((*CHUNK, "table"), 1),
        ((*CHUNK, "table"), -1),
        ((*CHUNK, "table"), 0.0),
        ((*CHUNK, "exceptions"), -1),
        ((*CHUNK, "exceptions"), "1"),
        ((*CHUNK, "lo"), [1]),
        ((*CHUNK, "hi"), [6]),
        ((*CHUNK, "lo"), "x"),
    ],
)
def test_damaged_descriptions_are_refused(path, value):
    with pytest.raises(CorruptDataError, match="file"):
        opened(*edited(path, value))


def test_chunks_must_cover_the_leaf_exactly():
    for ranges in ([(0, 3), (2, 5)], [(0, 3), (4, 7)], [(0, 3)], [(0, 6), (0, 6)]):
        writer, meta = delta_segment()
        chunk = meta["leaves"][0]["chunks"][0]
        chunks = [{**chunk, "lo": [a], "hi": [b]} for a, b in ranges]
        meta["leaves"][0]["chunks"] = chunks
        for _ in chunks[1:]:
            writer.add(b"")
        with pytest.raises(CorruptDataError, match="file.*'w'"):
            segment.decode_leaf([[opened(writer, meta)]], "w")


def shard(values, low, high, size):
    """A key frame of one process that holds part of a leaf."""
    writer = container.Writer()
    entry, payload = segment.encode_exact(values, None)
    writer.add(payload)
    entry |= {"lo": [low], "hi": [high], "hash": hashing.value_hash(values, low)}
    leaf = {"name": "w", "dtype": "float32", "shape": [size], "chunks": [entry]}
    meta = {"kind": "chain", "base": None, "state": "s", "tables": [], "leaves": [leaf]}
    return [opened(writer, meta)]


def test_a_leaf_may_be_spread_over_several_processes():
    values = np.arange(10, dtype=np.float32)
    chains = [shard(values[6:], 6, 10, 10), shard(values[:6], 0, 6, 10)]
    assert segment.decode_leaf(chains, "w").tolist() == values.tolist()
    with pytest.raises(CorruptDataError, match="'w' do not cover its shape"):
        segment.decode_leaf(chains[:1], "w")
    with pytest.raises(CorruptDataError, match="'w' do not cover its shape"):
        segment.decode_leaf([*chains, shard(values[2:3], 2, 3, 10)], "w")
    with pytest.raises(CorruptDataError, match=r"'w' is float32\[11\]"):
        segment.decode_leaf([chains[0], shard(values[:6], 0, 6, 11)], "w")


def test_more_or_fewer_chunks_than_described_are_refused():
    writer, meta = delta_segment()
    writer.add(b"more")
    with pytest.raises(CorruptDataError, match="describes 1 chunks and holds 2"):
        opened(writer, meta)
    writer, meta = delta_segment()
    meta["leaves"].append(copy.deepcopy(meta["leaves"][0]))
    with pytest.raises(CorruptDataError, match="'w' stands in it twice"):
        opened(writer, meta)


def test_a_record_that_disagrees_with_its_segment_is_refused():
    message, _ = lcjax.encode({"w": np.zeros(8, np.float32)}, preset="paper")
    reader = container.from_bytes(message)
    for field, value in (("shape", [4]), ("dtype", "int32"), ("codec", "alone")):
        meta = copy.deepcopy(reader.meta)
        meta["leaves"][0][field] = value
        writer = container.Writer()
        for k in range(2):
            writer.add(bytes(reader.chunk(k)))
        with pytest.raises(CorruptDataError, match="leaf 'w'"):
            lcjax.decode(writer.finish(meta).to_bytes())


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def places(node, path=()):
    """Every place in a JSON value."""
    yield path
    items = list(node.items()) if isinstance(node, dict) else []
    for key, value in list(enumerate(node)) if isinstance(node, list) else items:
        yield from places(value, (*path, key))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_value_in_any_place_of_a_message_is_refused_or_harmless(data):
    tree = {"w": np.arange(20, dtype=np.float32), "n": 3, "s": "x", "k": [None, (1.5, {})]}
    message, ref = lcjax.encode(tree, preset="paper")
    reader = container.from_bytes(message)
    meta = copy.deepcopy(reader.meta)
    path = data.draw(st.sampled_from([p for p in places(meta) if p]))
    at = meta
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = data.draw(JSON)
    writer = container.Writer()
    for k in range(2):
        writer.add(bytes(reader.chunk(k)))
    try:
        got = lcjax.decode(writer.finish(meta).to_bytes())
    except lcjax.LcjaxError:
        return
    assert got.id == ref.id  # the values themselves are guarded by the segments' hashes


def test_fidelity_is_rounded_and_never_infinite():
    from lcjax.codecs.lc import Fidelity

    lost = record.fidelity_to_json(Fidelity(4.0, 1.0, 0.123456, 0.0))
    assert lost == {"relative_error": 0.5, "state_error": None, "max_error": 0.1235}
    assert record.fidelity_to_json(None) is None


def one_leaf(kind, dtype, size, codec, payload, base=None, state="s0", tables=()):
    """A segment of one leaf 'w' in one chunk, whatever its claims."""
    writer = container.Writer()
    writer.add(payload)
    chunk = {"codec": codec, "table": 0, "hash": "0" * 16}
    leaf = {"name": "w", "dtype": dtype, "shape": [size], "chunks": [chunk]}
    meta = {"kind": kind, "base": base, "state": state, "tables": list(tables), "leaves": [leaf]}
    return writer, meta


def plane(values):
    stream = entropy.encode(values)
    assert len(stream) < 128
    return bytes([len(stream)]) + stream


def test_a_delta_on_another_dtype_never_reaches_the_kernels():
    size = 1 << 20  # far beyond the smaller buffer, so that a write past its end would crash
    narrow = one_leaf("chain", "int8", size, "exact:plain", plane(np.zeros(size, np.uint8)))
    codes = entropy.encode(np.ones(size, np.uint8))
    tables = [np.float32([0, 1]).tobytes().hex()]
    lossy = one_leaf("chain", "float32", size, "lc", codes, "s0", "s1", tables)
    zeros = plane(np.zeros(size, np.uint8)) * 8
    exact = one_leaf("chain", "float64", size, "exact:diff", zeros, "s0", "s1")
    for wide in (lossy, exact):
        with pytest.raises(CorruptDataError, match=r"'w' is int8.*where a later delta builds"):
            segment.decode_leaf([[opened(*narrow), opened(*wide)]], "w")
        with pytest.raises(CorruptDataError, match=r"its base has 1048576 of int8"):
            segment.decode_leaf([[opened(*wide)]], "w", lambda name: np.zeros(size, np.int8))
        short = np.zeros(5, wide[1]["leaves"][0]["dtype"])
        with pytest.raises(CorruptDataError, match=r"its base has 5 of"):
            segment.decode_leaf([[opened(*wide)]], "w", {"w": short}.__getitem__)


def test_leaves_that_stand_alone_cannot_be_deltas():
    writer, meta = one_leaf("own", "float64", 3, "exact:diff", plane(np.zeros(3, np.uint8)) * 8)
    with pytest.raises(CorruptDataError, match="'w' is a delta in a segment that has no chain"):
        segment.parse(container.from_bytes(writer.finish(meta).to_bytes(), "file"), ["own"])


def test_bools_are_0_or_1():
    writer, meta = one_leaf("chain", "bool", 3, "exact:plain", plane(np.uint8([0, 1, 167])))
    with pytest.raises(CorruptDataError, match="167 stands where a bool"):
        segment.decode_leaf([[opened(writer, meta)]], "w")


def test_column_boxes_over_many_rows_are_hashed_in_one_go():
    rows = 1 << 18
    values = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    parts = [
        boxes.box_hash(
            np.ascontiguousarray(values[:, k : k + 1]), ((0, k), (rows, k + 1)), (rows, 2)
        )
        for k in range(2)
    ]
    assert hashing.combine(parts) == hashing.value_hash(values)

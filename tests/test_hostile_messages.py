"""Messages that pass every checksum and ask for more memory than their leaves have."""

import copy
import tracemalloc

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lcjax
from lcjax import container
from lcjax._varint import varint


def taken_apart(data):
    """A container's metadata and its chunks."""
    found = container.from_bytes(data)
    return copy.deepcopy(found.meta), [bytes(found.chunk(k)) for k in range(len(found))]


def put_together(meta, chunks):
    writer = container.Writer()
    for chunk in chunks:
        writer.add(chunk)
    return writer.finish(meta).to_bytes()


def refused(data, match, **limits):
    """The message is refused by name, and what that took is in proportion to it."""
    tracemalloc.start()
    try:
        with pytest.raises(lcjax.CorruptDataError, match=match):
            lcjax.decode(data, **limits)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rows", [1 << 26, 1 << 45])
def test_an_empty_index_range_of_many_rows(rows):
    message, _ = lcjax.encode({"z": np.zeros((3, 2, 0), np.float32)}, preset="lossless")
    outer, (chain, own) = taken_apart(message)
    inner, chunks = taken_apart(own)
    for meta in (outer, inner):
        meta["leaves"][0]["shape"] = [rows, 2, 0]
    inner["leaves"][0]["chunks"][0].update(lo=[0, 0, 0], hi=[rows, 1, 0])
    data = put_together(outer, (chain, put_together(inner, chunks)))
    refused(data, "'z'.*is empty, and not the whole", max_bytes=1000)


@pytest.mark.parametrize("size", [1 << 28, 1 << 45])
def test_a_moment_coded_with_a_leaf_that_the_record_does_not_have(size):
    params = {"a": jnp.ones((20, 30))}
    state = {"params": params, "opt": optax.adam(1e-3).init(params)}
    message, _ = lcjax.encode(state, preset="balanced")
    outer, (chain, own) = taken_apart(message)
    chain_meta, chain_chunks = taken_apart(chain)
    own_meta, own_chunks = taken_apart(own)
    plane = bytes([1]) + varint(size) + b"\0"
    chain_chunks.append(varint(len(plane)) + plane)
    chunk = {"codec": "exact:plain", "hash": "0"}
    chain_meta["leaves"].append(
        {"name": "zz", "dtype": "uint8", "shape": [size], "chunks": [chunk]}
    )
    moment = next(leaf for leaf in own_meta["leaves"] if "/mu/" in leaf["name"])
    moment["chunks"][0]["given"] = [None, "zz"]
    parts = (put_together(chain_meta, chain_chunks), put_together(own_meta, own_chunks))
    refused(put_together(outer, parts), "'zz', which has another shape", max_bytes=1 << 20)


@pytest.mark.parametrize("shape", [[0, 1 << 61], [1 << 61, 0], [1 << 29, 0, 1 << 29]])
def test_an_empty_leaf_of_a_shape_that_numpy_refuses(shape):
    message, _ = lcjax.encode({"z": np.zeros((0, 3), np.float32)}, preset="lossless")
    outer, (chain, own) = taken_apart(message)
    inner, chunks = taken_apart(own)
    for meta in (outer, inner):
        meta["leaves"][0]["shape"] = shape
    data = put_together(outer, (chain, put_together(inner, chunks)))
    refused(data, "'z'.*too many elements")

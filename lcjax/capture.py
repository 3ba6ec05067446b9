"""Taking a snapshot of a live tree, safe against whatever the trainer does next.

On CPU a jax array is taken as a view: the runtime keeps the buffer while the view lives,
also when the caller donates it. On accelerators, leaves for the lossy codec are copied on
their device by one program, and the others are fetched. numpy arrays can be changed in
place, so they are copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lcjax import policy, tree
from lcjax._jax_context import neutral
from lcjax.codecs import lc
from lcjax.errors import UnsupportedLeafError
from lcjax.jobs import Item
from lcjax.record import LeafRecord
from lcjax.state import Flat, Snapshot, concatenate


class Capture(NamedTuple):
    """A tree as it was at one moment.

    Attributes:
      flat: its leaves and containers.
      leaves: what the record will say of each leaf.
      snapshot: the array leaves' values.
    """

    flat: tree.Flat
    leaves: tuple[LeafRecord, ...]
    snapshot: Snapshot


def capture(
    flat: tree.Flat, preset: policy.Preset, shardings: tuple[int | None, ...] = ()
) -> Capture:
    """Takes a snapshot; returns before anything is encoded.

    Args:
      flat: the tree, taken apart.
      preset: decides the leaves' codecs.
      shardings: per leaf, the number of its sharding's text.

    Raises:
      UnsupportedLeafError: a leaf that cannot be stored.
    """
    with neutral():
        return _capture(flat, preset, shardings)


def _capture(flat: tree.Flat, preset: policy.Preset, shardings: tuple[int | None, ...]) -> Capture:
    records: list[LeafRecord] = []
    items: list[Item] = []
    on_device: dict[str, list[tuple[str, Any]]] = {}
    for number, (leaf, plan) in enumerate(
        zip(flat.leaves, policy.plans(preset, flat.leaves), strict=True)
    ):
        sharding = shardings[number] if shardings else None
        if plan is None:
            records.append(LeafRecord(leaf.kind, value=leaf.value))
            continue
        array = _addressable(tree.array_of(leaf), leaf.name)
        dtype = np.dtype(array.dtype).newbyteorder("=")
        records.append(LeafRecord(leaf.kind, plan.kind, leaf.spec, None, sharding))
        if plan.kind == "lc" and not isinstance(array, np.ndarray) and not _on_cpu(array):
            on_device.setdefault(dtype.name, []).append((leaf.name, lc.words(array.reshape(-1))))
            values = None
        else:
            values = _host_values(array, dtype)
        items.append(Item(leaf.name, dtype, tuple(array.shape), plan, values))
    device: dict[str, Flat] = {
        name: _copy(concatenate([n for n, _ in parts], [a for _, a in parts], np.dtype(name)))
        for name, parts in on_device.items()
    }
    return Capture(flat, tuple(records), Snapshot(tuple(items), device))


def _copy(flat: Flat) -> Flat:
    """A lone leaf was not concatenated, so it still is the caller's buffer."""
    return flat if len(flat.names) > 1 else flat._replace(array=flat.array.copy())


def _addressable(array: Any, name: str) -> Any:
    """The array's values as this process can see them."""
    if isinstance(array, np.ndarray) or array.is_fully_addressable:
        return array
    if array.is_fully_replicated:
        return array.addressable_data(0)
    raise UnsupportedLeafError(
        f"leaf {name!r} is spread over several processes, which this release does not save; "
        "save it with Orbax's own handler, or replicate it first"
    )


def _on_cpu(array: Any) -> bool:
    return all(d.platform == "cpu" for d in array.devices())


def _host_values(array: Any, dtype: np.dtype) -> np.ndarray:
    """Flat values in native byte order that nobody else will change."""
    values = np.asarray(array)
    if isinstance(array, np.ndarray):
        values = np.array(values, dtype=dtype, order="C", copy=True)
    return np.ascontiguousarray(values).reshape(-1)

"""What a reader of a save will have, told by the side that writes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from lcjax.capture import Capture
from lcjax.errors import CorruptDataError
from lcjax.policy import CHAINED
from lcjax.state import Encoded


def values_of(taken: Capture, encoded: Encoded) -> tuple[Any, ...]:
    """The leaves' values as a reader rebuilds them, in the tree's order.

    Returns:
      numpy arrays in their stored dtype and shape (key data of PRNG keys), Python scalars.
    """
    items = {item.name: item for item in taken.snapshot.items}
    values: list[Any] = []
    for leaf, entry in zip(taken.flat.leaves, taken.leaves, strict=True):
        if entry.spec is None:
            values.append(leaf.value)
            continue
        item = items[leaf.name]
        if entry.codec in CHAINED:
            flat = encoded.reference.value(leaf.name)
        else:
            found = encoded.moments.get(leaf.name)
            flat = taken.snapshot.host(item) if found is None else found
        values.append(flat.reshape(item.shape))
    return tuple(values)


def as_leaf(value: Any, kind: str, impl: str | None) -> Any:
    """A stored value as the kind of leaf that was saved; numpy arrays are the caller's own."""
    if kind in ("jax", "key"):
        import jax
        import jax.numpy as jnp

        if kind == "key":
            try:
                return jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
            except (ValueError, TypeError) as e:
                raise CorruptDataError(f"not the data of a PRNG key of {impl!r}: {e}") from e
        if jax.dtypes.canonicalize_dtype(value.dtype) == value.dtype:
            return jnp.asarray(value)
        # 64 bits where jax has them disabled: exact as numpy, not rounded.
    return value.copy() if isinstance(value, np.ndarray) else value

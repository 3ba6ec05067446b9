"""Narrow floats as the float32 that kernels compute in."""

from __future__ import annotations

import numpy as np

from lcjax.hashing import read_only


def float32(values: np.ndarray) -> np.ndarray:
    """The values as float32, read-only; exact for float16 and bfloat16, no copy of float32."""
    return read_only(values if values.dtype == np.float32 else values.astype(np.float32))

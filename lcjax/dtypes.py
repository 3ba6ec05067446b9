"""The dtypes that lcjax stores, by the names that files use."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from lcjax.errors import CorruptDataError

_NUMPY = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML = (
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int2", "int4", "uint2", "uint4"),
)

DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in _NUMPY} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _ML if hasattr(ml_dtypes, name)
}


def dtype_from_name(name: Any, where: str) -> np.dtype:
    """The dtype of a name found in a file.

    Raises:
      CorruptDataError: no dtype that lcjax stores has this name.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise CorruptDataError(f"{where}: unknown dtype {name!r}")
    return DTYPES[name]


def is_storable(dtype: np.dtype) -> bool:
    """Whether arrays of a dtype can be stored."""
    return dtype.name in DTYPES

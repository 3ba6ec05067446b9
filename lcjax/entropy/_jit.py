"""Types and intrinsics of the entropy kernels."""

import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lcjax._numba import kernel

__all__ = [
    "BYTES",
    "I32",
    "I64",
    "U8",
    "U32",
    "U64",
    "at",
    "fill",
    "floor_log2",
    "i64",
    "inline",
    "kernel",
    "load64",
    "store64",
    "trailing_zeros",
    "u64",
]

# Input arrays are typed read-only, so that one compiled kernel takes `bytes`, memory maps and
# writable arrays alike (numba converts a writable array to a read-only one, not back).
BYTES = types.Array(types.uint8, 1, "C", readonly=True)
U8 = types.uint8[::1]
U32 = types.uint32[::1]
U64 = types.uint64[::1]
I64 = types.int64[::1]
I32 = types.int32[::1]
i64 = types.int64
u64 = types.uint64


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a small helper that only kernels call; LLVM inlines it into them."""
    compiled: Callable[..., Any] = njit(nogil=True, error_model="numpy", inline="never")(function)
    return compiled


def _little_endian(builder: Any, value: Any) -> Any:
    return value if sys.byteorder == "little" else builder.bswap(value)


def _element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return builder.gep(view.data, [index], inbounds=True)


@intrinsic
def load64(typing_context: Any, array: Any, index: Any) -> Any:
    """Eight bytes at any byte offset, as a little-endian uint64; the caller proves the bounds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, signature.args[0], *args)
        pointer = builder.bitcast(pointer, ir.IntType(64).as_pointer())
        return _little_endian(builder, builder.load(pointer, align=1))

    return types.uint64(array, types.int64), codegen


@intrinsic
def store64(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Store a uint64 as eight little-endian bytes at any offset; the caller proves the bounds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.bitcast(pointer, ir.IntType(64).as_pointer())
        builder.store(_little_endian(builder, args[2]), pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), codegen


@intrinsic
def fill(typing_context: Any, array: Any, begin: Any, end: Any, value: Any) -> Any:
    """`array[begin:end] = value` for bytes, as one memset; the caller proves 0 <= begin <= end."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, signature.args[0], args[0], args[1])
        cgutils.memset(builder, pointer, builder.sub(args[2], args[1]), args[3])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, types.uint8), codegen


@intrinsic
def at(typing_context: Any, array: Any, index: Any) -> Any:
    """`array[index]` without numba's test for negative indices; the caller proves the bounds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, signature.args[0], *args)
        return context.unpack_value(builder, signature.args[0].dtype, pointer)

    return array.dtype(array, types.uint64), codegen


@intrinsic
def trailing_zeros(typing_context: Any, value: Any) -> Any:
    """Number of zero bits below the lowest set bit of a uint64; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], cgutils.false_bit)

    return types.int64(types.uint64), codegen


@intrinsic
def floor_log2(typing_context: Any, value: Any) -> Any:
    """Position of the highest set bit of a positive uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], cgutils.false_bit)
        return builder.sub(ir.Constant(ir.IntType(64), 63), zeros)

    return types.int64(types.uint64), codegen

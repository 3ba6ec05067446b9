"""Python scalars <-> JSON, exactly and with their type."""

import base64
import binascii
import re
from typing import Any, TypeAlias

from lcjax._tree_names import is_text
from lcjax.errors import CorruptDataError, UnsupportedLeafError

Scalar: TypeAlias = bool | int | float | complex | str | bytes

# Exact types: a subclass (an enum, say) would come back as its base type.
SCALAR_KINDS: dict[type, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
    bytes: "bytes",
}

# Python refuses decimal text beyond 4300 digits, and reads it in quadratic time; hexadecimal text
# has neither limit. Numbers that people read stay decimal.
_DECIMAL_BITS = 64
_INT = re.compile(r"-?(?:[0-9]{1,20}|0x[0-9a-f]+)", re.ASCII)
_FLOAT = re.compile(r"nan|-?inf|-?[0-9]{1,32}(?:\.[0-9]{1,32})?(?:e[-+]?[0-9]{1,3})?", re.ASCII)


def scalar_to_json(value: Scalar) -> dict[str, Any]:
    """Describes a Python scalar as a JSON object with one key, its type.

    Floats and complex numbers are written as the shortest text that reads back as the same value
    (``-0.0``, ``inf`` and subnormals included; the sign and payload of a NaN are not kept). Large
    integers are hexadecimal, bytes base64.

    Args:
        value: a bool, int, float, complex, str or bytes (exactly these types).

    Returns:
        An object for `json.dumps`, such as ``{"float": "0.1"}``.

    Raises:
        UnsupportedLeafError: another type, or a str with a lone surrogate.
    """
    kind = SCALAR_KINDS.get(type(value))
    if isinstance(value, bool):
        return {"bool": value}
    if kind == "int" and isinstance(value, int):
        return {"int": str(value) if value.bit_length() <= _DECIMAL_BITS else hex(value)}
    if kind == "float":
        return {"float": repr(value)}
    if kind == "complex" and isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if kind == "str" and isinstance(value, str):
        if not is_text(value):
            raise UnsupportedLeafError(
                f"a str with a lone surrogate cannot be stored: {ascii(value)[:80]}; "
                "store its bytes instead"
            )
        return {"str": value}
    if kind == "bytes" and isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    raise UnsupportedLeafError(
        f"a {type(value).__name__} is not a Python scalar that lcjax stores "
        f"({', '.join(SCALAR_KINDS.values())})"
    )


def scalar_from_json(obj: object) -> Scalar:
    """Reads what `scalar_to_json` wrote.

    Args:
        obj: an object from `json.loads`; it may come from a damaged or hostile file.

    Returns:
        The value, of the Python type it was saved with.

    Raises:
        CorruptDataError: `obj` is not of that form.
    """
    if not isinstance(obj, dict) or len(obj) != 1:
        raise CorruptDataError(f"expected a scalar such as {{'int': '3'}}, found {_short(obj)}")
    ((kind, payload),) = obj.items()
    if kind == "bool" and isinstance(payload, bool):
        return payload
    if kind == "int" and isinstance(payload, str) and _INT.fullmatch(payload):
        return int(payload, 16 if "x" in payload else 10)
    if kind == "float":
        return _read_float(payload)
    if kind == "complex" and isinstance(payload, list) and len(payload) == 2:
        return complex(_read_float(payload[0]), _read_float(payload[1]))
    if kind == "str" and isinstance(payload, str) and is_text(payload):
        return payload
    if kind == "bytes" and isinstance(payload, str):
        try:
            return base64.b64decode(payload.encode(), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            pass
    raise CorruptDataError(f"not a stored Python scalar: {_short(obj)}")


def _read_float(text: object) -> float:
    if not isinstance(text, str) or not _FLOAT.fullmatch(text):
        raise CorruptDataError(f"expected the text of a float, found {_short(text)}")
    value = float(text)
    if repr(value) != text:  # one spelling per value; also refuses 1e999, which reads as inf
        raise CorruptDataError(f"expected the float {value!r} as it is written, found {text}")
    return value


def _short(obj: object) -> str:
    # repr of a hostile object may be huge or nested without end, so only small ones are shown.
    if isinstance(obj, str):
        return ascii(obj[:60])
    if isinstance(obj, dict) and len(obj) == 1:
        ((key, value),) = obj.items()
        if isinstance(value, str | bool | int | float):
            return f"{{{str(key)[:30]!a}: {_short(value)}}}"
    if isinstance(obj, bool | float | None):
        return repr(obj)
    return f"a {type(obj).__name__}"

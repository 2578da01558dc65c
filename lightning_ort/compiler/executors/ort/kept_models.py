"""Whether a kept ONNX model is one that a conversion writes: :func:`untrusted_reason`.

onnxruntime 1.19 reads any file that a model names as the content of a tensor, and has operators that run Python. Here
the fields of a model are read as protobuf writes them, since to load onnx takes longer than to start a small step.
"""

import math
from collections.abc import Iterator, Mapping

MICROSOFT = "com.microsoft"
# operators of onnxruntime that run Python or torch code, or read files
_OUTSIDE_OPS = {b"ATen", b"EPContext", b"PythonOp", b"PythonOpGrad"}
_DOMAINS = {b"", MICROSOFT.encode()}
_MAX_CONSTANT = 1 << 24  # elements: constants are shapes, scalars and index tables

# The fields of onnx.proto that are written: those that are numbers, names and values, or are not looked into; and those
# that are messages of a kind. Not among them: functions, training information, metadata, subgraphs, sparse constants,
# data in other files.
_Fields = tuple[frozenset[int], Mapping[int, str]]
_KINDS: Mapping[str, _Fields] = {
    "model": (frozenset({1, 2, 3, 4, 5, 6}), {7: "graph", 8: "opset"}),
    "opset": (frozenset({1, 2}), {}),
    "graph": (frozenset({2, 10, 11, 12, 13}), {1: "node", 5: "constant"}),
    "node": (frozenset({1, 2, 3, 4, 6, 7}), {5: "attribute"}),
    "attribute": (frozenset({1, 2, 3, 4, 7, 8, 9, 13, 20}), {5: "constant", 10: "constant"}),
    "constant": (frozenset({1, 2, 4, 5, 6, 7, 8, 9, 10, 11}), {}),
}
_DOMAIN_OF, _OP_TYPE, _SIZE = {"opset": 1, "node": 7}, 4, 1


def untrusted_reason(model: bytes) -> str | None:
    """Return why a kept model cannot have been written by a conversion, or ``None``."""
    try:
        return _reason(model, "model")
    except (IndexError, ValueError) as error:
        return f"it is not an ONNX model: {error}"


def _reason(message: bytes, kind: str) -> str | None:
    plain, parts = _KINDS[kind]
    sizes: list[int] = []
    for number, value in _fields(message):
        if number in parts:
            if not isinstance(value, bytes):
                raise ValueError(f"field {number} of a {kind} is a number")
            if (reason := _reason(value, parts[number])) is not None:
                return reason
        elif number not in plain:
            return f"a {kind} has field {number}, which is never written"
        elif number == _DOMAIN_OF.get(kind) and value not in _DOMAINS:
            return f"it has operators of {value!r}"
        elif (kind, number) == ("node", _OP_TYPE) and value in _OUTSIDE_OPS:
            return f"it has the operator {value!r}"
        elif (kind, number) == ("constant", _SIZE):
            sizes += _numbers(value) if isinstance(value, bytes) else [value]
    return f"a constant has the shape {sizes}" if math.prod(max(size, 1) for size in sizes) > _MAX_CONSTANT else None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The numbers and values of a message's fields; of one that is a floating-point number, nothing."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire_type = tag >> 3, tag & 7
        value: int | bytes = b""
        if wire_type == 0:
            value, at = _varint(message, at)
        elif wire_type == 2:
            size, start = _varint(message, at)
            at = start + size
            value = message[start:at]
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if at > len(message):
            raise ValueError("it is cut")
        yield number, value


def _numbers(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        value, at = _varint(packed, at)
        yield value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends; one that is negative is above 2**63."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number is too long")

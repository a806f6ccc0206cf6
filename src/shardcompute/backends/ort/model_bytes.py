"""ONNX models as bytes: the few messages of `onnx.proto` that our graphs need, written without the `onnx` package.

A worker would hold that package, its protobuf runtime and their types in memory for nothing but this. Field
numbers and types are those of onnx/onnx.proto, which never change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shardcompute.backends.matrix import Array

FLOAT, UINT8, INT8, INT32, INT64, FLOAT16 = 1, 2, 3, 6, 7, 10
_KINDS = {"float32": FLOAT, "uint8": UINT8, "int8": INT8, "int64": INT64, "float16": FLOAT16}
_IR_VERSION = 10
_EXTERNAL = 1
Attribute = int | float | str | bytes | Sequence[int]
"""Bytes are a graph's, as `write_graph` gives them."""


def write_model(
    nodes: Iterable[bytes],
    inputs: Iterable[bytes],
    outputs: Iterable[bytes],
    initializers: Iterable[bytes],
    opsets: Mapping[str, int],
) -> bytes:
    graph = write_graph(nodes, inputs, outputs, initializers)
    imports = (_message(8, _text(1, domain) + _number(2, version)) for domain, version in opsets.items())
    return _number(1, _IR_VERSION) + _message(7, graph) + b"".join(imports)


def write_graph(
    nodes: Iterable[bytes],
    inputs: Iterable[bytes],
    outputs: Iterable[bytes],
    initializers: Iterable[bytes],
) -> bytes:
    return b"".join(
        (
            *(_message(1, node) for node in nodes),
            _text(2, "shard"),
            *(_message(5, tensor) for tensor in initializers),
            *(_message(11, value) for value in inputs),
            *(_message(12, value) for value in outputs),
        )
    )


def write_node(
    kind: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    domain: str,
    attributes: Mapping[str, Attribute],
) -> bytes:
    return b"".join(
        (
            *(_text(1, name) for name in inputs),
            *(_text(2, name) for name in outputs),
            _text(4, kind),
            *(_message(5, _attribute(name, value)) for name, value in attributes.items()),
            _text(7, domain),
        )
    )


def write_value(name: str, kind: int, shape: Sequence[int | str]) -> bytes:
    """An input or output; a dimension with a name is as large as it comes."""
    dims = (_text(2, size) if isinstance(size, str) else _number(1, size) for size in shape)
    tensor = _number(1, kind) + _message(2, b"".join(_message(1, dim) for dim in dims))
    return _text(1, name) + _message(2, _message(1, tensor))


def write_tensor(name: str, values: Array) -> bytes:
    return _tensor(name, values) + _message(9, values.tobytes())


def write_external_tensor(name: str, values: Array) -> bytes:
    """A tensor whose bytes the session is given separately, in memory."""
    places = {"location": "memory", "offset": "0", "length": str(values.nbytes)}
    entries = (_message(13, _text(1, key) + _text(2, value)) for key, value in places.items())
    return _tensor(name, values) + b"".join(entries) + _number(14, _EXTERNAL)


def _tensor(name: str, values: Array) -> bytes:
    dims = b"".join(_number(1, size) for size in values.shape)
    return dims + _number(2, _KINDS[values.dtype.name]) + _text(8, name)


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, bytes):
        return _text(1, name) + _message(6, value) + _number(20, 5)
    if isinstance(value, str):
        return _text(1, name) + _text(4, value) + _number(20, 3)
    if isinstance(value, int | np.integer):
        return _text(1, name) + _number(3, int(value)) + _number(20, 2)
    if isinstance(value, float | np.floating):
        return _text(1, name) + _tag(2, 5) + struct.pack("<f", value) + _number(20, 1)
    return _text(1, name) + b"".join(_number(8, each) for each in value) + _number(20, 7)


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _message(field: int, content: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _tag(field, 0) + _varint(value & (1 << 64) - 1)


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)

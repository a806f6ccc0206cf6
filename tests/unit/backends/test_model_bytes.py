"""ONNX models written by hand are what ONNX Runtime reads."""

from __future__ import annotations

import numpy as np
import onnxruntime

from shardcompute.backends.ort.graph import use_threads
from shardcompute.backends.ort.model_bytes import (
    FLOAT,
    INT64,
    write_model,
    write_node,
    write_tensor,
    write_value,
)


def open_model(
    nodes: list[bytes], inputs: list[bytes], outputs: list[bytes], initializers: list[bytes]
) -> onnxruntime.InferenceSession:
    use_threads(1)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    return onnxruntime.InferenceSession(write_model(nodes, inputs, outputs, initializers, {"": 20}), options)


def test_shapes_names_and_types_arrive() -> None:
    inputs = [write_value("n", INT64, [2, "rows"])]
    outputs = [write_value("y", FLOAT, [2, "rows"])]
    session = open_model([write_node("Cast", ["n"], ["y"], "", {"to": FLOAT})], inputs, outputs, [])
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape, given.type) == ("n", [2, "rows"], "tensor(int64)")
    assert (made.name, made.shape, made.type) == ("y", [2, "rows"], "tensor(float)")


def test_attributes_of_every_kind_and_tensors_arrive() -> None:
    """A transposition (numbers), an activation (a number with a point), a text, a negative axis, a long tensor."""
    table = np.arange(300 * 2, dtype=np.float32).reshape(2, 300)
    nodes = [
        write_node("Transpose", ["x"], ["a"], "", {"perm": [1, 0]}),
        write_node("LeakyRelu", ["a"], ["b"], "", {"alpha": 0.5}),
        write_node("MatMul", ["b", "table"], ["c"], "", {}),
        write_node("Gelu", ["c"], ["d"], "", {"approximate": "tanh"}),
        write_node("Concat", ["c", "d"], ["e"], "", {"axis": -1}),
        write_node("Transpose", ["e"], ["f"], "", {"perm": [1, 0]}),
        write_node("Slice", ["f", "zero", "two"], ["y"], "", {}),
    ]
    numbers = {"zero": np.array([0]), "two": np.array([2])}
    tensors = [write_tensor(name, values) for name, values in {"table": table, **numbers}.items()]
    x = np.array([[1, -2, 3], [-1, 0, 5]], dtype=np.float32)
    inputs, outputs = [write_value("x", FLOAT, [2, "columns"])], [write_value("y", FLOAT, [2, "columns"])]
    (y,) = open_model(nodes, inputs, outputs, tensors).run(["y"], {"x": x})
    leaky = np.where(x.T > 0, x.T, x.T / 2)
    np.testing.assert_allclose(y, (leaky @ table).T[:2])

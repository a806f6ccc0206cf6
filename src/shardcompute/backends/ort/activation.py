"""Activations of feed-forward blocks as graph nodes."""

from __future__ import annotations

from shardcompute.backends.ops import Activation, Gate
from shardcompute.backends.ort.graph import GraphWriter

GPT_OSS_ALPHA = QUICK_GELU_ALPHA = 1.702


def write_gated(graph: GraphWriter, gate_up: str, width: int, gate: Gate) -> str:
    left, up = graph.nodes("Split", [gate_up, graph.integers(width // 2, width // 2)], 2, axis=-1)
    if gate.limit is not None:
        limit, below = graph.number(gate.limit), graph.number(-gate.limit)
        left = graph.node("Min", [left, limit])
        up = graph.node("Clip", [up, below, limit])
        alpha = graph.number(GPT_OSS_ALPHA)
        squashed = graph.node("Sigmoid", [graph.node("Mul", [left, alpha])])
        up = graph.node("Add", [up, graph.number(1)])
        return graph.node("Mul", [graph.node("Mul", [left, squashed]), up])
    return graph.node("Mul", [write_activation(graph, left, gate.activation), up])


def write_activation(graph: GraphWriter, x: str, activation: Activation) -> str:
    if activation == "silu":
        return graph.node("Mul", [x, graph.node("Sigmoid", [x])])
    if activation == "gelu_quick":
        squashed = graph.node("Sigmoid", [graph.node("Mul", [x, graph.number(QUICK_GELU_ALPHA)])])
        return graph.node("Mul", [x, squashed])
    if activation == "relu2":
        positive = graph.node("Relu", [x])
        return graph.node("Mul", [positive, positive])
    return graph.node("Gelu", [x], approximate="tanh" if activation == "gelu_tanh" else "none")

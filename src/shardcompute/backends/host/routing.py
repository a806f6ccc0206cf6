"""Expert routing: which experts a row goes to and with what weight, on the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32
from shardcompute.core.expert_routing import LEAST_SUM, Routing


def choose_experts(
    logits: Float32, per_token: int, routing: Routing, choice_bias: Float32 | None = None
) -> tuple[NDArray[np.int64], Float32]:
    """Expert numbers and weights `[rows, per_token]`, best first; ties go to the lower number."""
    scores = sigmoid(logits) if routing.scores == "sigmoid" else softmax(logits)
    judged = logits if routing.chooses_by_logits else scores
    if choice_bias is not None:
        judged = judged + choice_bias
    if routing.groups > 1:
        judged = _within_groups(judged, routing)
    chosen = np.argsort(-judged, axis=-1, kind="stable")[:, :per_token]
    if routing.scores == "softmax" and routing.weights_over == "chosen":
        weights = softmax(np.take_along_axis(logits, chosen, axis=-1))
    else:
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if routing.weights_over == "chosen":
            weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(LEAST_SUM))
    if routing.scale != 1.0:
        weights = weights * np.float32(routing.scale)
    return chosen.astype(np.int64), weights


def _within_groups(judged: Float32, routing: Routing) -> Float32:
    """Scores of the experts in the best groups; the others' are nothing."""
    grouped = judged.reshape(len(judged), routing.groups, -1)
    worth = np.sort(grouped, axis=-1)[..., -1 if routing.group_by == "best" else -2 :].sum(axis=-1)
    best = np.argsort(-worth, axis=-1, kind="stable")[:, : routing.chosen_groups]
    is_open = np.zeros(worth.shape, dtype=bool)
    np.put_along_axis(is_open, best, True, axis=-1)
    kept: Float32 = np.where(is_open[..., None], grouped, np.float32(-np.inf)).reshape(judged.shape)
    return kept


def softmax(x: Float32) -> Float32:
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Float32 = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def sigmoid(x: Float32) -> Float32:
    with np.errstate(over="ignore"):
        squashed: Float32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return squashed

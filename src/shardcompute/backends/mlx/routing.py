"""Expert routing: which experts a row goes to and with what weight, in MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from shardcompute.backends.ops import ExpertBlock
from shardcompute.core.expert_routing import LEAST_SUM, Routing


def choose_experts(logits: Any, block: ExpertBlock) -> tuple[Any, Any]:
    """Expert numbers and weights `[rows, per_token]`, best first. Float32."""
    routing = block.routing
    scores = mx.sigmoid(logits) if routing.scores == "sigmoid" else mx.softmax(logits, axis=-1)
    judged = logits if routing.chooses_by_logits else scores
    if block.choice_bias is not None:
        judged = judged + block.choice_bias
    if routing.groups > 1:
        judged = _within_groups(judged, routing)
    chosen = mx.argsort(-judged, axis=-1)[:, : block.per_token]
    if routing.scores == "softmax" and routing.weights_over == "chosen":
        weights = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1)
    else:
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if routing.weights_over == "chosen":
            weights = weights / (weights.sum(axis=-1, keepdims=True) + LEAST_SUM)
    return chosen, weights if routing.scale == 1.0 else weights * routing.scale


def _within_groups(judged: Any, routing: Routing) -> Any:
    grouped = judged.reshape(len(judged), routing.groups, -1)
    ordered = mx.sort(grouped, axis=-1)
    worth = ordered[..., -1] if routing.group_by == "best" else ordered[..., -2:].sum(axis=-1)
    # A group's rank among the groups: how many are better, or as good and before it.
    ranks = mx.argsort(mx.argsort(-worth, axis=-1), axis=-1)
    is_open = (ranks < routing.chosen_groups)[..., None]
    return mx.where(is_open, grouped, -mx.inf).reshape(judged.shape)

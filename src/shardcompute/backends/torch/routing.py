"""Expert routing: which experts a row goes to and with what weight, on the device and without waiting for it."""

from __future__ import annotations

import torch

from shardcompute.backends.ops import ExpertBlock
from shardcompute.core.expert_routing import LEAST_SUM, Routing


def choose_experts(logits: torch.Tensor, block: ExpertBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert numbers and weights `[rows, per_token]`, best first; ties go to the lower number. Float32."""
    routing = block.routing
    scores = torch.sigmoid(logits) if routing.scores == "sigmoid" else torch.softmax(logits, dim=-1)
    judged = logits if routing.chooses_by_logits else scores
    if block.choice_bias is not None:
        judged = judged + block.choice_bias
    if routing.groups > 1:
        judged = _within_groups(judged, routing)
    chosen = _best(judged, block.per_token)
    if routing.scores == "softmax" and routing.weights_over == "chosen":
        weights = torch.softmax(logits.gather(-1, chosen), dim=-1)
    else:
        weights = scores.gather(-1, chosen)
        if routing.weights_over == "chosen":
            weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return chosen, weights if routing.scale == 1.0 else weights * routing.scale


def _within_groups(judged: torch.Tensor, routing: Routing) -> torch.Tensor:
    grouped = judged.unflatten(-1, (routing.groups, -1))
    two = torch.sort(grouped, dim=-1, descending=True)[0][..., :2]
    worth = two[..., 0] if routing.group_by == "best" else two.sum(dim=-1)
    is_open = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, _best(worth, routing.chosen_groups), True)
    return grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    return torch.sort(values, dim=-1, descending=True, stable=True)[1][..., :count]

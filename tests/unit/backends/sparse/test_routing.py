"""Which experts rows go to, and with what weights: each rule against a plain reading of it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.host.routing import choose_experts
from shardcompute.backends.ops import ExpertBlock, Gate
from shardcompute.core.expert_routing import Routing

COUNT, PER_TOKEN, GROUPS, CHOSEN_GROUPS = 12, 3, 4, 2
LOGITS = np.random.default_rng(5).standard_normal((40, COUNT)).astype(np.float32) * 2
BIAS = np.random.default_rng(6).standard_normal(COUNT).astype(np.float32)

ROUTINGS = [
    Routing(scores, over, has_bias, groups, CHOSEN_GROUPS if groups > 1 else 1, group_by, 2.5)
    for scores, over, has_bias, (groups, group_by) in itertools.product(
        ("softmax", "sigmoid"),
        ("all", "chosen"),
        (False, True),
        ((1, "best"), (GROUPS, "best"), (GROUPS, "best_two")),
    )
]


def _expected(logits: Any, routing: Routing) -> dict[int, float]:
    """One row's experts and weights, from the definition."""
    logits = logits.astype(np.float64)
    powers = np.exp(logits)
    scores = powers / powers.sum() if routing.scores == "softmax" else 1 / (1 + np.exp(-logits))
    judged = scores + BIAS if routing.has_choice_bias else scores
    size = COUNT // routing.groups
    taken = 2 if routing.group_by == "best_two" else 1
    worth = [sum(sorted(judged[g * size : (g + 1) * size])[-taken:]) for g in range(routing.groups)]
    groups = sorted(range(routing.groups), key=lambda g: -worth[g])[: routing.chosen_groups]
    open_experts = [e for e in range(COUNT) if e // size in groups]
    chosen = sorted(open_experts, key=lambda e: -judged[e])[:PER_TOKEN]
    total = sum(scores[e] for e in chosen) if routing.weights_over == "chosen" else 1.0
    return {e: float(scores[e] / total * routing.scale) for e in chosen}


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.scores}-{r.weights_over}-{r.groups}")
def test_experts_and_weights(routing: Routing) -> None:
    bias = BIAS if routing.has_choice_bias else None
    chosen, weights = choose_experts(LOGITS, PER_TOKEN, routing, bias)
    for row, logits in enumerate(LOGITS):
        found = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(_expected(logits, routing), rel=1e-4)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.scores}-{r.weights_over}-{r.groups}")
def test_devices_choose_alike(routing: Routing) -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    from shardcompute.backends.torch.routing import choose_experts as choose_on_device

    bias = torch.from_numpy(BIAS) if routing.has_choice_bias else None
    block = ExpertBlock(None, (), (), PER_TOKEN, Gate("silu"), routing, bias)
    chosen, weights = choose_on_device(torch.from_numpy(LOGITS), block)
    ours = choose_experts(LOGITS, PER_TOKEN, routing, BIAS if routing.has_choice_bias else None)
    np.testing.assert_array_equal(chosen.numpy(), ours[0])
    np.testing.assert_allclose(weights.numpy(), ours[1], rtol=1e-5)


def test_ties_go_to_the_lower_number() -> None:
    chosen, _ = choose_experts(np.zeros((1, COUNT), dtype=np.float32), 4, Routing(groups=3, chosen_groups=2))
    assert chosen.tolist() == [[0, 1, 2, 3]]

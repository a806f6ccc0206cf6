"""Experts on a CUDA device: chosen as torch chooses them, and multiplied as torch multiplies."""

from __future__ import annotations

from typing import Any

import pytest

from shardcompute.backends.ops import ExpertBlock, Gate
from shardcompute.core.expert_routing import Routing

torch = pytest.importorskip("torch")
from shardcompute.backends.torch.routing import choose_experts  # noqa: E402
from shardcompute.backends.torch.weights import DenseLinear  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, INNER = 128, 96


def _kernels() -> Any:
    from shardcompute.backends.torch.kernels.sparse import SparseKernels

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return SparseKernels({"PDL": False}, processors, torch.device("cuda"))


def _block(experts: int, each: int, routing: Routing, **parts: Any) -> ExpertBlock:
    return ExpertBlock(None, parts.get("gate_up", ()), parts.get("down", ()), each, Gate("silu"), routing)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(
    ("experts", "each", "routing"),
    [
        (5, 3, Routing(weights_over="all")),
        (128, 8, Routing()),
        (7, 1, Routing("sigmoid", "all", weighs_input=True)),
        (384, 8, Routing("sigmoid", scale=2.5)),
    ],
)
def test_experts_are_those_that_torch_chooses(experts: int, each: int, routing: Routing, rows: int) -> None:
    logits = torch.randn((rows, experts), generator=torch.Generator("cuda").manual_seed(rows), device="cuda")
    logits[0, 1] = logits[0, 3] = logits[0].max() + 1
    chosen, weights, groups = _kernels().choose(logits, _block(experts, each, routing))
    expected = choose_experts(logits, _block(experts, each, routing))
    assert torch.equal(chosen.long(), expected[0]), "ties go to the lower number"
    torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=1e-7)
    assert (groups is not None) == (rows == 1)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_products_of_experts_are_torch_s(rows: int) -> None:
    from shardcompute.backends.torch.kernels.sparse import gather_matrices

    chance = torch.Generator("cuda").manual_seed(rows)

    def weight(out: int, width: int) -> Any:
        values = torch.randn((out, width), generator=chance, device="cuda") * width**-0.5
        return DenseLinear(values.bfloat16(), None)

    gate_up = [weight(2 * INNER, HIDDEN) for _ in range(6)]
    down = [weight(HIDDEN, INNER) for _ in range(6)]
    block, kernels = _block(6, 2, Routing(), gate_up=gate_up, down=down), _kernels()
    x = torch.randn((rows, HIDDEN), generator=chance, device="cuda").bfloat16()
    logits = torch.randn((rows, 6), generator=chance, device="cuda")
    chosen, weights, groups = kernels.choose(logits, block)
    groups = groups or kernels.group(chosen, 6)
    maps = [gather_matrices(each, is_gated=is_gated) for each, is_gated in ((gate_up, True), (down, False))]
    y = kernels.multiply(x, maps[0], groups, per_row=2, gate=block.gate, dtype=torch.bfloat16)
    row = torch.zeros((1, HIDDEN), device="cuda", dtype=torch.bfloat16)
    joined = (weights, row) if rows == 1 else None
    y = kernels.multiply(y, maps[1], groups, per_row=1, gate=None, dtype=torch.float32, joined=joined)
    found = kernels.join(y, weights, torch.bfloat16).float()
    if rows == 1:
        assert torch.equal(row.float(), found), "a single row is added up in the same order"
    expected = torch.zeros((rows, HIDDEN), device="cuda")
    for row in range(rows):
        for expert, share in zip(chosen[row].tolist(), weights[row], strict=True):
            left, up = (x[row].float() @ gate_up[expert].weight.float().T).chunk(2)
            inner = torch.nn.functional.silu(left) * up
            expected[row] += share * (inner @ down[expert].weight.float().T)
    assert torch.linalg.norm(found - expected) <= 0.01 * torch.linalg.norm(expected)

"""What is trained is what will be run, row by drafted row; and gradients are those of the loss that is meant."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shardcompute.draft_training.draft_net import NetShape, load_net, new_net, pack  # noqa: E402
from shardcompute.draft_training.training_loop import Distillation  # noqa: E402
from shardcompute.models.draft_head import decode_draft_head, encode_draft_head  # noqa: E402
from shardcompute.models.spec import Layer, ModelSpec, Rope  # noqa: E402
from support.models.draft_heads import draft_by_the_book, random_draft_head  # noqa: E402

ROWS, EPS = 9, 1e-5
CPU = torch.device("cpu")
SPEC = ModelSpec(
    family="llama",
    layers=(Layer(),),
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=64,
    vocab_size=80,
    context_length=64,
    ropes=(Rope((1.0,)),),
    norm_eps=EPS,
    attention_scale=0.25,
)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_row_drafted_behind_others_is_computed_as_when_it_will_be_drafted(layers: int) -> None:
    weights = random_draft_head(SPEC, layers=layers)
    random = np.random.default_rng(3)
    states, embedded = (random.standard_normal((ROWS, SPEC.hidden)).astype(np.float32) * 2 for _ in range(2))
    head = random.standard_normal((len(weights.ids), SPEC.hidden)).astype(np.float32)
    net = load_net(weights, EPS, CPU)
    both = torch.from_numpy(np.stack([states, states[::-1].copy()]))
    words = torch.from_numpy(np.stack([embedded, embedded]))
    unrolled = list(net.unroll(both, words, 4))
    for first in (0, 3):
        known = states[: first + 1]
        for step, drafted in enumerate(unrolled):
            rows = first + step + 1
            wanted, logits = draft_by_the_book(weights, head, known, embedded[:rows], EPS)
            assert np.allclose(drafted[0, rows - 1], wanted[-1], atol=1e-4)
            found = net.normed(drafted[0, rows - 1]).numpy() @ head.T
            assert np.allclose(found, logits[-1], atol=1e-3)
            known = np.concatenate([known, wanted[-1:]])


def test_what_is_kept_is_what_was_trained() -> None:
    shape = NetShape(64, 2, 4, 2, 16, 128, 1e4, EPS)
    net = new_net(shape, torch.rand(64) + 0.5, torch.Generator().manual_seed(1))
    ids = np.arange(5, dtype=np.int32)
    again = load_net(decode_draft_head(encode_draft_head(pack(net, net.weights, ids)), 64), EPS, CPU)
    assert again.shape == shape
    assert again.weights.keys() == net.weights.keys()
    for name, kept in again.weights.items():
        assert torch.allclose(kept, net.weights[name].detach(), atol=0.02), name


def test_slopes_are_those_of_the_cross_entropy() -> None:
    random = torch.Generator().manual_seed(2)
    rows, head = (torch.randn(size, generator=random) for size in ((6, 8), (20, 8)))
    likely = torch.randn((6, 20), generator=random).softmax(-1)
    best, weight = likely.argmax(-1), torch.rand(6, generator=random)
    rows.requires_grad_()
    plain = torch.nn.functional.cross_entropy(rows @ head.T, likely, reduction="none")
    (wanted,) = torch.autograd.grad((plain * weight).sum(), rows)
    loss, found = Distillation.apply(rows, head, likely @ head, best, weight)
    (slopes,) = torch.autograd.grad(loss, rows)
    assert torch.allclose(loss, (plain * weight).sum(), atol=1e-5)
    assert torch.allclose(slopes, wanted, atol=1e-5)
    assert torch.allclose(found, (rows @ head.T).softmax(-1).gather(1, best[:, None])[:, 0], atol=1e-6)

"""Training loop and evaluation of a draft head (`models.draft_head` says what it computes).

Distillation: the network is unrolled over the true text, predicts from a row's state and the tokens that followed the
states of the next rows, and is taught by what the model's own head makes of them, compared with the model's choices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from shardcompute.backends.matrix import Float32
from shardcompute.draft_training.training_rows import TrainingRows

STEPS = 5
_FADE = 0.8
_STATE_SHARE = 0.1
_NOISE = 0.05
"""States that other backends compute, in other number formats, differ from those that are learned from."""
_WARM_UP = 0.03
_LAST_RATE = 0.01
_LONGEST_GRADIENT = 1.0
_EVALUATED_ROWS = 1024
_REPORT_S = 5.0


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Of the model itself: embeddings (scaled already), the head's rows of the known tokens, and which these are.

    `places` says for every token of the vocabulary which known one it is, or -1.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    places: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How long: so many passes over all rows, or so many seconds. `soft` is the share of the loss that compares with
    all that the model held likely; the rest compares with what it held likeliest."""

    batch: int
    soft: float = 0.0
    rate: float = 1e-3
    epochs: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well drafts behind held-out rows agree with the model, position by position.

    `agreement` is the share of right tokens where the text before was right; `acceptance` the share where all drafted
    before were right too; `accepted` the mean number of right ones before the first wrong one; `covered` the share of
    tokens that are known at all.
    """

    agreement: tuple[float, ...]
    acceptance: tuple[float, ...]
    accepted: float
    covered: float
    rows: int


class DraftHeadNet:
    """The weights, as float32 on the device."""

    def __init__(
        self, join: torch.Tensor, blocks: Sequence[ResidualBlock], norm: torch.Tensor, eps: float
    ) -> None:
        self.join = join
        self.blocks = tuple(blocks)
        self.norm = norm
        self._eps = eps

    def matrices(self) -> list[torch.Tensor]:
        return [self.join, *(matrix for block in self.blocks for matrix in (block.gate_up, block.down))]

    def vectors(self) -> list[torch.Tensor]:
        return [self.norm, *(block.norm for block in self.blocks)]

    def step(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The next row's normed state, from this row's and the token behind it."""
        z = torch.cat([_normed(states, self._eps), _normed(embedded, self._eps)], dim=-1)
        u = functional.linear(z, self.join).float()
        for block in self.blocks:
            gate, up = functional.linear(_normed(u, self._eps) * block.norm, block.gate_up).chunk(2, dim=-1)
            u = u + functional.linear(functional.silu(gate) * up, block.down).float()
        return _normed(u, self._eps) * self.norm


def new_net(
    dataset: TrainingRows, eps: float, *, blocks: int, width: int, random: torch.Generator
) -> DraftHeadNet:
    """Random, but for the scale of its result, which is that of the states."""
    hidden, device = dataset.states.shape[1], dataset.states.device

    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn((rows, columns), generator=random, device=device) * gain * columns**-0.5
        return values.requires_grad_()

    sample = dataset.states[: min(dataset.rows, 1 << 16)].float()
    ones = torch.ones(hidden, device=device)
    return DraftHeadNet(
        draw(hidden, 2 * hidden),
        [
            ResidualBlock(ones.clone().requires_grad_(), draw(2 * width, hidden), draw(hidden, width, 0.1))
            for _ in range(blocks)
        ],
        sample.square().mean(0).sqrt().requires_grad_(),
        eps,
    )


def load_net(
    join: Float32,
    blocks: Sequence[tuple[Float32, Float32, Float32]],
    norm: Float32,
    eps: float,
    device: torch.device,
) -> DraftHeadNet:
    """From finished weights (of a block: norm, gate and up, down), to evaluate what was kept."""

    def load(values: Float32) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return DraftHeadNet(
        load(join),
        [ResidualBlock(load(n), load(gate_up), load(down)) for n, gate_up, down in blocks],
        load(norm),
        eps,
    )


def train(
    net: DraftHeadNet,
    dataset: TrainingRows,
    starts: torch.Tensor,
    frozen: FrozenWeights,
    plan: LoopOptions,
    *,
    random: torch.Generator,
    report: Callable[[float, int, float], None],
) -> float:
    """Change the net's weights; tells `report` the share that is done, rows and mean loss now and then, and gives the
    last such loss."""
    device = starts.device
    groups = [
        {"params": net.matrices(), "weight_decay": 0.01},
        {"params": net.vectors(), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    weights = [*net.matrices(), *net.vectors()]
    started = said = time.monotonic()
    total, count, last, done = torch.zeros((), device=device), 0, math.nan, 0
    head = frozen.head.to(torch.bfloat16) if device.type == "cuda" else frozen.head
    for rows in _batches(starts, plan, random):
        share = _share_done(plan, done, len(starts), time.monotonic() - started)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * _rate_at(share)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = _loss(net, dataset, rows, frozen, head, plan.soft, random)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, _LONGEST_GRADIENT)
        optimizer.step()
        total, count, done = total + loss.detach(), count + 1, done + len(rows)
        if time.monotonic() - said >= _REPORT_S:
            last, total, count = float(total) / count, torch.zeros((), device=device), 0
            report(share, done, last)
            said = time.monotonic()
    last = float(total) / count if count else last
    report(1.0, done, last)
    return last


def evaluate(
    net: DraftHeadNet, dataset: TrainingRows, rows: torch.Tensor, frozen: FrozenWeights
) -> Evaluation:
    """Draft on from these rows, behind each of which `STEPS` more come."""
    with torch.no_grad():
        right = [_is_right(net, dataset, part, frozen) for part in rows.split(_EVALUATED_ROWS)]
    table = torch.cat(right).cpu().double()
    leading = table.cumprod(1)
    before = torch.cat([torch.ones((len(table), 1), dtype=table.dtype), leading], 1)
    shares = leading.sum(0) / before[:, :STEPS].sum(0).clamp_min(1)
    count = max(len(table), 1)
    known = (frozen.places[dataset.tokens[rows].long()] >= 0).cpu()
    return Evaluation(
        agreement=tuple((table.sum(0) / count).tolist()),
        acceptance=tuple(shares.tolist()),
        accepted=float(leading.sum() / count),
        covered=float(known.double().mean()) if len(rows) else 0.0,
        rows=len(rows),
    )


def _is_right(
    net: DraftHeadNet, dataset: TrainingRows, rows: torch.Tensor, frozen: FrozenWeights
) -> torch.Tensor:
    """`[rows, STEPS]`: a wrong token would change all behind it, but only those before the first wrong one count."""
    states, found = dataset.states[rows].float(), []
    for step in range(1, STEPS + 1):
        states = net.step(states, frozen.embedding[dataset.tokens[rows + step].long()].float())
        drafted = functional.linear(states, frozen.head.float()).argmax(-1)
        found.append(drafted == frozen.places[dataset.best[rows + step].long()])
    return torch.stack(found, dim=1)


def _loss(
    net: DraftHeadNet,
    dataset: TrainingRows,
    rows: torch.Tensor,
    frozen: FrozenWeights,
    head: torch.Tensor,
    soft: float,
    random: torch.Generator,
) -> torch.Tensor:
    left, states = dataset.left[rows], dataset.states[rows].float()
    noise = torch.randn(states.shape, generator=random, device=states.device)
    states = states + _NOISE * states.square().mean(-1, keepdim=True).sqrt() * noise
    loss = torch.zeros((), device=rows.device)
    scale = sum(_FADE**step for step in range(STEPS))
    for step in range(1, STEPS + 1):
        there = (rows + step).clamp_max(dataset.rows - 1)
        is_there = left >= step
        states = net.step(states, frozen.embedding[dataset.tokens[there].long()].float())
        truth = dataset.states[there].float()
        wanted = frozen.places[dataset.best[there].long()]
        is_known = is_there & (wanted >= 0)
        logits = functional.linear(states, head).float()
        said = (1 - soft) * functional.cross_entropy(logits, wanted.clamp_min(0), reduction="none")
        if soft:
            with torch.no_grad():
                likely = functional.linear(truth, head).float().softmax(-1)
            said = said + soft * functional.cross_entropy(logits, likely, reduction="none")
        apart = functional.smooth_l1_loss(states, truth, reduction="none").mean(-1)
        step_loss = _mean_where(said, is_known) + _STATE_SHARE * _mean_where(apart, is_there)
        loss = loss + _FADE ** (step - 1) / scale * step_loss
    return loss


def _mean_where(values: torch.Tensor, is_counted: torch.Tensor) -> torch.Tensor:
    """Zero where nothing counts."""
    return (values * is_counted).sum() / is_counted.sum().clamp_min(1)


def _batches(starts: torch.Tensor, plan: LoopOptions, random: torch.Generator) -> Iterator[torch.Tensor]:
    """For ever: all rows in another order each time. The rows left at the end of a pass join no batch."""
    batch = min(plan.batch, len(starts))
    while True:
        order = torch.randperm(len(starts), generator=random, device=starts.device)
        for at in range(0, len(starts) - batch + 1, batch):
            yield starts[order[at : at + batch]]


def _share_done(plan: LoopOptions, rows: int, all_rows: int, elapsed_s: float) -> float:
    shares = [0.0]
    if plan.epochs is not None:
        shares.append(rows / max(1.0, plan.epochs * all_rows))
    if plan.seconds is not None:
        shares.append(elapsed_s / max(1e-3, plan.seconds))
    return max(shares)


def _rate_at(share: float) -> float:
    """Up quickly, then down like a cosine."""
    warm = min(1.0, max(share, 1e-3) / _WARM_UP)
    return warm * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share)))


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

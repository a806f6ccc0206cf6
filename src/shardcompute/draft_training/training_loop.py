"""Training loop of a draft head: distillation, unrolled over what it drafts (`draft_net` says how).

What the model's head makes of the true state of a row is what the draft head is to find before that row is computed. A
row drafted behind others counts as much as those before it are likely to be right: behind a wrong one nothing counts.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from shardcompute.draft_training.dialogue import GIVEN
from shardcompute.draft_training.draft_net import DraftNet, rms, shift
from shardcompute.draft_training.training_rows import SequenceBatch, Span, TrainingRows

STEPS = 5
_FADE = 0.9
_LEAST_WEIGHT = 0.1
_GIVEN_SHARE = 0.15
"""Of the rows that were given, and only read, so many are learned from as well."""
_STATE_SHARE = 0.1
_STATE_UNTIL = 0.3
"""In the first part of a run a drafted state is also compared with the true one: that shows the way, no more."""
_NOISE = 0.05
"""States that other backends compute, in other number formats, differ from those that are learned from."""
_WARM_UP = 0.03
_LAST_RATE = 0.01
_LONGEST_GRADIENT = 1.0
_SCORED_ROWS = 8192
_AVERAGED = 0.998
_REPORT_S = 5.0
_SAVE_S = 60.0


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Of the model itself: embeddings of the known tokens (scaled already) behind a row of zeros, the head's rows of
    these tokens, and which they are: `places` says for every token which known one it is, or -1. `finish` is the
    model's last norm, of rows with a mean square of 1; `scale` and `softcap` are what it does to logits."""

    embedding: torch.Tensor
    head: torch.Tensor
    places: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor]
    scale: float = 1.0
    softcap: float | None = None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Zeros for tokens that are not known."""
        return self.embedding[self.places[tokens] + 1]


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How long: so many passes over all rows, or so many seconds; `rows` in a step. `soft` is the share of the loss
    that compares with all that the model held likely; the rest compares with what it held likeliest."""

    rows: int
    soft: float = 0.5
    rate: float = 1e-3
    epochs: float | None = None
    seconds: float | None = None
    steps: int = STEPS


@dataclass(frozen=True, slots=True)
class LoopReport:
    """Where a run is; `likely` is what is given to the right token, by drafted position."""

    share: float
    rows: int
    loss: float
    likely: tuple[float, ...]


Report = Callable[[LoopReport], None]
Save = Callable[[float, dict[str, torch.Tensor]], None]
"""Gets the share that is done and the weights so far."""


class TrainedNet(Protocol):
    """What a loop fits: its weights by name, as float32 on the device, and which of them decay."""

    @property
    def weights(self) -> dict[str, torch.Tensor]: ...

    def matrices(self) -> list[torch.Tensor]: ...

    def vectors(self) -> list[torch.Tensor]: ...


class DistillationLoop(ABC):
    """One run over these spans: steps of an optimizer, reports, weights that are left. What is lost by a step is for
    whoever inherits to say. `weights` are the mean of those of the last steps, which is what is kept."""

    def __init__(
        self,
        net: TrainedNet,
        dataset: TrainingRows,
        frozen: FrozenWeights,
        options: LoopOptions,
        *,
        seed: int,
    ) -> None:
        self._weights = net.weights
        self._dataset = dataset
        self._frozen = frozen
        self._options = options
        self._device = dataset.states.device
        self._random = torch.Generator(self._device).manual_seed(seed)
        self._order = np.random.default_rng(seed)
        self._is_cuda = self._device.type == "cuda"
        self._head = frozen.head.to(torch.bfloat16) if self._is_cuda else frozen.head
        self._parameters = [*net.matrices(), *net.vectors()]
        groups = [
            {"params": net.matrices(), "weight_decay": 0.01},
            {"params": net.vectors(), "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=options.rate, betas=(0.9, 0.95), fused=self._is_cuda or None
        )
        self.weights = {name: each.detach().clone() for name, each in net.weights.items()}
        self._steps = 0

    def run(self, spans: Sequence[Span], report: Report, save: Save | None = None) -> LoopReport:
        options, started = self._options, time.monotonic()
        all_rows = sum(span.stop - span.start for span in spans)
        rows, said, saved = 0, started, started
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        last = LoopReport(0.0, 0, math.nan, ())
        for batch in self._batches(spans):
            share = _share_done(options, rows, all_rows, time.monotonic() - started)
            if share >= 1:
                break
            sums.append(self._step(batch, share))
            rows += int(batch.is_there.numel()) if self._is_cuda else int(batch.is_there.sum())
            now = time.monotonic()
            if now - said >= _REPORT_S:
                last, said, sums = _summary(share, rows, sums), now, []
                report(last)
            if save is not None and now - saved >= _SAVE_S:
                save(share, self.weights)
                saved = time.monotonic()
        last = _summary(1.0, rows, sums) if sums else replace(last, share=1.0)
        report(last)
        return last

    def _batches(self, spans: Sequence[Span]) -> Iterator[SequenceBatch]:
        while True:
            yield from self._dataset.batches(spans, self._options.rows, self._order)

    def _step(self, batch: SequenceBatch, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.rate * _rate_at(share)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_cuda):
            loss, likely = self.loss(batch, share)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, _LONGEST_GRADIENT)
        self._optimizer.step()
        self._steps += 1
        kept = min(_AVERAGED, self._steps / (10 + self._steps))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.weights.values()), list(self._weights.values()), 1 - kept)
        return loss.detach(), likely

    @abstractmethod
    def loss(self, batch: SequenceBatch, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Also what the right tokens were given, by drafted position. `share` of the run is done."""


class TrainingLoop(DistillationLoop):
    """Of a draft head."""

    def __init__(
        self, net: DraftNet, dataset: TrainingRows, frozen: FrozenWeights, options: LoopOptions, *, seed: int
    ) -> None:
        super().__init__(net, dataset, frozen, options, seed=seed)
        self._net = net

    def loss(self, batch: SequenceBatch, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        options, frozen = self._options, self._frozen
        chosen = self._choose_rows(batch)
        following = torch.cat([batch.states[:, 1:], batch.states[:, -1:]], dim=1).flatten(0, 1)
        truth = following[chosen].float()
        target, best = teach(frozen, self._head, truth, options.soft)
        states = batch.states.float()
        noise = torch.randn(states.shape, generator=self._random, device=self._device)
        drafted = self._net.unroll(states + _NOISE * noise, frozen.embed(batch.following), options.steps)
        alive = torch.ones(batch.is_there.shape, device=self._device)
        places = chosen % batch.is_there.shape[1]
        loss, likely = torch.zeros((), device=self._device), []
        share_of_states = _STATE_SHARE * max(0.0, 1 - share / _STATE_UNTIL)
        for step, u in enumerate(drafted):
            y = u.flatten(0, 1)[chosen]
            is_counted = (places >= step).float()
            weight = is_counted * _FADE**step
            weight = weight * (_LEAST_WEIGHT + (1 - _LEAST_WEIGHT) * alive.flatten()[chosen])
            said, found = Distillation.apply(
                self._net.normed(y).to(self._head.dtype), self._head, target, best, weight
            )
            loss = loss + said / len(chosen)
            if share_of_states:
                apart = functional.smooth_l1_loss(rms(y, self._net.shape.eps), truth, reduction="none").mean(
                    -1
                )
                loss = loss + share_of_states * (apart * weight).mean()
            likely.append((found * is_counted).sum() / is_counted.sum().clamp_min(1))
            survived = torch.ones_like(alive).flatten().index_copy(0, chosen, found)
            alive = shift((alive * survived.view_as(alive))[..., None], 1)[..., 0]
        return loss / sum(_FADE**step for step in range(options.steps)), torch.stack(likely)

    def _choose_rows(self, batch: SequenceBatch) -> torch.Tensor:
        """Those behind which the model chose, and a few of the others."""
        origins = batch.origins[:, [-1]].expand(-1, 2)
        predicted = torch.cat([batch.origins[:, 2:], origins], dim=1)
        draws = torch.rand(predicted.shape, generator=self._random, device=self._device)
        is_chosen = batch.is_there & ((predicted != GIVEN) | (draws < _GIVEN_SHARE))
        return is_chosen.flatten().nonzero()[:, 0]


def teach(
    frozen: FrozenWeights, head: torch.Tensor, truth: torch.Tensor, soft: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean head row under what the model held likely, and the likeliest known token, for rows of true states."""
    means, best = [], []
    with torch.no_grad():
        for part in truth.split(_SCORED_ROWS):
            logits = functional.linear(frozen.finish(part).to(head.dtype) * frozen.scale, head)
            if frozen.softcap is not None:
                logits = torch.tanh(logits / frozen.softcap) * frozen.softcap
            top = logits.argmax(-1)
            mean = head[top].float()
            if soft:
                likely = torch.softmax(logits, dim=-1, dtype=logits.dtype)
                mean = (1 - soft) * mean + soft * (likely @ head).float()
            means.append(mean)
            best.append(top)
    return torch.cat(means), torch.cat(best)


class Distillation(torch.autograd.Function):  # type: ignore[misc]
    """The weighted sum of cross-entropies of rows with what they are taught, and what each gives to its best token.

    The head learns nothing, so a row's gradient is the difference of two means of head rows: that is found on the way,
    and logits, of which there are very many, are never kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        head: torch.Tensor,
        target: torch.Tensor,
        best: torch.Tensor,
        weight: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slopes, found = torch.empty_like(rows), torch.empty_like(weight)
        loss = torch.zeros((), device=rows.device)
        for at in range(0, len(rows), _SCORED_ROWS):
            here = slice(at, at + _SCORED_ROWS)
            logits = functional.linear(rows[here], head)
            wanted = logits.gather(1, best[here, None])[:, 0].float()
            likely = torch.softmax(logits, dim=-1, dtype=logits.dtype)
            found[here] = likely.gather(1, best[here, None])[:, 0]
            total = wanted - found[here].clamp_min(1e-30).log()
            loss += (weight[here] * (total - (target[here] * rows[here].float()).sum(-1))).sum()
            slopes[here] = ((likely @ head).float() - target[here]) * weight[here, None]
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(found)
        return loss, found

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[torch.Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return kept * slopes[0].to(kept.dtype), None, None, None, None


def _summary(share: float, rows: int, sums: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> LoopReport:
    losses, likely = zip(*sums, strict=True)
    return LoopReport(
        share, rows, float(torch.stack(losses).mean()), tuple(torch.stack(likely).mean(0).tolist())
    )


def _share_done(options: LoopOptions, rows: int, all_rows: int, elapsed_s: float) -> float:
    shares = [0.0]
    if options.epochs is not None:
        shares.append(rows / max(1.0, options.epochs * all_rows))
    if options.seconds is not None:
        shares.append(elapsed_s / max(1e-3, options.seconds))
    return max(shares)


def _rate_at(share: float) -> float:
    """Up quickly, then down like a cosine."""
    warm = min(1.0, max(share, 1e-3) / _WARM_UP)
    return warm * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share)))

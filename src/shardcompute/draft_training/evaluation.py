"""Evaluation of a draft head on conversations that it has not learned from: how many drafted tokens are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from shardcompute.draft_training.dialogue import GREEDY
from shardcompute.draft_training.draft_net import DraftNet
from shardcompute.draft_training.questions import HELD_OUT
from shardcompute.draft_training.training_loop import FrozenWeights
from shardcompute.draft_training.training_rows import SequenceBatch, Span, TrainingRows

DRAFTED = 7
"""Tokens that are drafted behind every row."""
SHOWN = (3, 5, 7)
_SCORED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well drafts agree with what the model said greedily, by position behind a row.

    `acceptance` is the share of right tokens where all drafted before were right too; `covered` the share of tokens
    that are known at all; `rows` how many rows were drafted behind.
    """

    acceptance: tuple[float, ...]
    covered: float
    rows: int

    def tokens_per_round(self, drafted: int) -> float:
        """What a round gives with so many drafted: those before the first wrong one, and the model's own."""
        return 1 + float(np.cumprod(self.acceptance[:drafted]).sum())

    def describe(self) -> str:
        shares = "  ".join(f"{share:.1%}" for share in self.acceptance)
        rounds = ", ".join(f"{self.tokens_per_round(each):.2f} with {each}" for each in SHOWN)
        return f"accepted {shares}; tokens per round {rounds} drafted ({self.rows} rows)"


@dataclass(frozen=True, slots=True)
class Examination:
    """Evaluations of all that was held out of what is learned (`seen`), of kinds of text that are never learned
    (`unseen`), and of each kind."""

    seen: Evaluation
    unseen: Evaluation
    kinds: Mapping[str, Evaluation]

    @property
    def score(self) -> float:
        """What is compared: tokens per round with five drafted, seen and unseen alike."""
        evaluations = [each for each in (self.seen, self.unseen) if each.rows]
        return sum(each.tokens_per_round(5) for each in evaluations) / max(1, len(evaluations))

    def describe(self) -> list[str]:
        lines = [f"held-out text: {self.seen.describe()}"]
        if self.unseen.rows:
            lines.append(f"unseen kinds:  {self.unseen.describe()}")
        return lines

    def describe_kinds(self) -> list[str]:
        return [f"  {kind:12} {each.describe()}" for kind, each in sorted(self.kinds.items())]


def examine(
    net: DraftNet, dataset: TrainingRows, spans: Sequence[Span], frozen: FrozenWeights, max_rows: int
) -> Examination:
    """Draft behind every row of these spans where the model goes on greedily for long enough."""
    tables: dict[str, list[NDArray[np.bool_]]] = {}
    known: dict[str, list[float]] = {}
    for kind in sorted({span.kind for span in spans}):
        of_kind = [span for span in spans if span.kind == kind]
        for batch in dataset.batches(of_kind, max_rows):
            with torch.no_grad():
                right, is_known = find_right(net, batch, frozen)
            tables.setdefault(kind, []).append(right)
            known.setdefault(kind, []).append(is_known)
    return sum_up_kinds(tables, known)


def sum_up_kinds(
    tables: Mapping[str, Sequence[NDArray[np.bool_]]], known: Mapping[str, Sequence[float]]
) -> Examination:
    """Of tables `[rows, DRAFTED]` that say which drafted tokens are right, and shares of tokens that are known."""
    kinds = {kind: _sum_up(np.concatenate(parts), known[kind]) for kind, parts in tables.items()}
    joined = [
        _join([kinds[kind] for kind in kinds if (kind in HELD_OUT) is is_unseen])
        for is_unseen in (False, True)
    ]
    return Examination(joined[0], joined[1], {kind: each for kind, each in kinds.items() if each.rows})


def find_right(net: DraftNet, batch: SequenceBatch, frozen: FrozenWeights) -> tuple[NDArray[np.bool_], float]:
    """`[rows that count, DRAFTED]`: whether each drafted token is right; and the share of tokens that are known. Behind
    a wrong draft the true text goes on: only those before the first wrong one count."""
    places = frozen.places[batch.tokens]
    wanted = torch.full((*batch.tokens.shape,), -1, device=places.device)
    wanted[:, :-2] = places[:, 2:]
    right = []
    for step, u in enumerate(net.unroll(batch.states.float(), frozen.embed(batch.following), DRAFTED)):
        best = [
            functional.linear(part, frozen.head).argmax(-1)
            for part in net.normed(u).flatten(0, 1).split(_SCORED_ROWS)
        ]
        found = (torch.cat(best).view(places.shape) == wanted) & (wanted >= 0)
        right.append(functional.pad(found[:, step:], (0, step)))
    return torch.stack(right, dim=-1)[greedy_rows(batch)].cpu().numpy(), _known_share(batch, places)


def greedy_rows(batch: SequenceBatch) -> torch.Tensor:
    """Rows behind which `DRAFTED` tokens, from the second on, are the model's first choice."""
    rows = batch.tokens.shape[1]
    # A row is there where one follows it; so this counts tokens, up to the last.
    is_token = torch.cat([torch.ones_like(batch.is_there[:, :1]), batch.is_there[:, :-1]], dim=1)
    is_greedy = is_token & (batch.origins == GREEDY)
    counted = torch.zeros_like(is_greedy)
    if rows > DRAFTED + 1:
        windows = is_greedy[:, 2:].unfold(1, DRAFTED, 1).all(-1)
        counted[:, : windows.shape[1]] = windows
    return counted


def _known_share(batch: SequenceBatch, places: torch.Tensor) -> float:
    known = (places >= 0) & batch.is_there
    return float(known.sum() / batch.is_there.sum().clamp_min(1))


def _sum_up(table: NDArray[np.bool_], known: Sequence[float]) -> Evaluation:
    leading = np.cumprod(table.astype(np.float64), axis=1)
    before = np.concatenate([np.ones((len(table), 1)), leading[:, :-1]], axis=1)
    shares = leading.sum(0) / np.maximum(before.sum(0), 1)
    return Evaluation(tuple(shares.tolist()), float(np.mean(known)) if len(known) else 0.0, len(table))


def _join(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Of all their rows together."""
    rows = sum(each.rows for each in evaluations)
    if not rows:
        return Evaluation((0.0,) * DRAFTED, 0.0, 0)
    leading = np.sum([np.cumprod(each.acceptance) * each.rows for each in evaluations], axis=0)
    before = np.concatenate([[rows], leading[:-1]])
    covered = sum(each.covered * each.rows for each in evaluations) / rows
    return Evaluation(tuple((leading / np.maximum(before, 1)).tolist()), covered, rows)

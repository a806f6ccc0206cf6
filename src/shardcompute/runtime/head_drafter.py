"""Head drafts: what follows from a row's final state besides the token that was picked from it.

A last stage that has a model's draft head drafts on from the last row that counts: one step of the network for each
token, for all sessions of a frame together. Drafts go back to the driver along with the picks, and come round again in
the next frame. Nothing is remembered between steps, so there is nothing to lose or to roll back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardcompute.backends.executor import Executor
from shardcompute.backends.matrix import Array, Float32, StoredRows
from shardcompute.core.batch import Segment
from shardcompute.core.errors import ShardComputeError
from shardcompute.core.steps import Draft, Picked, SessionRows
from shardcompute.decoding.drafting import grade_of, likelihood_of
from shardcompute.runtime.tail import Tail

_GRADE_BOUNDS = (0.35, 0.6, 0.85)
"""Of the likelihood of the first token; from each on, the grade is one higher."""


@dataclass(frozen=True, slots=True)
class HeadDraftLimits:
    """`most` tokens for a session at a time. A token with which the whole draft is less likely than `confidence` to be
    right, in the network's own eyes, is not sent any more."""

    context_length: int
    max_rows: int = 64
    most: int = 16
    confidence: float = 0.04


@dataclass(slots=True)
class _Growth:
    """The draft of one session: `token` stands at `position`, and `state` is that of the row before it."""

    part: SessionRows
    position: int
    token: int
    state: Float32
    most: int
    ids: list[int] = field(default_factory=list)
    likelihood: float = 1.0
    first: float = 0.0


class HeadDrafter:
    """Drafts for the sessions of one last stage.

    `network` runs a `DraftHeadNetwork`; its logits are those of the tokens `ids`, whose rows of the model's embedding
    (as its first layer would see them, but for `embedding_scale`) are `embedding`.
    """

    def __init__(
        self,
        network: Executor,
        ids: Array,
        embedding: StoredRows,
        limits: HeadDraftLimits,
        *,
        vocab_size: int,
        embedding_scale: float = 1.0,
    ) -> None:
        self._network = network
        self._ids = ids
        self._places = {int(token): place for place, token in enumerate(ids)}
        self._embedding = embedding
        self._scale = np.float32(embedding_scale)
        self._limits = limits
        self._vocab_size = vocab_size

    def draft(
        self, work: Sequence[SessionRows], picked: Sequence[Picked], states: Array, tail: Tail
    ) -> list[Draft]:
        """Drafts for the work that asks for some. `picked` and `states` are one for each logit row, as `tail` gave
        them; it is asked to pick drafted tokens too, and then knows what it knew before."""
        growing = self._begin(work, picked, states)
        grown: list[_Growth] = growing
        while growing:
            self._grow(growing, tail)
            growing = [each for each in growing if len(each.ids) < each.most]
        for each in grown:
            tail.follow(each.part)
        return [_draft_of(each) for each in grown if each.ids]

    def close(self) -> None:
        self._network.close()
        self._embedding.close()

    def _begin(self, work: Sequence[SessionRows], picked: Sequence[Picked], states: Array) -> list[_Growth]:
        begun: list[_Growth] = []
        row = 0
        for part in work:
            first, row = row, row + part.logit_rows
            if (
                not (part.head_draft_tokens and part.logit_rows)
                or part.targets
                or len(begun) == self._limits.max_rows
            ):
                continue
            last = first + _accepted(part, picked[first:row])
            choice, position = picked[last].choice, picked[last].position + 1
            most = min(part.head_draft_tokens, self._limits.most, self._limits.context_length - position - 1)
            if most > 0:
                state = np.array(states[last], dtype=np.float32)
                begun.append(_Growth(part, position, choice.id, state, most))
        return begun

    def _grow(self, growing: list[_Growth], tail: Tail) -> None:
        """One more token for each; those that get none are at their end."""
        known = [each for each in growing if each.token in self._places]
        for each in growing:
            if each.token not in self._places:
                each.most = len(each.ids)
        if not known:
            return
        logits, states = self._step(known)
        for each, row, state in zip(known, logits, states, strict=True):
            token = self._pick(each, row, tail)
            likelihood = each.likelihood * self._likelihood(row, token)
            if token is None or likelihood < self._limits.confidence:
                each.most = len(each.ids)
                continue
            each.first = each.first or likelihood
            each.likelihood = likelihood
            each.ids.append(token)
            each.position, each.token, each.state = each.position + 1, token, state

    def _step(self, growing: Sequence[_Growth]) -> tuple[Float32, Float32]:
        places = np.array([self._places[each.token] for each in growing])
        embedded = self._embedding.read(places).to_dense() * self._scale
        rows = np.concatenate([np.stack([each.state for each in growing]), embedded], axis=1)
        segments = [Segment(index, 0, 1, 1) for index in range(len(growing))]
        logits = self._network.step(segments, rows, keeps_hidden=True)
        return np.array(logits, dtype=np.float32), np.array(self._network.hidden_rows(), dtype=np.float32)

    def _pick(self, growth: _Growth, logits: Float32, tail: Tail) -> int | None:
        """What would be picked from these logits; None where nothing known is allowed."""
        # Tokens that are not known cannot be drafted.
        spread = np.full((1, self._vocab_size), -np.inf, dtype=np.float32)
        spread[0, self._ids] = logits
        try:
            work = SessionRows(growth.part.session, growth.position, (growth.token,), 1)
            return tail.pick([work], spread)[0].choice.id
        except ShardComputeError:
            return None

    def _likelihood(self, logits: Float32, token: int | None) -> float:
        place = None if token is None else self._places.get(token)
        return 0.0 if place is None else likelihood_of(place, logits)


def _accepted(part: SessionRows, picked: Sequence[Picked]) -> int:
    """How many of the drafts among the part's rows are what was picked in their place."""
    drafts = part.ids[len(part.ids) - part.logit_rows + 1 :]
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == picked[accepted].choice.id:
        accepted += 1
    return accepted


def _draft_of(growth: _Growth) -> Draft:
    start = growth.position - len(growth.ids) + 1
    grade = grade_of(growth.first, _GRADE_BOUNDS)
    return Draft(growth.part.session, start, tuple(growth.ids), grade)

"""Drafts born on the first stage: what its own layers already make of the next token.

A stage that holds the model's norm and head besides its layers can guess: it takes the hidden state of a session's
last row after its own layers, picks a token from that as the tail will from the whole model's, computes that token's
row, and so on. All rows then travel on as one segment, and the tail judges the guesses as it judges any draft: one
that is not its own pick is void. So guesses can save rounds and can never change an answer, and whatever keeps one
from being made only ends the guessing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardcompute.backends.executor import Executor
from shardcompute.backends.matrix import Array, Float32
from shardcompute.core.batch import Segment
from shardcompute.core.errors import ShardComputeError
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.decoding.drafting import likelihood_of
from shardcompute.models.vocabulary import Vocabulary
from shardcompute.runtime.lens import Lens
from shardcompute.runtime.tail import Tail

Compute = Callable[[Sequence[Segment], Array], Array]


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """`max_rows` and `max_wanted` bound a step of the stages behind, drafts included; `most` the drafts of one session
    in one step. A guess that is less likely than `confidence` in the drafter's own eyes ends its session's drafting."""

    context_length: int
    max_rows: int = 512
    max_wanted: int = 64
    most: int = 16
    confidence: float = 0.1


@dataclass(slots=True)
class _SelfGrowth:
    """The drafts of one session in one step; `token` is the last one computed, at `position`, and `hidden` its row."""

    session: int
    position: int
    token: int
    hidden: Float32
    most: int
    ids: list[int] = field(default_factory=list)
    rows: list[Float32] = field(default_factory=list)

    def extend(self, token: int, row: Float32) -> None:
        self.position += 1
        self.token, self.hidden = token, row
        self.ids.append(token)
        self.rows.append(row)


class SelfDrafter:
    """Drafts for the sessions of one first stage.

    `head` makes logits of hidden states (see `shard.build_head`), of normed ones where a `lens` guesses these first.
    `vocabulary` as for a `Tail`.
    """

    def __init__(
        self,
        head: Executor,
        limits: DraftLimits,
        *,
        lens: Lens | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        self._head = head
        self._limits = limits
        self._lens = lens
        self._tail = Tail(vocabulary)

    def follow(self, work: Sequence[SessionRows], openings: Iterable[Opening]) -> None:
        """Rows that the stage has computed: their sessions' tokens are remembered, for penalties."""
        for opening in openings:
            self._open(opening)
        for part in work:
            if part.start > self._tail.length(part.session):
                self._tail.close(part.session)  # it began before this drafter did
            elif self._tail.has(part.session):
                self._tail.follow(part)

    def extend(
        self, work: Sequence[SessionRows], rows: Array, compute: Compute
    ) -> tuple[Sequence[SessionRows], Array]:
        """Followed work with the drafts that it asks for, and its activations with theirs. `rows` may be the
        executor's own, which `compute` overwrites."""
        if not any(part.drafts for part in work):
            return work, rows
        kept = np.array(rows, dtype=np.float32)
        grown = self._begin(work, kept)
        self._grow(list(grown.values()), work, compute)
        longer: list[SessionRows] = []
        pieces: list[Float32] = []
        first = 0
        for part in work:
            pieces.append(kept[first : first + len(part.ids)])
            first += len(part.ids)
            ids = tuple(grown[part.session].ids) if part.session in grown else ()
            if ids:
                pieces += [row[None] for row in grown[part.session].rows]
                self._tail.follow(SessionRows(part.session, part.segment.stop, ids))
            longer.append(
                replace(part, ids=part.ids + ids, wanted=part.wanted + len(ids), drafts=0, drafted=len(ids))
            )
        return longer, np.concatenate(pieces)

    def _open(self, opening: Opening) -> None:
        sampling = replace(opening.sampling, logprobs=None, wants_hidden=False)
        try:
            self._tail.open([replace(opening, sampling=sampling)])
        except ShardComputeError:
            # The last stage says what is wrong with it.
            self._tail.close(opening.session)

    def close_session(self, session: int) -> None:
        self._tail.close(session)

    def close(self) -> None:
        self._head.close()

    def _begin(self, work: Sequence[SessionRows], rows: Float32) -> dict[int, _SelfGrowth]:
        """The sessions to draft for, each from its last row. Where nothing is picked there is nothing to guess."""
        begun: dict[int, _SelfGrowth] = {}
        end = 0
        for part in work:
            end += len(part.ids)
            stop = part.segment.stop
            most = min(part.drafts, self._limits.most, self._limits.context_length - stop)
            if most > 0 and part.wanted and not part.targets and self._tail.has(part.session):
                begun[part.session] = _SelfGrowth(part.session, stop - 1, part.ids[-1], rows[end - 1], most)
        return begun

    def _grow(self, growing: list[_SelfGrowth], work: Sequence[SessionRows], compute: Compute) -> None:
        limits = self._limits
        rows = sum(len(part.ids) for part in work)
        wanted = sum(part.wanted for part in work)
        room = min(limits.max_rows - rows, limits.max_wanted - wanted)
        try:
            while growing := growing[: max(room, 0)]:
                guesses = self._guess(growing)
                if not guesses:
                    return
                room -= len(guesses)
                segments = [Segment(growth.session, growth.position + 1, 1) for growth, _ in guesses]
                out = compute(segments, np.array([token for _, token in guesses], dtype=np.int64))
                for (growth, token), row in zip(guesses, np.array(out, dtype=np.float32), strict=True):
                    growth.extend(token, row)
                growing = [growth for growth, _ in guesses if len(growth.ids) < growth.most]
        except ShardComputeError:
            # Full memory, say: what was drafted so far goes on, and the step is as good as without drafts.
            return

    def _guess(self, growing: Sequence[_SelfGrowth]) -> list[tuple[_SelfGrowth, int]]:
        """The token after each session's last row, where the drafter has faith enough in it."""
        hidden = np.stack([growth.hidden for growth in growing])
        if self._lens is not None:
            hidden = self._lens.apply(hidden)
        logits = self._head.step([Segment(row, 0, 1, 1) for row in range(len(growing))], hidden)
        last = [SessionRows(growth.session, growth.position, (growth.token,), 1) for growth in growing]
        tokens = [picked.choice.id for picked in self._tail.pick(last, logits)]
        return [
            (growth, token)
            for growth, token, row in zip(growing, tokens, logits, strict=True)
            if likelihood_of(token, row) >= self._limits.confidence
        ]

"""Head drafts: what follows from a row's final state besides the token that was picked from it.

A last stage that has a model's draft head shows it every row that it has computed (`remember`), and drafts on from the
last row that counts: one step of the network for each token, for all sessions of a frame together. Drafts go back to
the driver along with the picks, and come round again in the next frame. Each drafted token is chosen from what the
network holds likely and what the session's own text went on with, mixed (`decoding.copying.mixture`).

The network's own keys and values are a session's memory. They follow the stage's: rows that are computed again are
written again, sessions that share a prefix share its memory, and drafted rows are overwritten by what comes true.
Whatever is missing of it only makes drafts worse: rows that were not shown are left out, and where memory is short the
session that was quiet longest begins anew. The tokens to copy from are the tail's; of them only an index is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardcompute.backends.executor import Executor
from shardcompute.backends.matrix import Array, Float32, StoredRows
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CapacityError, RowGapError, ShardComputeError
from shardcompute.core.steps import Draft, Picked, SessionRows
from shardcompute.decoding.copying.mixture import CopiedText, MixedLogits
from shardcompute.decoding.drafting import grade_of
from shardcompute.runtime.tail import Tail

_GRADE_BOUNDS = (0.35, 0.6, 0.85)
"""Of the likelihood of the first token; from each on, the grade is one higher."""
_DRAWN_LEAST, _DRAWN_MORE = 0.3, 0.62
"""How often a drafted token is right that was drawn with the noise of the real draw: so often where it was nearly
impossible, so much more often where it was certain, by the square of its likelihood. Measured at temperature 0.8."""
_WAITING_ROWS = 32
"""So many rows of a session may wait for the next draft, whose first step takes them along."""
_INDEXED_TOKENS = 1 << 17
"""So many tokens of all sessions are indexed, at some hundred bytes each; those of the session at work in any case."""


@dataclass(frozen=True, slots=True)
class HeadDraftLimits:
    """`most` tokens for a session at a time, for `max_rows` sessions; the network takes `step_rows` at once. A token
    with which the whole draft is less likely than `confidence` to be right, or than `drawn_confidence` where tokens are
    drawn, is not sent any more."""

    context_length: int
    max_rows: int = 64
    most: int = 16
    confidence: float = 0.04
    drawn_confidence: float = 0.08
    step_rows: int = 512


@dataclass(frozen=True, slots=True)
class _Row:
    """What the network is shown of a row: its final state, and the token behind it."""

    position: int
    token: int
    state: Float32


@dataclass(frozen=True, slots=True)
class _LastRow:
    """The last true row of a session; `token` is the one behind it, None: nobody knows yet."""

    position: int
    token: int | None
    state: Float32


@dataclass(slots=True)
class _SessionMemory:
    """`held` are the positions of the rows whose keys and values the network holds, `waiting` the rows behind them that
    it was not shown yet."""

    held: list[int] = field(default_factory=list)
    waiting: list[_Row] = field(default_factory=list)
    last: _LastRow | None = None

    def truncate(self, position: int) -> None:
        """Forget the rows from `position` on."""
        del self.held[bisect_left(self.held, position) :]
        while self.waiting and self.waiting[-1].position >= position:
            self.waiting.pop()

    def take(
        self, start: int, first: int, states: Array, tokens: Sequence[int], following: int | None
    ) -> None:
        """Rows from `start` on that begin with token `first`, with the tokens behind all but the last of them, and
        behind that one where it is known."""
        self.truncate(start)
        last = self.last
        if last is not None and last.position == start - 1 and last.token != first:
            # It was shown with another token than came, or waited for one.
            self.truncate(last.position)
            self.waiting.append(_Row(last.position, first, last.state))
        rows = zip(range(start, start + len(tokens)), tokens, states, strict=False)
        self.waiting += [_Row(position, token, _copied(state)) for position, token, state in rows]
        self.last = _LastRow(start + len(tokens), following, _copied(states[-1]))
        if following is not None:
            self.waiting.append(_Row(self.last.position, following, self.last.state))

    def begin(self, length: int) -> _SessionMemory:
        """What another session begins with that shares `length` tokens. The last row they share was perhaps shown with
        a token that the other does not go on with: where its state is there, it is shown again."""
        shared = _SessionMemory(
            self.held[: bisect_left(self.held, length)],
            [row for row in self.waiting if row.position < length],
        )
        edge = self.last if self.last is not None and self.last.position == length - 1 else None
        if edge is None and shared.waiting and shared.waiting[-1].position == length - 1:
            row = shared.waiting[-1]
            edge = _LastRow(row.position, row.token, row.state)
        shared.last = edge
        return shared


@dataclass(slots=True)
class _Growth:
    """The draft of one session: the next token is to stand behind the one at `position`, the last of `ids` or, where
    there are none yet, the one that was picked (`picked`)."""

    part: SessionRows
    text: CopiedText
    picked: int
    position: int
    token: int
    most: int
    ids: list[int] = field(default_factory=list)
    likelihood: float = 1.0
    first: float = 0.0


@dataclass(frozen=True, slots=True)
class _Job:
    """Rows of a session, written from its `start`-th on; with logits of the last one or of none."""

    session: int
    start: int
    rows: Sequence[_Row]
    wants_logits: bool


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
        self._places: Array = np.full(vocab_size, -1, dtype=np.int32)
        self._places[ids] = np.arange(len(ids), dtype=np.int32)
        self._embedding = embedding
        self._scale = np.float32(embedding_scale)
        self._limits = limits
        self._vocab_size = vocab_size
        self._memories: dict[int, _SessionMemory] = {}
        """In the order in which they were last used."""
        self._texts: dict[int, CopiedText] = {}
        """Likewise; those that were drafted for."""

    def remember(self, work: Sequence[SessionRows], picked: Sequence[Picked], states: Array) -> None:
        """Take what a step has computed: the final `states` of all its rows, and a pick for each logit row."""
        row = picks = 0
        for part in work:
            chosen = picked[picks : picks + part.logit_rows]
            memory = self._memories.pop(part.session, None) or _SessionMemory()
            self._memories[part.session] = memory
            if part.start < len(self._texts.get(part.session, ())):
                # What was indexed from there on is taken back.
                del self._texts[part.session]
            true = _true_rows(part, chosen)
            following = None if part.targets or not chosen else chosen[true - _given(part)].choice.id
            memory.take(part.start, part.ids[0], states[row : row + true], part.ids[1:true], following)
            row, picks = row + len(part.ids), picks + part.logit_rows
        long = {part.session for part in work if len(self._memories[part.session].waiting) > _WAITING_ROWS}
        if long:
            self._show(sorted(long))

    def draft(self, work: Sequence[SessionRows], tail: Tail) -> list[Draft]:
        """Drafts for the work that asks for some, behind what was remembered of it last. The tail is asked to pick
        drafted tokens too, and then knows what it knew before."""
        growing = self._begin(work, tail)
        grown: list[_Growth] = growing
        jobs = [self._waiting_job(each.part.session, wants_logits=True) for each in growing]
        while growing:
            steps = self._run(jobs)
            following = []
            for each, step in zip(growing, steps, strict=True):
                if step is not None and self._grow(each, step[0], tail) and len(each.ids) < each.most:
                    following.append((each, step[1]))
            growing = [each for each, _ in following]
            jobs = [self._drafted_job(each, state) for each, state in following]
        for each in grown:
            tail.follow(each.part)
        return [_draft_of(each) for each in grown if each.ids]

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        """Session `target` begins with the first `length` tokens of `source`, which ends if it is moved."""
        memory = self._memories.get(source)
        self.close_session(target)
        if memory is None:
            return
        shared = memory.begin(length)
        if shared.held:
            try:
                self._network.adopt(source, target, len(shared.held), is_moved=is_moved)
            except CapacityError:
                shared.held = []
        self._memories[target] = shared
        if is_moved:
            self.close_session(source)

    def close_session(self, session: int) -> None:
        self._memories.pop(session, None)
        self._texts.pop(session, None)
        self._network.close_session(session)

    def sessions(self) -> list[int]:
        """Those that it remembers something of."""
        return list(self._memories)

    @property
    def indexed_tokens(self) -> int:
        """Of all sessions together, to copy from."""
        return sum(map(len, self._texts.values()))

    def close(self) -> None:
        self._memories.clear()
        self._texts.clear()
        self._network.close()
        self._embedding.close()

    # Memory

    def _show(self, sessions: Sequence[int]) -> None:
        """Have the network keep all rows that wait but the last, from which a draft would begin."""
        jobs = []
        for session in sessions:
            job = self._waiting_job(session, wants_logits=False)
            memory = self._memories[session]
            memory.held.pop()
            memory.waiting = [job.rows[-1]]
            jobs.append(_Job(job.session, job.start, job.rows[:-1], wants_logits=False))
        self._run(jobs)

    def _waiting_job(self, session: int, *, wants_logits: bool) -> _Job:
        """The rows of a session that wait, which do so no more."""
        memory = self._memories[session]
        rows, memory.waiting = memory.waiting, []
        start = len(memory.held)
        memory.held += [row.position for row in rows]
        return _Job(session, start, rows, wants_logits)

    def _drafted_job(self, growth: _Growth, state: Float32) -> _Job:
        """A row that is only drafted: what is held of the session does not count it."""
        start = len(self._memories[growth.part.session].held) + len(growth.ids) - 1
        row = _Row(growth.position, growth.token, state)
        return _Job(growth.part.session, start, [row], wants_logits=True)

    def _run(self, jobs: Sequence[_Job]) -> list[tuple[Float32, Float32] | None]:
        """Logits and next state of the last row of each job that wants them, in as few steps as hold all rows; None for
        others, and where memory is short."""
        found: dict[int, tuple[Float32, Float32]] = {}
        step: list[_Job] = []
        rows = 0
        for job in jobs:
            for first in range(0, len(job.rows), self._limits.step_rows):
                part = job.rows[first : first + self._limits.step_rows]
                is_end = first + len(part) == len(job.rows)
                if rows + len(part) > self._limits.step_rows:
                    found |= self._step(step)
                    step, rows = [], 0
                step.append(_Job(job.session, job.start + first, part, job.wants_logits and is_end))
                rows += len(part)
        if step:
            found |= self._step(step)
        return [found.get(job.session) for job in jobs]

    def _step(self, jobs: Sequence[_Job]) -> dict[int, tuple[Float32, Float32]]:
        inputs = self._inputs([row for job in jobs for row in job.rows])
        segments = [
            Segment(each.session, each.start, len(each.rows), int(each.wants_logits)) for each in jobs
        ]
        try:
            logits = np.array(self._compute(segments, inputs), dtype=np.float32)
        except (CapacityError, RowGapError):
            # Not even for these alone, or for the first of their rows: they begin anew with what comes next.
            for job in jobs:
                self.close_session(job.session)
                self._memories[job.session] = _SessionMemory()
            return {}
        states = self._network.final_rows()
        found: dict[int, tuple[Float32, Float32]] = {}
        row = 0
        for job in jobs:
            row += len(job.rows)
            if job.wants_logits:
                found[job.session] = logits[len(found)], np.array(states[row - 1], dtype=np.float32)
        return found

    def _compute(self, segments: Sequence[Segment], inputs: Float32) -> Array:
        """Sessions that were quiet longest give way to these."""
        own = {segment.session for segment in segments}
        while True:
            try:
                return self._network.step(segments, inputs, keeps_hidden=True)
            except CapacityError:
                quiet = next((session for session in self._memories if session not in own), None)
                if quiet is None:
                    raise
                self.close_session(quiet)

    def _inputs(self, rows: Sequence[_Row]) -> Float32:
        """Embedding and state of each row, side by side."""
        places = self._places[[row.token for row in rows]]
        states = np.stack([row.state for row in rows])
        inputs: Float32 = np.zeros((len(rows), 2 * states.shape[1]), dtype=np.float32)
        known = places >= 0
        if known.any():
            inputs[known, : states.shape[1]] = self._embedding.read(places[known]).to_dense() * self._scale
        inputs[:, states.shape[1] :] = states
        return inputs

    # Drafting

    def _begin(self, work: Sequence[SessionRows], tail: Tail) -> list[_Growth]:
        begun: list[_Growth] = []
        for part in work:
            memory = self._memories.get(part.session)
            if not part.head_draft_tokens or memory is None or not memory.waiting:
                continue
            last = memory.last
            if last is None or last.token is None or len(begun) == self._limits.max_rows:
                continue
            position = last.position + 1
            most = min(part.head_draft_tokens, self._limits.most, self._limits.context_length - position - 1)
            if most > 0:
                text = self._text(part.session, tail.tokens(part.session, 0, position))
                begun.append(_Growth(part, text, last.token, position, last.token, most))
        return begun

    def _text(self, session: int, known: Sequence[int]) -> CopiedText:
        """What can be copied behind these tokens and the one that was picked."""
        text = self._texts.pop(session, None) or CopiedText()
        self._texts[session] = text
        text.follow(known)
        while self.indexed_tokens > _INDEXED_TOKENS and len(self._texts) > 1:
            del self._texts[next(iter(self._texts))]
        return text

    def _grow(self, growth: _Growth, logits: Float32, tail: Tail) -> bool:
        """One more token, unless there is none worth sending."""
        assumed = (growth.picked, *growth.ids)
        copied = growth.text.guess(assumed)
        temperature = tail.temperature(growth.part.session)
        mixed = MixedLogits(logits, self._ids, self._places, copied, temperature)
        if copied is not None:
            growth.text.contest(assumed, copied.token, mixed.invented)
        token = self._pick(growth, mixed, tail)
        if token is None:
            return False
        likelihood = growth.likelihood * _held_chance(mixed.likelihood(token), temperature)
        limits = self._limits
        if likelihood < (limits.drawn_confidence if temperature else limits.confidence):
            return False
        growth.first = growth.first or likelihood
        growth.likelihood = likelihood
        growth.ids.append(token)
        growth.position, growth.token = growth.position + 1, token
        return True

    def _pick(self, growth: _Growth, mixed: MixedLogits, tail: Tail) -> int | None:
        """What would be picked from these logits; None where nothing known is allowed."""
        if tail.takes_best(growth.part.session):
            return mixed.best()
        work = SessionRows(growth.part.session, growth.position, (growth.token,), 1)
        try:
            return tail.pick([work], mixed.spread(self._vocab_size)[None])[0].choice.id
        except ShardComputeError:
            return None


def _held_chance(likelihood: float, temperature: float) -> float:
    """How likely a drafted token of this likelihood is to be right. The draft is drawn with the noise that the token is
    drawn with: where that favours an unlikely token, it does so in both, and both agree far more often than not."""
    return likelihood if temperature == 0.0 else _DRAWN_LEAST + _DRAWN_MORE * likelihood**2


def _copied(state: Array) -> Float32:
    """A state of its own: those of a step lie where the next one's will."""
    return np.array(state, dtype=np.float32)


def _given(part: SessionRows) -> int:
    """How many of the part's rows have no drafts: all but those that the logit rows behind the first are of."""
    return len(part.ids) - max(part.logit_rows - 1, 0)


def _true_rows(part: SessionRows, picked: Sequence[Picked]) -> int:
    """How many of the part's rows count: those that are given, and drafts as long as they are what was picked."""
    if part.targets:
        return len(part.ids)
    true = first = _given(part)
    while true < len(part.ids) and part.ids[true] == picked[true - first].choice.id:
        true += 1
    return true


def _draft_of(growth: _Growth) -> Draft:
    start = growth.position - len(growth.ids) + 1
    grade = grade_of(growth.first, _GRADE_BOUNDS)
    return Draft(growth.part.session, start, tuple(growth.ids), grade)

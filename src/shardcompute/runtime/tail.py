"""The end of a chain: logits in, picked tokens out.

What a token depends on is all here: its row's logits, its session's sampling and the tokens before it. A session
that is replayed from its tokens picks the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardcompute.backends.executor import PickedRows, PickRule
from shardcompute.backends.matrix import Array
from shardcompute.core.errors import CapacityError, RowGapError, UsageError
from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.core.steps import Opening, Picked, Prefix, SessionRows
from shardcompute.decoding import (
    GrammarState,
    Sampler,
    TokenHistory,
    build_sampler,
    compiler_of,
    needs_history,
    score_token,
)
from shardcompute.decoding.pick_rules import BEST, pick_rule
from shardcompute.models.vocabulary import Vocabulary

_NO_HISTORY = TokenHistory()
_LEAST_SQUARE = 1e-12
TokenPick = tuple[int, int]
"""(position, id) of a token"""


class _TailSession:
    """One session's sampler and the tokens it has seen."""

    def __init__(self, opening: Opening, grammar: GrammarState | None) -> None:
        self.sampling: Sampling = opening.sampling
        self.grammar = grammar
        self.sampler: Sampler = build_sampler(opening.sampling)
        self.needs_history = needs_history(opening.sampling)
        self.prompt_length = opening.prompt_length
        self.prompt_logprobs = opening.prompt_logprobs
        self.tokens: list[int] = []
        self.picked: TokenPick | None = None
        self._history: TokenHistory | None = None

    def take(self, work: SessionRows) -> None:
        """Truncate at the first row's position and remember these tokens."""
        if work.start > len(self.tokens):
            raise RowGapError(
                f"session {work.session} knows {len(self.tokens)} tokens; rows at {work.start} leave a gap"
            )
        del self.tokens[work.start :]
        self.tokens.extend(work.ids)
        if self._history is not None and len(self._history) > work.start:
            # Tokens that were rolled back must not be counted.
            if work.start < self.prompt_length:
                self._history = None
            else:
                self._history.truncate(work.start)
        if self.grammar is not None:
            self.grammar.truncate(max(work.start - self.prompt_length, 0))

    def masked(self, logits: Array, length: int) -> Array:
        """The logits of the token behind the first `length`, without those that the grammar forbids there."""
        if self.grammar is None:
            return logits
        start = self.prompt_length + len(self.grammar)
        self.grammar.extend(self.tokens[start:length])
        return self.grammar.mask(logits)

    def history(self, length: int) -> TokenHistory:
        """The first `length` tokens, counted; extended from the last call's."""
        prompt = min(self.prompt_length, length)
        if self._history is None or self._history.prompt_length != prompt:
            self._history = TokenHistory(self.tokens[:prompt])
        self._history.extend(self.tokens[len(self._history) : length])
        return self._history


class Tail:
    """Picks tokens for all sessions of a chain. `vocabulary` is asked for when a session has a grammar."""

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self._sessions: dict[int, _TailSession] = {}
        self._vocabulary = vocabulary

    def open(self, openings: Iterable[Opening]) -> None:
        """Sessions that are new here, or start again."""
        for opening in openings:
            session = _TailSession(opening, self._start_grammar(opening.sampling))
            if opening.prefix is not None:
                session.tokens = self._begin(opening.prefix)
            self._sessions[opening.session] = session

    def _begin(self, prefix: Prefix) -> list[int]:
        """The tokens that a session shares with another."""
        if self.length(prefix.source) < prefix.length:
            raise CapacityError(f"session {prefix.source} does not hold {prefix.length} tokens")
        tokens = self._sessions[prefix.source].tokens[: prefix.length]
        if prefix.is_moved:
            del self._sessions[prefix.source]
        return tokens

    def close(self, session: int) -> None:
        self._sessions.pop(session, None)

    def has(self, session: int) -> bool:
        return session in self._sessions

    def length(self, session: int) -> int:
        """How many of a session's tokens are known here."""
        known = self._sessions.get(session)
        return 0 if known is None else len(known.tokens)

    def picked_at(self, session: int, position: int) -> int:
        """The token that was picked last for a session, which is to stand at `position`. RowGapError: it does not."""
        pick = self._session(session).picked
        if pick is None or pick[0] != position:
            raise RowGapError(f"no token of session {session} was picked for position {position}")
        return pick[1]

    def tokens(self, session: int, start: int, stop: int) -> Sequence[int]:
        """Those of a session at these positions."""
        return self._session(session).tokens[start:stop]

    def takes_best(self, session: int) -> bool:
        """Whether the tokens of a session are those of the best logits, whatever came before."""
        return pick_rule(self._session(session).sampling, 0) == BEST

    def temperature(self, session: int) -> float:
        """At which a session's tokens are drawn."""
        return self._session(session).sampling.temperature

    def follow(self, part: SessionRows) -> None:
        """Remember these tokens and pick none."""
        self._session(part.session).take(part)

    def shows_rows(self, work: Sequence[SessionRows], openings: Iterable[Opening]) -> bool:
        """Whether a session of this step, open already or opened with it, wants its hidden or final states."""
        wanting = {opening.session for opening in openings if opening.sampling.shows_rows}
        wanting |= {session for session, known in self._sessions.items() if known.sampling.shows_rows}
        return any(part.session in wanting and part.logit_rows for part in work)

    def wants_states(self, work: Sequence[SessionRows]) -> bool:
        """Whether a session of this step, which is open, wants its final states."""
        return any(part.logit_rows and self._session(part.session).sampling.wants_states for part in work)

    def pick_rules(
        self, work: Sequence[SessionRows], opened: Mapping[int, Sampling]
    ) -> list[PickRule | None]:
        """For each logit row how a device may pick its token; None: it may not. `opened` are samplings of sessions that
        are not open here yet."""
        rules: list[PickRule | None] = []
        for part in work:
            known = self._sessions.get(part.session)
            sampling = opened.get(part.session) or (None if known is None else known.sampling)
            first = part.start + len(part.ids) - part.logit_rows + 1
            for position in range(first, first + part.logit_rows):
                is_host = sampling is None or bool(part.targets)
                rules.append(None if is_host or sampling is None else pick_rule(sampling, position))
        return rules

    def pick(
        self,
        work: Sequence[SessionRows],
        logits: Array | PickedRows,
        hidden: Array | None = None,
        states: Array | None = None,
    ) -> list[Picked]:
        """One token per logit row, in the order of the rows; with its row of `hidden`, or (of all rows) of `states`,
        where that is wanted. Where a device has picked it, that token."""
        picked: list[Picked] = []
        row = stop = 0
        for part in work:
            session = self._session(part.session)
            session.take(part)
            first = part.start + len(part.ids) - part.logit_rows
            stop += len(part.ids)
            for index in range(part.logit_rows):
                token = None if isinstance(logits, np.ndarray) else logits.token(row)
                if token is None:
                    row_logits = logits[row] if isinstance(logits, np.ndarray) else logits.logits(row)
                    one = _pick_one(session, part, first + index, index, row_logits)
                else:
                    one = Picked(part.session, first + index, TokenChoice(token))
                if states is not None and session.sampling.wants_states:
                    packed = pack_state(states[stop - part.logit_rows + index])
                    one = replace(one, choice=replace(one.choice, hidden=packed))
                elif hidden is not None and session.sampling.wants_hidden:
                    packed = hidden[row].astype("<f4").tobytes()
                    one = replace(one, choice=replace(one.choice, hidden=packed))
                picked.append(one)
                row += 1
            if part.logit_rows and not part.targets:
                session.picked = (picked[-1].position + 1, picked[-1].choice.id)
        return picked

    def _start_grammar(self, sampling: Sampling) -> GrammarState | None:
        if sampling.grammar is None:
            return None
        if self._vocabulary is None:
            raise UsageError(
                "the last stage does not know the model's vocabulary, which a grammar needs",
                hint="run the same release on every node",
            )
        return compiler_of(self._vocabulary()).start(sampling.grammar)

    def _session(self, session: int) -> _TailSession:
        known = self._sessions.get(session)
        if known is None:
            raise UsageError(f"session {session} was never opened on this chain")
        return known


def pack_state(state: Array) -> bytes:
    """A final state with a mean square of 1: a draft head looks at nothing else, and 16 bits hold it."""
    wide = state.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide * wide) + _LEAST_SQUARE)
    return bytes((wide * scale).astype("<f2").tobytes())


def _pick_one(session: _TailSession, part: SessionRows, position: int, index: int, logits: Array) -> Picked:
    if part.targets and session.sampling.wants_states:
        return Picked(part.session, position, TokenChoice(part.targets[index]), is_scored=True)
    if part.targets:
        choice = score_token(logits, part.targets[index], session.prompt_logprobs, position)
        return Picked(part.session, position, choice, is_scored=True)
    masked = session.masked(logits, position + 1)
    history = session.history(position + 1) if session.needs_history else _NO_HISTORY
    choice = session.sampler(masked, history, position + 1)
    return Picked(part.session, position, choice)

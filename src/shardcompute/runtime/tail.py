"""The end of a chain: logits in, picked tokens out.

What a token depends on is all here: its row's logits, its session's sampling and the tokens before it. A session
that is replayed from its tokens picks the same ones again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardcompute.backends.matrix import Array
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Opening, Picked, Work
from shardcompute.decoding import Sampler, TokenHistory, build_sampler, score_token


class _Session:
    """One session's sampler and the tokens it has seen."""

    def __init__(self, opening: Opening) -> None:
        self.sampling: Sampling = opening.sampling
        self.sampler: Sampler = build_sampler(opening.sampling)
        self.prompt_length = opening.prompt_length
        self.prompt_logprobs = opening.prompt_logprobs
        self.tokens: list[int] = []
        self._history: TokenHistory | None = None

    def take(self, work: Work) -> None:
        """Truncate at the first row's position and remember these tokens."""
        if work.start > len(self.tokens):
            raise UsageError(
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

    def history(self, length: int) -> TokenHistory:
        """The first `length` tokens, counted; extended from the last call's."""
        prompt = min(self.prompt_length, length)
        if self._history is None or self._history.prompt_length != prompt:
            self._history = TokenHistory(self.tokens[:prompt])
        self._history.extend(self.tokens[len(self._history) : length])
        return self._history


class Tail:
    """Picks tokens for all sessions of a chain."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}

    def open(self, openings: Iterable[Opening]) -> None:
        """Sessions that are new here, or start again."""
        for opening in openings:
            self._sessions[opening.session] = _Session(opening)

    def close(self, session: int) -> None:
        self._sessions.pop(session, None)

    def length(self, session: int) -> int:
        """How many of a session's tokens are known here."""
        known = self._sessions.get(session)
        return 0 if known is None else len(known.tokens)

    def pick(self, work: Sequence[Work], logits: Array) -> list[Picked]:
        """One token per wanted row, in the order of the rows."""
        picked: list[Picked] = []
        row = 0
        for part in work:
            session = self._sessions.get(part.session)
            if session is None:
                raise UsageError(f"session {part.session} was never opened on this chain")
            session.take(part)
            first = part.start + len(part.ids) - part.wanted
            for index in range(part.wanted):
                picked.append(_pick_one(session, part, first + index, index, logits[row]))
                row += 1
        return picked


def _pick_one(session: _Session, part: Work, position: int, index: int, logits: Array) -> Picked:
    if part.targets:
        choice = score_token(logits, part.targets[index], session.prompt_logprobs, position)
        return Picked(part.session, position, choice, is_scored=True)
    choice = session.sampler(logits, session.history(position + 1), position + 1)
    return Picked(part.session, position, choice)

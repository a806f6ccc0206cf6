"""Session: a generation as its chain's scheduler sees it, tokens that are known, and drafts that are assumed.

`known` are prompt and picked tokens; `assumed` are drafts that follow them. Rows of both are sent alike, and
`sent` of them are on their way or done. A pick that equals the first assumed token makes it known; one that does
not voids everything sent after it: the rows are computed again from there, which overwrites what the stages hold.
Where the chain can continue a session by itself, what it picks next is assumed as `PICKED`, and always right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.generation import GenerationRequest, TokenChoice
from shardcompute.core.pictures import PictureSpan
from shardcompute.core.steps import PICKED, Opening, Picked, Prefix


@dataclass(slots=True)
class Session:
    id: int
    request: GenerationRequest
    known: list[int]
    assumed: list[int] = field(default_factory=list)
    prefix: Prefix | None = None
    """What it shares with another session, and so need not be computed."""
    reused: int = 0
    """So many tokens it had from another session."""
    sent: int = 0
    head_draft_tokens: int = 0
    """So many tokens may the last stage draft, after those that it picks from the next rows."""
    awaits_head_draft: bool = False
    """The last stage was asked to draft with the rows that are under way."""
    is_drafting: bool = False
    """A drafter is at work; nothing is sent until it has answered."""
    flights: set[int] = field(default_factory=set)
    """Frames with rows of this session that are under way."""
    early: dict[int, Picked] = field(default_factory=dict)
    """Picks that came before those of earlier rows."""
    scores: dict[int, TokenChoice] = field(default_factory=dict)
    """The prompt's tokens with their log-probabilities, by the row that scored them."""
    scored: int = 0
    """So many of the first rows have scores; these are not asked for again."""
    is_opened: bool = False
    shown_in: int = 0
    """The frame that its pictures were sent with; 0: none were."""
    gaps: int = 0
    """So often in a row the chain lacked rows of it that it had been sent."""
    shortages: int = 0
    """So often in a row a stage had no memory left to compute it."""
    void_until: int = 0
    """Frames up to this number were sent before the session was rolled back: they do not count, and may fail."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.known) - self.prompt_length

    @property
    def length(self) -> int:
        return len(self.known) + len(self.assumed)

    @property
    def unsent(self) -> int:
        return self.length - self.sent

    @property
    def held_tokens(self) -> int:
        """KV that it holds or will need next, in tokens of whole pages."""
        return round_to_pages(self.length + 1)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known and assumed tokens at positions from `start` to `stop`."""
        edge = len(self.known)
        return (
            *self.known[start:stop],
            *self.assumed[max(start - edge, 0) : max(stop - edge, 0)],
        )

    def commit(self, token: int) -> bool:
        """The next token is known. False when something else had been assumed, which is void now."""
        self.known.append(token)
        if not self.assumed:
            return True
        if self.assumed[0] in (token, PICKED):
            del self.assumed[0]
            return True
        return False

    def roll_back(self, start: int, sequence: int) -> None:
        """Rows from `start` on are to be sent again; what frames up to `sequence` bring does not count."""
        self._drop()
        # The last known token's row has to come again too: its pick may be among what does not count.
        self.sent = min(self.sent, start, len(self.known) - 1)
        self.void_until = sequence

    def begin_with(self, prefix: Prefix) -> None:
        self.prefix, self.sent, self.reused = prefix, prefix.length, prefix.length

    def forget(self) -> None:
        """What was computed is gone: compute it again."""
        self._restart(0)
        self.reused = 0
        self.is_opened = False

    def rewind(self, sent: int) -> None:
        """What was on its way is lost; the first `sent` tokens are computed, wherever it was about to start again."""
        self._restart(sent)
        self.is_opened = True

    def _restart(self, sent: int) -> None:
        self._drop()
        self.sent = sent
        # Whoever is told of it from now on has not got the other session.
        self.prefix = None

    def _drop(self) -> None:
        """Nothing that is assumed or on its way counts any more."""
        self.assumed.clear()
        self.early.clear()
        self.flights.clear()
        self.head_draft_tokens = 0
        self.awaits_head_draft = False

    @property
    def is_to_show(self) -> bool:
        """Its pictures are yet to be sent."""
        return not self.is_opened and bool(self.request.pictures)

    @property
    def is_showing(self) -> bool:
        """The frame with its pictures is under way: what follows it would wait behind a tower."""
        return self.shown_in in self.flights

    @property
    def spans(self) -> tuple[PictureSpan, ...]:
        """Those of its prompt's pictures."""
        return tuple(picture.span for picture in self.request.pictures)

    def opening(self) -> Opening:
        request = self.request
        shared = 0 if self.prefix is None else self.prefix.length
        return Opening(
            self.id,
            request.sampling,
            self.prompt_length,
            request.prompt_logprobs or 0,
            self.prefix,
            request.adapter,
            self.spans,
            tuple(b"" if each.span.stop <= shared else each.patches for each in request.pictures),
            request.receipt_nonce,
        )


def round_to_pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS

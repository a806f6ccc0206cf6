"""What travels along a chain: rows of sessions with their tokens in, picked tokens out.

Token ids go along with the rows to the last stage, which needs them for penalties; nothing else about a
session's past is sent twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardcompute.core.batch import Segment
from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.core.pictures import PictureSpan

PICKED = -1
"""As the first of a session's ids: the token that was picked after the row before, which the stage knows that picked
it. A row that begins so *continues* its session: its driver has not seen that token yet. In chains of one stage."""


@dataclass(frozen=True, slots=True)
class SessionRows:
    """Rows of one session: its tokens `ids` at positions from `start` on. The first may be `PICKED`.

    Tokens are picked after the last `logit_rows` of them. Where `targets` are given, one per such row, these tokens are
    scored instead of picked (log-probabilities of a prompt).
    """

    session: int
    start: int
    ids: tuple[int, ...]
    logit_rows: int = 0
    targets: tuple[int, ...] = ()
    head_draft_tokens: int = 0
    """So many tokens the last stage may draft, after those that it picks."""

    @property
    def is_continuation(self) -> bool:
        return self.ids[0] == PICKED

    @property
    def segment(self) -> Segment:
        return Segment(self.session, self.start, len(self.ids), self.logit_rows)


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed for a session from position `start` on, and how sure the drafter is of them
    (`decoding.drafting`). One that the last stage makes of a step's final states is a *head draft*."""

    session: int
    start: int
    ids: tuple[int, ...]
    grade: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """A session begins with the first `length` tokens of session `source`; the latter is over if it is moved."""

    source: int
    length: int
    is_moved: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """How tokens of a session are picked; sent before its first row and whenever a stage takes it over."""

    session: int
    sampling: Sampling
    prompt_length: int
    prompt_logprobs: int = 0
    """Alternatives to give with each scored token."""
    prefix: Prefix | None = None
    """What it shares with a session that every stage holds; its rows begin behind that."""
    adapter: str = ""
    """The name of the adapter that every stage computes it with; "": the base alone."""
    spans: tuple[PictureSpan, ...] = ()
    """The prompt's pictures, for every stage."""
    patches: tuple[bytes, ...] = field(default=(), repr=False)
    """For the first stage, a picture's each; empty ones are of pictures whose rows are not computed (`prefix`). To
    other stages none are sent."""
    receipt_nonce: bytes = b""
    """Not empty: every stage signs for what it computes of the session (`security.receipts`)."""

    @property
    def patch_count(self) -> int:
        """How many patches it has of pictures that are to be looked at."""
        pairs = zip(self.spans, self.patches, strict=False)
        return sum(span.patch_count for span, patches in pairs if patches)


@dataclass(frozen=True, slots=True)
class Picked:
    """The token picked (or scored) after the row at `position`."""

    session: int
    position: int
    choice: TokenChoice
    is_scored: bool = False


def segments_of(work: Sequence[SessionRows]) -> list[Segment]:
    return [part.segment for part in work]


@dataclass(frozen=True, slots=True)
class Frame:
    """One step for the whole chain."""

    sequence: int
    work: tuple[SessionRows, ...]
    openings: tuple[Opening, ...]

    @property
    def rows(self) -> int:
        return sum(len(part.ids) for part in self.work)

    @property
    def patches(self) -> int:
        """Of pictures that are to be looked at before it is computed."""
        return sum(opening.patch_count for opening in self.openings)

"""Speculative decoding for one driver's sessions: what the router finds worth trying, from the drafters there are.

A quick drafter answers while a frame is put together. A slow one works in a thread of its own; its session sends
nothing until the draft is there. While frames travel, a slow one goes on behind what they assume where that pays: what
it finds is at hand when they are back and hold, and it is stopped when somebody waits for another draft. Not
thread-safe: every method is called under the driver's lock.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest, Speculation
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.core.steps import Draft
from shardcompute.decoding.drafting import HEAD_DRAFTER, Drafter, DraftTask, PatientDrafter
from shardcompute.decoding.head_drafts import HeadDraftCache
from shardcompute.decoding.routing.router import DraftOffer, DraftPlan, Router
from shardcompute.node.driver.scheduler import PipeContext
from shardcompute.node.driver.sessions.session import Session

log = logging.getLogger(__name__)
MOST_TOKENS = 16
MOST_FRAMES = 8
_PLAIN = DraftPlan(None, 0, 1, "not asked yet")
_ROUNDS_AHEAD = 16
"""After so many tokens of a session that its chain continued by itself, slow drafters are asked again."""
_LONGEST_LOOK = 8
DRAFT_S = 10.0
"""So long a slow drafter may take; one that takes longer is done without."""
TakeDraft = Callable[[Session, PipeContext], None]
OnDraft = Callable[[int, TakeDraft], None]
"""Given a session and what is to be done with it, under the lock, now that its draft is there."""


@dataclass(slots=True)
class _Record:
    """Tokens drafted in one go, and how many of them have proved right."""

    drafter: str
    grade: int
    count: int
    accepted: int = 0


@dataclass(slots=True)
class DraftStats:
    """How a session has fared with drafts."""

    plan: DraftPlan = _PLAIN
    records: deque[_Record] = field(default_factory=deque)
    dry_at: int = -1
    """At this length the drafter had nothing to offer."""
    drafted: list[int] = field(default_factory=list)
    """Tokens that were sent as the first of their draft, as its second, and so on; and those that came true."""
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    """So long it waited for drafts."""
    continued: int = 0
    """Tokens with which its chain went on by itself."""
    look_at: int = 0
    """From this length on it is looked whether there is something better, and after so many tokens again."""
    look_after: int = 1


class RoutedSpeculator:
    """A `scheduler.Speculator` that asks a router what pays."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        default: Speculation,
        on_draft: OnDraft,
        *,
        has_draft_head: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_draft_head`: the last stage drafts."""
        self._clock = clock
        self._default = default
        self.router = Router()
        self._has_draft_head = has_draft_head
        self._head_drafts = HeadDraftCache()
        self._drafters: Mapping[str, Drafter] = {
            drafter.name: drafter for drafter in (*drafters, self._head_drafts)
        }
        self._on_draft = on_draft
        self._stats: dict[int, DraftStats] = {}
        self._asked: dict[int, tuple[DraftTask, float]] = {}
        """What each session waits for, and since when."""
        self._ahead: dict[int, DraftTask] = {}
        """What is drafted for each session behind its frames that are under way, or was."""
        self._limited_log = RateLimitedLog(log)
        self._has_slow = any(drafter.is_slow for drafter in drafters)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafts") if self._has_slow else None

    def expect_head_drafts(self, has_draft_head: bool) -> None:
        """Whether the last stage drafts from now on."""
        self._has_draft_head = has_draft_head

    @property
    def available(self) -> list[str]:
        return [name for name in self._drafters if name != HEAD_DRAFTER or self._has_draft_head]

    def wish(self, request: GenerationRequest) -> Speculation:
        return request.speculation or self._default

    def check(self, request: GenerationRequest) -> None:
        """UsageError for what cannot be done here."""
        wish = self.wish(request)
        if wish.drafter not in ("auto", "off") and wish.drafter not in self.available:
            hints = {
                "model": "start with --draft-model",
                HEAD_DRAFTER: "train one with `shardcompute draft-head train`, and start again",
            }
            raise UsageError(
                f"there is no drafter {wish.drafter!r} here",
                hint=hints.get(wish.drafter, f"use one of: auto, off, {', '.join(self.available)}"),
            )
        for what, value, most in (("tokens", wish.tokens, MOST_TOKENS), ("frames", wish.frames, MOST_FRAMES)):
            if value is not None and not 1 <= value <= most:
                raise UsageError(f"speculation.{what} is {value}", hint=f"use 1 to {most}")

    def stats_of(self, session: int) -> DraftStats:
        return self._stats.setdefault(session, DraftStats())

    def most_frames(self) -> int:
        """Frames that some session may have under way."""
        return max((stats.plan.frames for stats in self._stats.values()), default=1)

    def forget(self, session: int) -> None:
        self._stats.pop(session, None)
        self._stop(session)
        self.router.forget(session)
        for drafter in self._drafters.values():
            if drafter.is_slow and self._thread is not None:
                self._thread.submit(drafter.forget, session)
            else:
                drafter.forget(session)

    def close(self) -> None:
        for session in [*self._asked, *self._ahead]:
            self._stop(session)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def next_overdue_s(self, now_s: float) -> float | None:
        """In how many seconds some drafter is given up, unless it answers; None: none is asked."""
        if not self._asked:
            return None
        return max(0.0, min(asked_s for _, asked_s in self._asked.values()) + DRAFT_S - now_s)

    def give_up_drafts(self, now_s: float) -> list[int]:
        """Do without drafters that have not answered in time, from now on. Returns the sessions that wait no more."""
        hung = {task.drafter for task, asked_s in self._asked.values() if asked_s + DRAFT_S <= now_s}
        for name in hung:
            # Not closed: it is at work in its thread, and may be for ever.
            log.warning("the drafter %s has not answered for %.0f s: going on without it", name, DRAFT_S)
            self._drafters = {key: each for key, each in self._drafters.items() if key != name}
        released = [session for session, (task, _) in self._asked.items() if task.drafter in hung]
        for session in released:
            self._stop(session)
        return released

    # For the scheduler

    def can_extend(self, session: Session, context: PipeContext) -> bool:
        stats = self.stats_of(session.id)
        return (
            bool(session.assumed)
            and stats.plan.drafter in self._drafters
            and len(session.flights) < stats.plan.frames
            and stats.dry_at != session.length
            and self._room(session, context) > 0
        )

    def extend(self, session: Session, context: PipeContext) -> None:
        self._extend(session, context)
        if self._has_draft_head and not session.flights:
            wish = self.wish(session.request)
            session.head_draft_tokens = self.router.head_draft_tokens(session.id, wish, context.load)

    def _extend(self, session: Session, context: PipeContext) -> None:
        is_first = not session.assumed and session.sent == len(session.known) - 1
        if not is_first and (session.unsent or not self.can_extend(session, context)):
            return
        stats = self.stats_of(session.id)
        room = self._room(session, context)
        if stats.dry_at == session.length or room < 1:
            return
        wish = self.wish(session.request)
        if not is_first:
            self._draft(session, stats, room, context)
            return
        stats.records.clear()
        if wish.drafter == "auto" and self._draft_at_hand(session, stats, room, context):
            return
        available = [name for name in self.available if self._may_have(name, session)]
        while available:
            stats.plan = self.router.choose(session.id, wish, available, context.load)
            if stats.plan.drafter is None or self._draft(session, stats, room, context):
                return
            # This one has nothing to offer; another may.
            available = [name for name in available if name != stats.plan.drafter]
            if wish.drafter != "auto":
                return

    def lets_continue(self, session: Session, context: PipeContext) -> bool:
        wish = self.wish(session.request)
        if wish.drafter == "off" or wish.tokens == 0:
            return True
        if wish.drafter != "auto":
            return False
        stats = self.stats_of(session.id)
        stats.continued += 1
        if self._has_slow and stats.continued % _ROUNDS_AHEAD == 0:
            return False
        if session.length >= stats.look_at:
            if self._find_at_hand(session, context) is not None:
                stats.look_after = 1
                return False
            # Where the text does not repeat itself now, it hardly will with the next token.
            stats.look_at = session.length + stats.look_after
            stats.look_after = min(2 * stats.look_after, _LONGEST_LOOK)
        if self._has_draft_head:
            session.head_draft_tokens = self.router.head_draft_tokens(session.id, wish, context.load)
        return True

    def committed(self, session: Session, was_assumed: bool, is_right: bool) -> None:
        stats = self.stats_of(session.id)
        if not is_right:
            # Whatever is being drafted follows what did not come.
            self._stop(session.id)
            session.is_drafting = False
        if not was_assumed or not stats.records:
            return
        record = stats.records[0]
        if is_right:
            stats.accepted[record.accepted] += 1
            record.accepted += 1
        if not is_right or record.accepted == record.count:
            self.router.verified(session.id, record.drafter, record.grade, record.count, record.accepted)
            stats.records.popleft()
        if not is_right:
            stats.records.clear()

    def take_head_draft(self, session: Session, draft: Draft | None, seconds: float) -> None:
        """What the last stage drafts to follow the session's last known token, which took it so long; None: it was
        asked in vain."""
        if draft is None or not draft.ids:
            self.router.had_nothing(session.id, HEAD_DRAFTER)
        elif draft.start == len(session.known) and not session.assumed:
            self.router.drafted(session.id, HEAD_DRAFTER, seconds, len(draft.ids))
            self._head_drafts.take(draft)

    # Inside

    def _may_have(self, drafter: str, session: Session) -> bool:
        return drafter != HEAD_DRAFTER or self._head_drafts.has(session.id, session.known)

    def _draft_at_hand(self, session: Session, stats: DraftStats, room: int, context: PipeContext) -> bool:
        """Where drafts are there already, or cost nothing, take the one that promises most."""
        chosen = self._find_at_hand(session, context, room)
        if chosen is None:
            return False
        stats.plan = chosen
        self.router.took(chosen)
        return self._draft(session, stats, room, context)

    def _find_at_hand(
        self, session: Session, context: PipeContext, room: int = MOST_TOKENS
    ) -> DraftPlan | None:
        offers = []
        for drafter in self._drafters.values():
            if drafter.is_slow:
                draft = self._drafted_ahead(session, drafter.name)
            else:
                draft = drafter.propose(
                    session.id, session.known, session.assumed, min(room, MOST_TOKENS), session.opening()
                )
            if draft is not None:
                offers.append(DraftOffer(drafter.name, draft.grade, min(len(draft.ids), room, MOST_TOKENS)))
        there = {offer.drafter for offer in offers}
        others = [name for name in self.available if self._drafters[name].is_slow and name not in there]
        wish = self.wish(session.request)
        return self.router.compare(session.id, wish, offers, context.load, others)

    def _draft(self, session: Session, stats: DraftStats, room: int, context: PipeContext) -> bool:
        """Have the plan's drafter add to the session; False if it has nothing to offer."""
        limit = min(stats.plan.tokens, room)
        drafter = None if stats.plan.drafter is None else self._drafters.get(stats.plan.drafter)
        if drafter is None or limit < 1:
            return False
        if drafter.is_slow:
            ahead = self._drafted_ahead(session, drafter.name)
            if ahead is None:
                self._draft_aside(session, drafter, limit)
                return True
            token_s, ahead = self._ahead[session.id].token_s, replace(ahead, ids=ahead.ids[:limit])
            return self._take(session, context, drafter.name, ahead, token_s * len(ahead.ids))
        began_s = time.perf_counter()
        draft = drafter.propose(session.id, session.known, session.assumed, limit, session.opening())
        seconds = time.perf_counter() - began_s
        stats.draft_s += seconds
        return self._take(session, context, drafter.name, draft, seconds)

    def _room(self, session: Session, context: PipeContext) -> int:
        """How many more tokens may be assumed. The last one asked for is never drafted, it is picked; and drafts
        are not worth making room for."""
        wanted = session.request.max_tokens - session.generated - len(session.assumed) - 1
        pages = context.free_tokens // PAGE_TOKENS * PAGE_TOKENS
        return min(wanted, session.held_tokens + max(pages, 0) - session.length - 1)

    def _draft_aside(self, session: Session, drafter: Drafter, limit: int) -> None:
        """Have a slow drafter add to the session, which waits for it."""
        session.is_drafting = True
        tokens = (*session.known, *session.assumed)
        task = self._ahead.get(session.id)
        # What is being drafted ahead may be just that.
        is_that = task is not None and task.drafter == drafter.name and task.tokens == tokens
        if task is None or not is_that or task.is_done or not task.is_wanted:
            for other in self._ahead:
                self._hurry(other)
            task = self._start(session, drafter, limit)
        self._asked[session.id] = (task, self._clock())

    def _draft_ahead(self, session: Session, drafter: Drafter, tokens: int) -> None:
        """Have a slow drafter go on behind what is assumed: with what is picked there, and as many as may follow."""
        if isinstance(drafter, PatientDrafter):
            self._hurry(session.id)
            self._ahead[session.id] = self._start(session, drafter, tokens + 1)

    def _drafted_ahead(self, session: Session, drafter: str) -> Draft | None:
        """What this slow drafter has drafted to follow the session's tokens."""
        task = self._ahead.get(session.id)
        if task is None or not task.is_done or task.drafter != drafter:
            return None
        return task.remainder((*session.known, *session.assumed))

    def _start(self, session: Session, drafter: Drafter, limit: int) -> DraftTask:
        known, assumed, opening = tuple(session.known), tuple(session.assumed), session.opening()
        task = DraftTask(session.id, drafter.name, (*known, *assumed))

        def work() -> None:
            began_s = time.perf_counter()
            try:
                if not task.is_wanted:
                    pass
                elif isinstance(drafter, PatientDrafter):
                    task.draft = drafter.propose_while(
                        task.tokens, len(known), limit, opening, lambda: task.is_wanted
                    )
                else:
                    task.draft = drafter.propose(task.session, known, assumed, limit, opening)
            except Exception as error:
                # Plain decoding needs no draft; a drafter in trouble must not stop it.
                self._limited_log.warning(drafter.name, "the drafter %s failed: %r", drafter.name, error)
            task.seconds = time.perf_counter() - began_s
            task.is_done = True
            self._on_draft(task.session, take)

        def take(session: Session, context: PipeContext) -> None:
            asked = self._asked.get(session.id)
            if asked is None or asked[0] is not task:
                return  # nobody waits for it, or it was given up
            del self._asked[session.id]
            session.is_drafting = False
            stats = self.stats_of(session.id)
            stats.draft_s += self._clock() - asked[1]
            tokens = (*session.known, *session.assumed)
            draft = task.remainder(tokens)
            # There may be less room than there was, and one that was drafted ahead may be longer than a frame's.
            limit = min(stats.plan.tokens, self._room(session, context))
            if draft is not None and limit > 0:
                draft = replace(draft, ids=draft.ids[:limit])
                self._take(session, context, drafter.name, draft, task.token_s * len(draft.ids))
            elif tokens == task.tokens:
                self._take(session, context, drafter.name, None, task.seconds)

        assert self._thread is not None
        self._thread.submit(work)
        return task

    def _hurry(self, session: int) -> None:
        """Leave what is being drafted ahead for the session at that, unless it is waited for."""
        task, asked = self._ahead.get(session), self._asked.get(session)
        if task is not None and (asked is None or asked[0] is not task):
            task.is_wanted = False

    def _stop(self, session: int) -> None:
        """Nobody wants what is being drafted for the session."""
        asked, ahead = self._asked.pop(session, None), self._ahead.pop(session, None)
        for task in (None if asked is None else asked[0], ahead):
            if task is not None:
                task.is_wanted = False

    def _take(
        self, session: Session, context: PipeContext, drafter: str, draft: Draft | None, seconds: float
    ) -> bool:
        """False if there is nothing worth sending."""
        stats = self.stats_of(session.id)
        count = 0 if draft is None else self._count_to_send(session, context, drafter, draft, seconds)
        if draft is None:
            self.router.missed(session.id, drafter)
        if draft is None or count < 1:
            stats.dry_at = session.length
            return False
        session.assumed.extend(draft.ids[:count])
        stats.records.append(_Record(drafter, draft.grade, count))
        missing = [0] * (count - len(stats.drafted))
        stats.drafted += missing
        stats.accepted += missing
        for place in range(count):
            stats.drafted[place] += 1
        source = self._drafters.get(drafter)
        if (
            source is not None
            and source.is_slow
            and self.router.pays_ahead(session.id, drafter, draft.grade, count)
        ):
            self._draft_ahead(session, source, stats.plan.tokens)
        return True

    def _count_to_send(
        self, session: Session, context: PipeContext, drafter: str, draft: Draft, seconds: float
    ) -> int:
        """How many of the draft's tokens to send; those that the last stage made were counted when they came."""
        count = len(draft.ids)
        if drafter != HEAD_DRAFTER:
            self.router.drafted(session.id, drafter, seconds, count)
        if self.wish(session.request).tokens is None:
            return self.router.worth(session.id, drafter, draft.grade, count, context.load)
        return count

"""One shard at work: sessions, KV and `step`, with the tail where the chain ends.

A step is begun and finished; on a device that computes beside the host, the next one may begin in between. A last
stage may have a drafter: it is shown what was computed (`remember`), and `draft` then tells what may follow the tokens
that a step has picked.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from shardcompute.backends.device_memory import (
    device_memory_error,
    free_caches,
    is_out_of_memory,
    within_memory,
)
from shardcompute.backends.executor import (
    MAX_LOGIT_ROWS,
    MAX_ROWS,
    EncodingExecutor,
    Executor,
    KvUsage,
    MovableKv,
    PendingPicks,
    PendingStep,
    PickedRows,
    PickingExecutor,
    RestingExecutor,
)
from shardcompute.backends.matrix import Array
from shardcompute.core.batch import Segment
from shardcompute.core.errors import RowGapError, UnsupportedModelError, UsageError
from shardcompute.core.steps import PICKED, Draft, Opening, Picked, SessionRows, segments_of
from shardcompute.models.vocabulary import Vocabulary
from shardcompute.runtime.draft_backlog import DraftBacklog
from shardcompute.runtime.head_drafter import HeadDrafter
from shardcompute.runtime.tail import Tail

log = logging.getLogger(__name__)
_STEP = "a step was computed"
_Result = TypeVar("_Result")


@dataclass(eq=False, slots=True)
class PendingFrame:
    """A step of a stage that was begun; `StageRuntime.finish` gives what it brings."""

    work: tuple[SessionRows, ...]
    """With the tokens that continued sessions go on from, at the latest when it is finished."""
    openings: tuple[Opening, ...]
    step: PendingStep | PendingPicks
    launch: Callable[[Sequence[SessionRows]], PendingStep | PendingPicks]
    """Begins it anew. Rows are written where they begin, so that the last step can be computed again."""
    keeps_hidden: bool = False
    is_stale: bool = False
    """The step before was computed again after this one was begun."""
    outcome: Array | list[Picked] | None = None
    error: Exception | None = None
    ended: list[int] = field(default_factory=list)
    """Sessions that were closed after it was begun."""

    def is_ready(self) -> bool:
        return self.outcome is not None or self.error is not None or self.step.is_ready()


class StageRuntime:
    """Runs steps of one stage. One caller at a time."""

    def __init__(
        self,
        executor: Executor,
        *,
        is_first: bool,
        is_last: bool,
        drafter: HeadDrafter | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
        max_rows: int = MAX_ROWS,
        max_logit_rows: int = MAX_LOGIT_ROWS,
        adapters: Sequence[str] = (),
    ) -> None:
        """A last stage asks for the `vocabulary` when a session has a grammar. `max_rows` and `max_logit_rows` are what
        the executor takes at once, `adapters` those that sessions may choose, in the order of their numbers."""
        if drafter is not None and not is_last:
            raise ValueError("only a last stage can draft")
        self._executor = executor
        self._picker = executor if isinstance(executor, PickingExecutor) and executor.can_pick else None
        self._guesses: dict[int, int] = {}
        """The token of each session of the step finished last that the device would go on from."""
        self._drafter: HeadDrafter | DraftBacklog | None = drafter
        self._is_first = is_first
        self._tail = Tail(vocabulary) if is_last else None
        self.max_rows = max_rows
        self.max_logit_rows = max_logit_rows
        self._pending: deque[PendingFrame] = deque()
        self._adapters = {name: number for number, name in enumerate(adapters, start=1)}
        self._chosen: dict[int, int] = {}
        """The adapter of each session that was opened here; empty where there are none to choose."""
        self._openings: dict[int, Opening] = {}
        """Of the sessions that hold KV, for whoever goes on with them elsewhere."""

    @property
    def can_continue(self) -> bool:
        """Whether sessions may go on from tokens that their driver has not seen: this is all of the chain."""
        return self._is_first and self._tail is not None

    def can_begin_after(self, pending: PendingFrame) -> bool:
        """Whether another step may begin before this one is finished: the device computes by itself, and nobody looks
        at what the next one overwrites."""
        shows_rows = any(opening.sampling.shows_rows for opening in pending.openings)
        return self._executor.is_asynchronous and not pending.keeps_hidden and not shows_rows

    def encoding(self, openings: Iterable[Opening]) -> Callable[[], None] | None:
        """Encodes the pictures of these sessions, in any thread, so that `begin` need not; None: there is nothing to
        encode, or no way to do it beside steps."""
        executor = self._executor
        if not (self._is_first and isinstance(executor, EncodingExecutor)):
            return None
        shown = [each for each in openings if each.patch_count]
        if not any(executor.needs_encoding(each.spans, each.patches) for each in shown):
            return None

        def encode() -> None:
            for each in shown:
                executor.encode_pictures(each.spans, each.patches)

        return encode

    def begin(
        self, work: Sequence[SessionRows], openings: Iterable[Opening], activations: Array | None
    ) -> PendingFrame:
        """Begin a step, while at most one is under way. Raises what keeps it from being computed."""
        openings = tuple(openings)
        for opening in openings:
            self._choose(opening)
            if opening.prefix is not None:
                prefix = opening.prefix
                self._executor.adopt(prefix.source, opening.session, prefix.length, is_moved=prefix.is_moved)
                if prefix.is_moved:
                    self._chosen.pop(prefix.source, None)
                    self._openings.pop(prefix.source, None)
            if opening.spans:
                patches = opening.patches if self._is_first else None
                self._executor.open_pictures(opening.session, opening.spans, patches)
            self._openings[opening.session] = replace(opening, prefix=None, patches=())
        known = tuple(self._with_picked(part) for part in work)
        if not self._is_first and activations is None:
            raise ValueError("a stage behind the first needs activations")
        tail = self._tail
        keeps_hidden = tail is not None and (self._is_shown(known) or tail.shows_rows(known, openings))
        launch = self._launcher(activations, openings, keeps_hidden)
        step = within_memory(lambda: launch(known), self._free_memory, _STEP)
        pending = PendingFrame(known, openings, step, launch, keeps_hidden)
        self._pending.append(pending)
        return pending

    def finish(self, pending: PendingFrame) -> Array | list[Picked]:
        """Activations for the next stage or, from the last one, the picked tokens. Raises what the step, or picking,
        failed with. In the order in which frames were begun."""
        self._settle(pending)
        if pending.error is not None:
            raise pending.error
        assert pending.outcome is not None
        return pending.outcome

    def step(
        self, work: Sequence[SessionRows], openings: Iterable[Opening], activations: Array | None
    ) -> Array | list[Picked]:
        """Begin a step and finish it."""
        return self.finish(self.begin(work, openings, activations))

    def remember(self, work: Sequence[SessionRows], picked: Sequence[Picked]) -> None:
        """Show the drafter, where there is one, what `step` has just computed and picked."""
        drafter, tail = self._drafter, self._tail
        if drafter is None or tail is None or not self._is_shown(work):
            return
        self._drafting(lambda: drafter.remember(work, picked, self._executor.final_rows()))
        for part in work:
            if not tail.has(part.session):
                # It ended while it was computed.
                drafter.close_session(part.session)

    def draft(self, work: Sequence[SessionRows]) -> list[Draft]:
        """Head drafts behind what was remembered of this work, where they are asked for and can be made."""
        drafter, tail = self._drafter, self._tail
        if tail is None or not isinstance(drafter, HeadDrafter):
            return []
        if not any(part.head_draft_tokens for part in work):
            return []
        open_work = [part for part in work if tail.has(part.session)]
        return self._drafting(lambda: drafter.draft(open_work, tail)) or []

    def await_drafter(self) -> None:
        """Keep what a drafter is to be shown until somebody calls `draft_with`."""
        self._drafter = DraftBacklog()

    def draft_with(self, drafter: HeadDrafter | None) -> None:
        """From now on draft with this; None: not at all."""
        if self._tail is None and drafter is not None:
            raise ValueError("only a last stage can draft")
        former, self._drafter = self._drafter, drafter
        if drafter is not None and isinstance(former, DraftBacklog):
            self._drafting(lambda: former.tell(drafter))
        if former is not None:
            former.close()

    def rest(self) -> None:
        """Nobody has asked for a while: see `RestingExecutor`."""
        if isinstance(self._executor, RestingExecutor):
            self._executor.rest()

    def close_sessions(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            self._executor.close_session(session)
            self._chosen.pop(session, None)
            self._openings.pop(session, None)
            if self._drafter is not None:
                self._drafter.close_session(session)
            if self._pending:
                # Its tokens are still to be picked, and thrown away.
                self._pending[-1].ended.append(session)
            elif self._tail is not None:
                self._tail.close(session)

    def reset(self) -> None:
        """Forget every session: the chain has a new shape and its driver replays what it needs."""
        drafted = [] if self._drafter is None else self._drafter.sessions()
        self.close_sessions({*self._executor.sessions(), *self._openings, *drafted})

    def session_length(self, session: int) -> int:
        return self._executor.session_length(session)

    def session_lengths(self) -> dict[int, int]:
        """The sessions that hold KV here, and how many tokens of each this stage can go on from."""
        lengths = {session: self._executor.session_length(session) for session in self._executor.sessions()}
        if self._tail is None:
            return lengths
        # A step that failed while picking has left the tail behind.
        return {session: min(length, self._tail.length(session)) for session, length in lengths.items()}

    def kv_usage(self) -> KvUsage:
        return self._executor.kv_usage()

    # Sessions that move with their KV

    @property
    def movable_kv(self) -> MovableKv | None:
        """Where rows of sessions are read and written; None: those of this executor cannot go elsewhere."""
        return self._executor if isinstance(self._executor, MovableKv) else None

    @property
    def is_last(self) -> bool:
        return self._tail is not None

    def movable_sessions(self) -> dict[int, int]:
        """Those that can go on elsewhere from what is held of them here, and how many tokens of each. A session with
        pictures, or one that is signed for, is more than its rows."""
        known = {id for id, each in self._openings.items() if not (each.spans or each.receipt_nonce)}
        return {id: length for id, length in self.session_lengths().items() if id in known and length}

    def opening_of(self, session: int) -> Opening:
        return self._openings[session]

    def tokens_of(self, session: int, start: int, stop: int) -> Sequence[int]:
        """As a last stage knows them; none elsewhere."""
        return () if self._tail is None else self._tail.tokens(session, start, stop)

    def take_over(self, opening: Opening) -> None:
        """A session begins here whose rows another stage has computed."""
        self._choose(opening)
        self._openings[opening.session] = opening
        if self._tail is not None:
            self._tail.open([opening])

    def follow(self, session: int, start: int, ids: Sequence[int]) -> None:
        """Tokens of a session that was taken over; they truncate it at `start`."""
        if self._tail is not None:
            self._tail.follow(SessionRows(session, start, tuple(ids)))

    def close(self) -> None:
        self._executor.close()
        if self._drafter is not None:
            self._drafter.close()

    # Inside

    def _choose(self, opening: Opening) -> None:
        if opening.adapter and opening.adapter not in self._adapters:
            raise UsageError(
                f"there is no adapter {opening.adapter!r} beside this model",
                hint=f"choose one of: {', '.join(self._adapters) or 'none is loaded'}",
            )
        if self._adapters:
            self._chosen[opening.session] = self._adapters.get(opening.adapter, 0)

    def _segments(self, work: Sequence[SessionRows]) -> list[Segment]:
        segments = segments_of(work)
        if not self._adapters:
            return segments
        for part in work:
            if part.session not in self._chosen:
                # Whoever drives it opens it again.
                raise RowGapError(f"session {part.session} was not opened here: its adapter is not known")
        return [replace(each, adapter=self._chosen[each.session]) for each in segments]

    def _launcher(
        self, activations: Array | None, openings: tuple[Opening, ...], keeps_hidden: bool
    ) -> Callable[[Sequence[SessionRows]], PendingStep | PendingPicks]:
        """What begins a step of these rows."""
        samplings = {each.session: each.sampling for frame in self._pending for each in frame.openings}
        samplings |= {each.session: each.sampling for each in openings}

        def launch(work: Sequence[SessionRows]) -> PendingStep | PendingPicks:
            inputs = activations
            if self._is_first or inputs is None:
                inputs = np.fromiter((token for part in work for token in part.ids), dtype=np.int64)
            segments = self._segments(work)
            if self._picker is None or self._tail is None:
                return self._executor.launch(segments, inputs, keeps_hidden=keeps_hidden)
            rules = self._tail.pick_rules(work, samplings)
            return self._picker.launch_picks(segments, inputs, rules, keeps_hidden=keeps_hidden)

        return launch

    def _with_picked(self, part: SessionRows) -> SessionRows:
        """The part with the token that a continued session goes on from, which may have to be waited for, unless it is
        on the device already."""
        if not part.is_continuation:
            return part
        if self._tail is None or not self.can_continue:
            raise UsageError("only a chain of one stage can continue sessions by itself")
        if self._pending and self._picker is not None and self._picker.can_continue(part.session, part.start):
            return part
        for pending in list(self._pending):
            self._settle(pending)
        return self._with_known(part, self._tail)

    def _with_known(self, part: SessionRows, tail: Tail) -> SessionRows:
        if not part.is_continuation:
            return part
        return replace(part, ids=(tail.picked_at(part.session, part.start), *part.ids[1:]))

    def _settle(self, pending: PendingFrame) -> None:
        """Wait for a step and pick its tokens, unless that was done."""
        if pending not in self._pending:
            return
        self._pending.remove(pending)
        try:
            pending.outcome = self._collect(pending)
        except Exception as error:
            pending.error = error
        if self._tail is not None:
            for session in pending.ended:
                self._tail.close(session)

    def _collect(self, pending: PendingFrame) -> Array | list[Picked]:
        tail = self._tail
        if tail is None:
            passed = self._wait(pending)
            assert isinstance(passed, np.ndarray)
            return passed
        begun = pending.work
        pending.work = tuple(self._with_known(part, tail) for part in begun)
        if pending.is_stale or self._has_guessed_wrong(begun, pending.work):
            pending.step = pending.launch(pending.work)
            for later in self._pending:
                later.is_stale = True
        out = self._wait(pending)
        tail.open(pending.openings)
        self._share_memories(pending.openings)
        hidden = self._executor.hidden_rows() if pending.keeps_hidden else None
        picked = tail.pick(pending.work, out, hidden, self._final_rows(pending.work, tail))
        self._guesses = {} if isinstance(out, np.ndarray) else _guesses_of(pending.work, out)
        return picked

    def _final_rows(self, work: Sequence[SessionRows], tail: Tail) -> Array | None:
        """The final states of all rows of the step that was just computed, where some session wants its own. A backend
        that has none gives none: that is no reason to fail the sessions beside it."""
        if not tail.wants_states(work):
            return None
        try:
            return self._executor.final_rows()
        except UnsupportedModelError as error:
            log.info("states were asked for: %s", error)
            return None

    def _has_guessed_wrong(self, begun: Sequence[SessionRows], known: Sequence[SessionRows]) -> bool:
        """Whether a continued row was computed with another token than was picked: where the device was not sure."""
        return any(
            before.ids[0] == PICKED and self._guesses.get(after.session) != after.ids[0]
            for before, after in zip(begun, known, strict=True)
        )

    def _wait(self, pending: PendingFrame) -> Array | PickedRows:
        """Some devices take their memory only now. Where another step has begun behind this one, with what it
        leaves, it cannot be computed again."""
        try:
            return pending.step.wait()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = device_memory_error(error, _STEP)
        self._free_memory()
        if self._pending:
            raise failed
        return within_memory(lambda: pending.launch(pending.work).wait(), self._free_memory, _STEP)

    def _free_memory(self) -> None:
        """Drafts save time at best: a drafter goes before an answer fails."""
        self.draft_with(None)
        free_caches()

    def _is_shown(self, work: Sequence[SessionRows]) -> bool:
        """Whether the drafter sees a step of this work: each one, but for single rows that nobody drafts behind on a
        device that has the next step under way meanwhile."""
        return self._drafter is not None and (
            not self._executor.is_asynchronous
            or any(part.head_draft_tokens or len(part.ids) > 1 for part in work)
        )

    def _share_memories(self, openings: Iterable[Opening]) -> None:
        """What sessions begin with, the drafter remembers of them too."""
        drafter = self._drafter
        if drafter is None:
            return
        for opening in openings:
            prefix = opening.prefix
            if prefix is not None:
                drafter.adopt(prefix.source, opening.session, prefix.length, is_moved=prefix.is_moved)

    def _drafting(self, work: Callable[[], _Result]) -> _Result | None:
        """None where memory ran out: nothing is drafted then any more."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("nothing is drafted any more: %s", device_memory_error(error, "it drafted").message)
        self._free_memory()
        return None


def _guesses_of(work: Sequence[SessionRows], rows: PickedRows) -> dict[int, int]:
    guesses, row = {}, 0
    for part in work:
        row += part.logit_rows
        if part.logit_rows:
            guesses[part.session] = rows.guess(row - 1)
    return guesses

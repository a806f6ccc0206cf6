"""A chain that exists in a test alone: no threads, every result delivered by hand.

It is honest about what a real one does: it takes frames in order, refuses gaps, sessions that were never opened
and more KV than it has, and picks tokens that depend on every token before them. A wrong replay therefore gives
a wrong answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.effects import Effect
from shardcompute.core.errors import CapacityError, RowGapError, ShardComputeError, UsageError
from shardcompute.core.generation import Delta, GenerationRequest, Speculation, TokenChoice
from shardcompute.core.steps import Frame, Opening, Picked, SessionRows
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape, DriverLimits

LETTERS = 26
SHAPE = ChainShape(capacity_tokens=100 * PAGE_TOKENS, can_share=False)
CONTINUING = ChainShape(capacity_tokens=100 * PAGE_TOKENS, can_share=False, can_continue=True)
PIPELINE = ChainShape(
    capacity_tokens=100 * PAGE_TOKENS, stages=3, max_rows=16, max_logit_rows=8, can_share=False
)

Outcome = tuple[int, list[Picked] | ShardComputeError]


class Letters:
    """Token i is the i-th letter; 26 and above stand for nothing."""

    special_ids = frozenset({LETTERS})
    eos_ids = special_ids

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id >= LETTERS else bytes([ord("a") + token_id])


def next_token(tokens: Sequence[int]) -> int:
    return (31 * sum((i + 1) * token for i, token in enumerate(tokens)) + len(tokens)) % LETTERS


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What an undisturbed chain answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class FakeChain:
    """A `ChainPort`: `compute` runs the oldest frame, `deliver` tells the driver about any computed one."""

    capacity_pages: int = 100
    frames: list[Frame] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    computed: list[Outcome] = field(default_factory=list)
    replayed: list[tuple[SessionRows, Opening | None]] = field(default_factory=list)
    missed: list[tuple[int, float, float]] = field(default_factory=list)
    """Frames that the driver has had looked for."""
    most_rows: int = 0
    forgets_sources: bool = False
    _inbox: deque[Frame | tuple[int, ...]] = field(default_factory=deque)
    _tokens: dict[int, list[int]] = field(default_factory=dict)
    _opened: set[int] = field(default_factory=set)
    _picks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The token that was picked last for each session, and its position."""

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._inbox.append(frame)
        self.most_rows = max(self.most_rows, frame.rows)

    def close_sessions(self, sessions: Sequence[int]) -> None:
        self.closed.extend(sessions)
        self._inbox.append(tuple(sessions))

    def replay(self, work: SessionRows, opening: Opening | None) -> None:
        self.replayed.append((work, opening))

    def overdue(self, frame: Frame, waited_s: float, allowed_s: float) -> None:
        self.missed.append((frame.sequence, waited_s, allowed_s))

    @property
    def held_sessions(self) -> set[int]:
        return set(self._tokens)

    def compute(self) -> bool:
        """Take one thing from the inbox; False when it is empty."""
        if not self._inbox:
            return False
        item = self._inbox.popleft()
        if isinstance(item, Frame):
            try:
                self.computed.append((item.sequence, self._step(item)))
            except ShardComputeError as error:
                self.computed.append((item.sequence, error))
        else:
            for session in item:
                self._tokens.pop(session, None)
                self._opened.discard(session)
        return True

    def deliver(self, driver: Driver, index: int = 0) -> None:
        sequence, outcome = self.computed.pop(index)
        if isinstance(outcome, ShardComputeError):
            driver.step_failed(sequence, outcome)
        else:
            driver.take_results(sequence, outcome)

    def run(self, driver: Driver, steps: int = 10_000) -> None:
        """Compute and deliver until nothing is left to do, or `steps` frames long."""
        while steps and (self.compute() or self.computed):
            if self.computed:
                self.deliver(driver)
                steps -= 1

    @property
    def waiting(self) -> list[Frame]:
        """Frames that were sent and are not computed yet."""
        return [item for item in self._inbox if isinstance(item, Frame)]

    def forget(self, session: int) -> None:
        """The chain loses what it has of a session."""
        self._tokens.pop(session)
        self._opened.discard(session)

    def skip(self, frame: Frame) -> None:
        """This frame is never computed."""
        self._inbox.remove(frame)

    def sent_to(self, session: int) -> list[SessionRows]:
        return [part for frame in self.frames for part in frame.work if part.session == session]

    def _adopt(self, frame: Frame) -> None:
        for opening in frame.openings:
            prefix = opening.prefix
            if prefix is None:
                continue
            source = self._tokens.get(prefix.source, [])
            if self.forgets_sources or len(source) < prefix.length:
                raise CapacityError("the prefix is not here")
            lengths = {session: len(tokens) for session, tokens in self._tokens.items()}
            lengths[opening.session] = prefix.length
            if prefix.is_moved:
                del lengths[prefix.source]
            if sum(-(-length // PAGE_TOKENS) for length in lengths.values()) > self.capacity_pages:
                raise CapacityError("KV memory is full")
            self._tokens[opening.session] = source[: prefix.length]
            if prefix.is_moved:
                del self._tokens[prefix.source]

    def _step(self, frame: Frame) -> list[Picked]:
        self._adopt(frame)
        for part in frame.work:
            if part.start > len(self._tokens.get(part.session, [])):
                raise RowGapError(f"session {part.session} has a gap")
        frame = replace(frame, work=tuple(self._with_picked(part) for part in frame.work))
        self._take_memory(frame)
        self._opened.update(opening.session for opening in frame.openings)
        return [picked for part in frame.work for picked in self._pick(part)]

    def _with_picked(self, part: SessionRows) -> SessionRows:
        if not part.is_continuation:
            return part
        position, token = self._picks.get(part.session, (-1, 0))
        if position != part.start:
            raise RowGapError(f"nothing was picked for position {part.start} of session {part.session}")
        return replace(part, ids=(token, *part.ids[1:]))

    def _take_memory(self, frame: Frame) -> None:
        lengths = {session: len(tokens) for session, tokens in self._tokens.items()}
        lengths |= {part.session: part.start + len(part.ids) for part in frame.work}
        if sum(-(-length // PAGE_TOKENS) for length in lengths.values()) > self.capacity_pages:
            raise CapacityError("KV memory is full")
        for part in frame.work:
            tokens = self._tokens.setdefault(part.session, [])
            tokens[part.start :] = part.ids

    def _pick(self, part: SessionRows) -> list[Picked]:
        if part.session not in self._opened:
            raise UsageError(f"session {part.session} was never opened")
        stop = part.start + len(part.ids)
        tokens = self._tokens[part.session]
        if part.targets:
            return [
                Picked(part.session, stop - part.logit_rows + i, TokenChoice(target, -float(target)), True)
                for i, target in enumerate(part.targets)
            ]
        picked = [
            Picked(part.session, row, TokenChoice(next_token(tokens[: row + 1])))
            for row in range(stop - part.logit_rows, stop)
        ]
        if picked:
            self._picks[part.session] = (stop, picked[-1].choice.id)
        return picked


@dataclass
class Caller:
    """Collects what a generation emits, and insists that nothing comes after its end."""

    deltas: list[Delta] = field(default_factory=list)
    error: ShardComputeError | None = None

    def __call__(self, emitted: Delta | ShardComputeError) -> None:
        assert not self.is_over, "something was emitted after the end"
        if isinstance(emitted, Delta):
            self.deltas.append(emitted)
        else:
            self.error = emitted

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.finish is not None

    @property
    def finish(self) -> str | None:
        return self.deltas[-1].finish if self.deltas else None

    @property
    def tokens(self) -> list[int]:
        return [choice.id for delta in self.deltas for choice in delta.tokens]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def make_driver(**limits: int) -> Driver:
    tokenizer = cast(Tokenizer, Letters())
    known = DriverLimits(**{"vocab_size": 30, "context_length": 1000} | limits)
    return Driver(tokenizer, replace(known, speculation=Speculation("off")), call_later=never)


def never(delay_s: float, effect: Effect) -> Callable[[], None]:
    """A `CallLater` of a test in which no time passes."""
    return lambda: None


def ask(length: int = 5, max_tokens: int = 6, *, first: int = 0, **options: Any) -> GenerationRequest:
    return GenerationRequest(tuple((first + i) % LETTERS for i in range(length)), max_tokens, **options)


def submit(driver: Driver, request: GenerationRequest) -> tuple[int, Caller]:
    caller = Caller()
    return driver.submit(request, caller), caller


def connected(shape: ChainShape = SHAPE, pages: int = 100, **limits: int) -> tuple[Driver, FakeChain]:
    driver, chain = make_driver(**limits), FakeChain(pages)
    driver.connect(chain, shape)
    return driver, chain

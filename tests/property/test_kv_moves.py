"""Moves with KV: whatever fails while sessions are copied, no token is lost, doubled or another one.

Two stages hold a model's layers; a third machine takes over those of both. What a row holds is a digest of the tokens
up to it, so that a row which was computed from other tokens, or not copied anew, is told from the right one. The next
token is picked from the rows themselves. The ledgers are those of `node.worker.migration`; links are queues that may
lose their end.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.core.errors import LinkError
from shardcompute.node.worker.migration.ledgers import ReceiveLedger, RowSpan, SendLedger

LAYERS = (range(2), range(2, 5))
PROMPT = (3, 1, 4, 1, 5)
Rows = dict[int, list[int]]
"""By session: a digest for each row."""


def digest(tokens: tuple[int, ...], layers: range) -> int:
    content = repr((tokens, layers.start)).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big")


def pick(stages: list[list[int]]) -> int:
    """The token behind a session's rows: what all layers hold of all of them decides."""
    return int.from_bytes(hashlib.blake2b(repr(stages).encode(), digest_size=2).digest(), "big") % 997


def truth(session: int, count: int) -> list[int]:
    """What a session answers undisturbed."""
    tokens = [session, *PROMPT]
    for _ in range(count):
        tokens.append(
            pick([[digest(tuple(tokens[: i + 1]), each) for i in range(len(tokens))] for each in LAYERS])
        )
    return tokens[1 + len(PROMPT) :]


@dataclass
class Source:
    """A stage that computes, and its end of the copy."""

    layers: range
    rows: Rows = field(default_factory=dict)
    ledger: SendLedger = field(default_factory=SendLedger)
    line: deque[tuple[str, object, object]] = field(default_factory=deque)
    is_cut: bool = False

    def write(self, session: int, start: int, tokens: tuple[int, ...]) -> None:
        self.ledger.wrote(session, start)
        kept = self.rows.setdefault(session, [])[:start]
        self.rows[session] = kept + [
            digest(tokens[: position + 1], self.layers) for position in range(start, len(tokens))
        ]

    def send(self, most_rows: int) -> bool:
        lengths = {session: len(rows) for session, rows in self.rows.items()}
        ended = self.ledger.take_ended(lengths)
        if ended:
            self.line.append(("ended", ended, None))
        span = self.ledger.take_next(lengths, most_rows)
        if span is not None:
            self.line.append(("rows", span, self.rows[span.session][span.start : span.stop]))
        return span is not None

    def seal(self) -> None:
        while self.send(4):
            pass
        self.line.append(("sealed", {session: len(rows) for session, rows in self.rows.items()}, None))


@dataclass
class Target:
    """The machine that takes over: rows of each source, written as they come."""

    ledger: ReceiveLedger = field(default_factory=lambda: ReceiveLedger(range(5), LAYERS))
    rows: list[Rows] = field(default_factory=lambda: [{}, {}])
    is_over: bool = False

    def take(self, source: int, message: tuple[str, object, object]) -> None:
        kind, what, content = message
        if kind == "rows":
            assert isinstance(what, RowSpan)
            assert isinstance(content, list)
            assert self.ledger.check(source, what)
            held = self.rows[source].setdefault(what.session, [])
            # As in a KV cache, nothing is cut: what lies behind is overwritten, or counts no more.
            held[what.start : what.stop] = content
            self.ledger.took(source, what)
        elif kind == "ended":
            assert isinstance(what, list)
            for session in self.ledger.ended(source, what):
                for rows in self.rows:
                    rows.pop(session, None)
        else:
            assert isinstance(what, dict)
            self.ledger.seal(source, what)


class Chain:
    """A driver with its sessions, before and after the move."""

    def __init__(self) -> None:
        self.sources = [Source(layers) for layers in LAYERS]
        self.target = Target()
        self.known: dict[int, list[int]] = {}
        self.opened = 0

    def open(self) -> None:
        self.opened += 1
        tokens = [self.opened, *PROMPT]
        self.known[self.opened] = tokens
        for source in self.sources:
            source.write(self.opened, 0, tuple(tokens))

    def answer(self, session: int, drafted: int, *, reaches_all: bool = True) -> None:
        """The next token comes, behind drafts that turn out wrong. Where a frame is stopped amid the chain, only the
        first stage has written, and nothing comes of it."""
        tokens = self.known[session]
        rows = (*tokens, *range(9000, 9000 + drafted))
        for source in self.sources if reaches_all else self.sources[:1]:
            source.write(session, len(tokens) - 1, rows)
        if reaches_all:
            tokens.append(pick([source.rows[session][: len(tokens)] for source in self.sources]))

    def close(self, session: int) -> None:
        del self.known[session]
        for source in self.sources:
            source.rows.pop(session, None)

    def start_again(self, session: int, first: int) -> None:
        """A session that gave its memory up, and computes all of it anew: one source is asked for rows in between."""
        for source in self.sources:
            source.rows.pop(session)
        self.sources[first].send(1)
        for source in self.sources:
            source.write(session, 0, tuple(self.known[session]))

    def deliver(self, source: int, most: int) -> None:
        line = self.sources[source].line
        for _ in range(min(most, len(line))):
            message = line.popleft()
            if self.sources[source].is_cut or self.target.is_over:
                continue
            try:
                self.target.take(source, message)
            except LinkError:
                self.target.is_over = True

    def move(self) -> list[dict[int, list[int]]]:
        """The epoch is over: the rest is sent, and the target goes on with what it has whole. Its rows then."""
        for index, source in enumerate(self.sources):
            source.seal()
            self.deliver(index, len(source.line))
        whole = {} if self.target.is_over else self.target.ledger.whole()
        return [
            {session: rows[session][:length] for session, length in whole.items()}
            for rows in self.target.rows
        ]


ACTIONS = st.one_of(
    st.tuples(st.just("open")),
    st.tuples(st.just("answer"), st.integers(0, 4), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("close"), st.integers(0, 4)),
    st.tuples(st.just("again"), st.integers(0, 4), st.integers(0, 1)),
    st.tuples(st.just("send"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("deliver"), st.integers(0, 1), st.integers(1, 5)),
)
FAULTS = st.tuples(st.sampled_from(["cut", "lose"]), st.integers(0, 1), st.integers(0, 40))
"""What happens to which source's link, and before which action."""


def act(chain: Chain, action: tuple[object, ...]) -> None:
    kind, *numbers = action
    sessions = sorted(chain.known)
    which = int(str(numbers[0])) if numbers else 0
    if kind == "open" and len(sessions) < 4:
        chain.open()
    elif kind == "answer" and sessions:
        drafted, stops = int(str(numbers[1])), bool(numbers[2])
        chain.answer(sessions[which % len(sessions)], drafted, reaches_all=not stops)
    elif kind == "close" and sessions:
        chain.close(sessions[which % len(sessions)])
    elif kind == "again" and sessions:
        chain.start_again(sessions[which % len(sessions)], int(str(numbers[1])))
    elif kind == "send":
        chain.sources[which].send(int(str(numbers[1])))
    elif kind == "deliver":
        chain.deliver(which, int(str(numbers[1])))
    elif kind == "cut":
        chain.sources[which].is_cut = True
    elif kind == "lose" and chain.sources[which].line:
        # A message of a link is lost only with all that follow it.
        chain.sources[which].line.pop()
        chain.sources[which].is_cut = True


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.none() | FAULTS, st.integers(1, 5))
def test_whatever_fails_while_sessions_are_copied_they_answer_the_same(
    actions: list[tuple[object, ...]], fault: tuple[str, int, int] | None, further: int
) -> None:
    chain = Chain()
    chain.open()
    for index, action in enumerate(actions):
        if fault is not None and fault[2] == index:
            act(chain, fault)
        act(chain, action)
    held = chain.move()
    for session, tokens in chain.known.items():
        rows = [each.get(session, []) for each in held]
        # The driver's rule: a session goes on where all of it is known up to its last token, and else starts again.
        kept = min(len(each) for each in rows)
        start = len(tokens) - 1 if kept >= len(tokens) - 1 else 0
        for _ in range(further):
            for layers, each in zip(LAYERS, rows, strict=True):
                each[start:] = [digest(tuple(tokens[: i + 1]), layers) for i in range(start, len(tokens))]
            start = len(tokens)
            tokens.append(pick(rows))
        assert tokens[1 + len(PROMPT) :] == truth(session, len(tokens) - 1 - len(PROMPT))


def test_an_undisturbed_copy_brings_everything() -> None:
    chain = Chain()
    chain.open()
    chain.open()
    for _ in range(3):
        chain.answer(1, 2)
        chain.sources[0].send(4)
        chain.deliver(0, 1)
    held = chain.move()
    assert [set(each) for each in held] == [{1, 2}, {1, 2}]
    for source, rows in zip(chain.sources, held, strict=True):
        assert rows == source.rows

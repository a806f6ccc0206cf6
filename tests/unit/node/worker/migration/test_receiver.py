"""What a shard takes over: whole sessions from those who were announced, and nothing from anybody else."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.errors import LinkError
from shardcompute.core.generation import Sampling
from shardcompute.core.settings import Settings
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.node.rpc.commands import ExpectKv, KvHolder, Peer
from shardcompute.node.rpc.frames import opened_of
from shardcompute.node.worker.migration import receiver as receiver_room
from shardcompute.node.worker.migration.receiver import KvReceiver
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.wire import (
    KvAccepted,
    KvEnded,
    KvOffer,
    KvPiece,
    KvSealed,
    Link,
    Message,
    Refused,
    pack_ids,
)
from support.models.tiny_checkpoint import save_tiny_llama

OPTIONS = ExecutorOptions(kv_bytes=1 << 20, context_length=200, max_rows=32, max_logit_rows=8)
PROMPT = (10, 20, 30, 40, 50)
SAMPLED = Sampling(temperature=0.9, seed=11, frequency_penalty=0.4)
PLACE = ("chain", 0, 2, None)
EXPECTED = ExpectKv(
    chain="chain", number=5, start=0, stop=2, sources=[KvHolder(Peer("source", "tcp://source"), 0, 2)]
)


class ScriptedLink:
    """A link on which all has come already, and what was answered."""

    def __init__(self, peer: str, *sent: tuple[Message, bytes]) -> None:
        self.peer = peer
        self.answers: list[Message] = []
        self._sent = deque(sent)

    def receive(self, timeout_s: float | None = None) -> tuple[Message, memoryview]:
        if not self._sent:
            raise LinkError("the link ended")
        message, body = self._sent.popleft()
        return message, memoryview(body)

    def send(self, message: Message, body: object = ()) -> None:
        self.answers.append(message)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=2)
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder.parent))) as opened:
        yield opened


@pytest.fixture
def open_stage(checkpoint: Checkpoint) -> Callable[[], StageRuntime]:
    return lambda: StageRuntime(open_shard(checkpoint, options=OPTIONS), is_first=True, is_last=True)


def answer(stage: StageRuntime, session: int, tokens: list[int], count: int) -> list[int]:
    """Go on with a session from its tokens, the last of which was not computed yet; all of them afterwards."""
    for _ in range(count):
        work = SessionRows(session, len(tokens) - 1, (tokens[-1],), logit_rows=1)
        picked = stage.step([work], [], None)
        assert isinstance(picked, list)
        tokens = [*tokens, picked[0].choice.id]
    return tokens


def begin(stage: StageRuntime, session: int) -> list[int]:
    opening = Opening(session, SAMPLED, len(PROMPT))
    picked = stage.step([SessionRows(session, 0, PROMPT, logit_rows=1)], [opening], None)
    assert isinstance(picked, list)
    return answer(stage, session, [*PROMPT, picked[0].choice.id], 4)


def rows_of(stage: StageRuntime, session: int, start: int, stop: int) -> tuple[KvPiece, bytes]:
    assert stage.movable_kv is not None
    body = bytes(stage.movable_kv.read_kv(session, range(2), range(start, stop)))
    ids = pack_ids(stage.tokens_of(session, start, stop))
    opened = opened_of(stage.opening_of(session)) if start == 0 else None
    digest = hashlib.sha256(body).digest()
    return KvPiece(session, start, stop - start, len(body), digest, ids, opened), body


def offer_of(stage: StageRuntime) -> tuple[KvOffer, bytes]:
    assert stage.movable_kv is not None
    return KvOffer("chain", 5, 0, 2, stage.movable_kv.kv_format), b""


def receiver_for(target: StageRuntime) -> KvReceiver:
    receiver = KvReceiver(lambda task: task())
    receiver.expect(EXPECTED, target)
    return receiver


def serve(receiver: KvReceiver, link: ScriptedLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_room, "_TAKE_S", 0.0)
    receiver.serve(cast(Link, link))


def test_a_session_goes_on_with_its_tokens_and_its_sampling(
    open_stage: Callable[[], StageRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = open_stage(), open_stage()
    tokens = begin(source, 1)
    length = source.session_length(1)
    sent = [rows_of(source, 1, 0, 4), rows_of(source, 1, 2, length)]
    receiver = receiver_for(target)
    link = ScriptedLink("source", offer_of(source), *sent, (KvSealed({1: length}), b""))
    # What nobody takes in time is dropped: here it is taken before that is looked at.
    taken: list[Any] = []
    send = link.send

    def take_at_the_end(message: Message, body: object = ()) -> None:
        send(message, body)
        if len(link.answers) == 2:
            taken.append(receiver.take(PLACE, 5))
            taken[0].install()

    link.send = take_at_the_end  # type: ignore[method-assign]
    serve(receiver, link, monkeypatch)
    assert link.answers == [KvAccepted(), KvAccepted()]
    assert target.session_lengths() == {1: length}
    assert answer(target, 1, tokens, 6) == answer(source, 1, tokens, 6)


@pytest.mark.parametrize(
    ("peer", "changed"),
    [
        ("stranger", {}),
        ("source", {"number": 6}),
        ("source", {"stop": 1}),
        ("source", {"chain": "another"}),
        ("source", {"format": "host float16 2x2x8"}),
    ],
)
def test_offers_that_nobody_announced_are_refused(
    open_stage: Callable[[], StageRuntime],
    monkeypatch: pytest.MonkeyPatch,
    peer: str,
    changed: dict[str, Any],
) -> None:
    source, target = open_stage(), open_stage()
    begin(source, 1)
    offer, _ = offer_of(source)
    link = ScriptedLink(peer, (replace(offer, **changed), b""), rows_of(source, 1, 0, 4))
    serve(receiver_for(target), link, monkeypatch)
    assert [type(each) for each in link.answers] == [Refused]
    assert target.session_lengths() == {}


@pytest.mark.parametrize("fault", ["damaged", "short", "gap", "no tokens", "another's opening", "ends early"])
def test_a_copy_that_is_not_sound_brings_nothing(
    open_stage: Callable[[], StageRuntime], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    source, target = open_stage(), open_stage()
    begin(source, 1)
    first, body = rows_of(source, 1, 0, 4)
    rest: tuple[Message, bytes] = rows_of(source, 1, 4, 6)
    match fault:
        case "damaged":
            rest = rest[0], bytes(len(rest[1]))
        case "short":
            rest = replace(rest[0], count=1, ids=b""), rest[1]
        case "gap":
            rest = rows_of(source, 1, 5, 6)
        case "no tokens":
            rest = replace(rest[0], ids=b""), rest[1]
        case "another's opening":
            assert first.opened is not None
            rest = replace(first, opened=replace(first.opened, session=2)), body
        case _:
            rest = KvEnded([]), b""
    receiver = receiver_for(target)
    # Were it sound, this would end it well.
    last: list[tuple[Message, bytes]] = [] if fault == "ends early" else [(KvSealed({1: 6}), b"")]
    link = ScriptedLink("source", offer_of(source), (first, body), rest, *last)
    with pytest.raises(LinkError):
        serve(receiver, link, monkeypatch)
    assert target.session_lengths() == {}
    assert receiver.take(PLACE, 5) is None


def test_a_session_without_room_is_refused_and_the_others_come(
    checkpoint: Checkpoint, open_stage: Callable[[], StageRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_stage()
    for session in (1, 2):
        begin(source, session)
    assert source.movable_kv is not None
    one_page = ExecutorOptions(
        kv_bytes=source.movable_kv.kv_bytes(2, 64), context_length=200, max_rows=32, max_logit_rows=8
    )
    target = StageRuntime(open_shard(checkpoint, options=one_page), is_first=True, is_last=True)
    receiver = receiver_for(target)
    sent = [rows_of(source, 1, 0, 4), rows_of(source, 2, 0, 4), rows_of(source, 2, 4, 6)]
    sent.append(rows_of(source, 1, 4, 6))
    link = ScriptedLink("source", offer_of(source), *sent)
    copy = receiver._copies[PLACE]
    with pytest.raises(LinkError):
        serve(receiver, link, monkeypatch)
    copy.ledger.seal(0, {1: 6, 2: 6})
    assert copy.ledger.whole() == {1: 6}


def test_a_copy_that_is_not_sealed_in_time_is_done_without(
    open_stage: Callable[[], StageRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_room, "_SEAL_S", 0.0)
    target = open_stage()
    receiver = receiver_for(target)
    assert receiver.take(PLACE, 6) is None
    assert receiver.take(PLACE, 5) is None
    assert receiver.take(PLACE, 5) is None


def test_sources_must_have_every_layer_once(open_stage: Callable[[], StageRuntime]) -> None:
    source = EXPECTED.sources[0]
    for sources in ([], [replace(source, stop=1)], [source, source], [replace(source, start=1)]):
        with pytest.raises(LinkError):
            KvReceiver(lambda task: task()).expect(replace(EXPECTED, sources=sources), open_stage())

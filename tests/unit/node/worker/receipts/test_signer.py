"""Both ends of a link sign for the same bytes, whatever form they travelled in and however often."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.core.steps import Opening, Picked, SessionRows
from shardcompute.node.rpc.commands import Peer, Wire
from shardcompute.node.rpc.frames import segment_of
from shardcompute.node.worker.activation_log import ActivationLog, Chunk, replay_frames
from shardcompute.node.worker.receipts.signer import StepRows, StepSigner
from shardcompute.node.worker.receipts.stage_receipts import STEPS_AT_ONCE, StageReceipts
from shardcompute.security import ClusterAuthority, Credentials, NodeIdentity, Role
from shardcompute.security.receipts import BlockCommitment, StageClaim, StageTranscript, new_receipt_id
from shardcompute.wire import CODECS, Message, SessionCommit, StageSigned, StepFrame, find_codec

DRIVER = Peer("driver", "inproc://driver")
ROWS, WIDTH, SESSION = 40, 96, 5
CLAIM = StageClaim(
    node="",
    start=0,
    stop=1,
    is_last=False,
    model="m",
    fingerprint="f",
    form="int8",
    exactness="e",
    version="1",
)
NONCE = bytes.fromhex(new_receipt_id().removeprefix("rcpt-"))


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    folder = tmp_path_factory.mktemp("node")
    authority = ClusterAuthority.create(folder / "authority", "lab", now_s=time.time())
    identity = NodeIdentity.open(folder / "node")
    pem = authority.issue(
        identity.certificate_request(), node_id=identity.node_id, roles={Role.WORKER}, now_s=time.time()
    )
    return Credentials(identity, pem, authority.certificate_pem)


class Side:
    """A signer, and what it told the driver."""

    def __init__(self, credentials: Credentials) -> None:
        self.told: list[StageSigned] = []
        self.signer = StepSigner(lambda: credentials, self._send)

    def _send(self, peer: Peer, message: Message) -> None:
        assert peer == DRIVER
        assert isinstance(message, StageSigned)
        self.told.append(message)

    @property
    def commitments(self) -> list[BlockCommitment]:
        parts = [
            msgspec.msgpack.decode(each.signed, type=StageTranscript) for each in self.told if each.signed
        ]
        return [each for part in parts for each in part.commitments]


def opening() -> Opening:
    return Opening(SESSION, Sampling(), ROWS, receipt_nonce=NONCE)


def frame_of(parts: Sequence[SessionRows], codec: str = "", width: int = 0) -> StepFrame:
    rows = sum(len(part.ids) for part in parts)
    return StepFrame("chain", 2, 1, [segment_of(part) for part in parts], rows, width, codec)


def over(length: int) -> SessionCommit:
    return SessionCommit("chain", 2, SESSION, length, True)


@pytest.mark.parametrize("codec", CODECS)
def test_sender_receiver_and_successor(credentials: Credentials, codec: str) -> None:
    found = find_codec(codec)
    values = np.random.default_rng(3).standard_normal((ROWS, WIDTH)).astype(np.float32)
    part = SessionRows(SESSION, 0, tuple(range(ROWS)))
    packed = found.rows.pack(values)
    chunk = Chunk(found.rows.name, WIDTH, packed)
    sender, receiver, successor = (Side(credentials) for _ in range(3))
    sender.signer.write(
        StepRows(frame_of([part]), memoryview(b""), [part], [opening()], chunk, CLAIM, DRIVER)
    )
    body = memoryview(b"".join(found.wrap(packed)))
    picked: list[Picked] = []
    last = replace(CLAIM, is_last=True)
    receiver.signer.write(
        StepRows(frame_of([part], codec, WIDTH), body, [part], [opening()], picked, last, DRIVER)
    )
    log = ActivationLog(1 << 20)
    log.append([part], [opening()], chunk)
    # It cannot read that form: it is told the same values exactly.
    for frame, told in replay_frames(log, "chain", 2, Wire(codecs=("exact",))):
        bodies = memoryview(b"".join(told))
        successor.signer.write(StepRows(frame, bodies, [part], [opening()], picked, last, DRIVER))
    for side in (sender, receiver, successor):
        side.signer.cut(over(ROWS), DRIVER)
    sent = [digest for each in sender.commitments for digest in each.outputs]
    got = [digest for each in receiver.commitments for digest in each.inputs]
    told_again = [digest for each in successor.commitments for digest in each.inputs]
    assert len(sent) == 2
    assert sent == got == told_again
    assert all(each.is_replay for each in successor.commitments)


def test_of_a_frame_with_several_sessions_only_those_that_ask(credentials: Credentials) -> None:
    side = Side(credentials)
    others = SessionRows(8, 0, (1, 2, 3), 1)
    own = SessionRows(SESSION, 0, tuple(range(4)), 1)
    picked = [Picked(8, 2, TokenChoice(50)), Picked(SESSION, 3, TokenChoice(60))]
    last = replace(CLAIM, is_last=True)
    openings = [Opening(8, Sampling(), 3), opening()]
    frame = frame_of([others, own])
    side.signer.write(StepRows(frame, memoryview(b""), [others, own], openings, picked, last, DRIVER))
    side.signer.cut(SessionCommit("chain", 2, 8, 3, True), DRIVER)
    assert [each.signed for each in side.told] == [b""], "the other has nothing to say, and says so"
    side.signer.cut(over(4), DRIVER)
    [made] = side.commitments
    assert (made.start, made.stop) == (0, 4)
    assert side.told[-1].is_over


def test_what_a_driver_was_not_told_is_told_with_the_next_shape(credentials: Credentials) -> None:
    side = Side(credentials)
    part = SessionRows(SESSION, 0, tuple(range(ROWS)))
    chunk = Chunk("exact", WIDTH, find_codec("exact").rows.pack(np.zeros((ROWS, WIDTH), np.float32)))
    side.signer.write(StepRows(frame_of([part]), memoryview(b""), [part], [opening()], chunk, CLAIM, None))
    side.signer.cut(SessionCommit("chain", 2, SESSION, ROWS, False), DRIVER)
    side.signer.cut(SessionCommit("chain", 2, SESSION, ROWS, False), DRIVER)
    numbers = [each.number for each in side.commitments]
    assert numbers == [0, 0]
    side.signer.cut(over(ROWS), DRIVER)
    assert [each.number for each in side.commitments] == [0, 0], "nothing is new"
    assert side.told[-1].is_over


def test_a_stage_without_a_key_signs_for_nothing() -> None:
    silent = StageReceipts(None, lambda peer, message: pytest.fail("it said something"))
    part = SessionRows(SESSION, 0, (1,))
    assert not silent.concerns("chain", [part], [opening()])
    silent.commit(over(1), DRIVER)
    silent.close()


def test_the_thread_signs_and_ends(credentials: Credentials) -> None:
    side = Side(credentials)
    receipts = StageReceipts(lambda: credentials, side._send)
    part = SessionRows(SESSION, 0, tuple(range(ROWS)))
    assert not receipts.concerns("chain", [part], [])
    assert receipts.concerns("chain", [part], [opening()])
    chunk = Chunk("exact", WIDTH, find_codec("exact").rows.pack(np.zeros((ROWS, WIDTH), np.float32)))
    receipts.computed(StepRows(frame_of([part]), memoryview(b""), [part], [opening()], chunk, CLAIM, DRIVER))
    receipts.commit(over(ROWS), DRIVER)
    receipts.close()
    assert [(each.start, each.stop) for each in side.commitments] == [(0, ROWS)]
    assert not receipts.concerns("chain", [part], []), "the answer is over"


@pytest.mark.parametrize("count", [1, STEPS_AT_ONCE - 1, STEPS_AT_ONCE, 3 * STEPS_AT_ONCE + 1])
def test_steps_that_are_handed_over_together_are_all_signed_for(credentials: Credentials, count: int) -> None:
    side = Side(credentials)
    receipts = StageReceipts(lambda: credentials, side._send)
    rows = find_codec("exact").rows.pack(np.zeros((1, WIDTH), np.float32))
    for at in range(count):
        part, openings = SessionRows(SESSION, at, (at,)), [opening()] if at == 0 else []
        assert receipts.concerns("chain", [part], openings)
        chunk = Chunk("exact", WIDTH, rows)
        receipts.computed(StepRows(frame_of([part]), memoryview(b""), [part], openings, chunk, CLAIM, DRIVER))
    receipts.commit(over(count), DRIVER)
    receipts.close()
    assert [each.stop for each in side.commitments][-1] == count


def test_a_step_that_would_take_too_much_gives_the_receipt_up(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from shardcompute.node.worker.receipts import stage_receipts

    monkeypatch.setattr(stage_receipts, "_MOST_WAITING_BYTES", 100)
    side = Side(credentials)
    receipts = StageReceipts(lambda: credentials, side._send)
    part = SessionRows(SESSION, 0, tuple(range(ROWS)))
    assert receipts.concerns("chain", [part], [opening()])
    chunk = Chunk("exact", WIDTH, find_codec("exact").rows.pack(np.zeros((ROWS, WIDTH), np.float32)))
    receipts.computed(StepRows(frame_of([part]), memoryview(b""), [part], [opening()], chunk, CLAIM, DRIVER))
    receipts.commit(over(ROWS), DRIVER)
    receipts.close()
    assert [each.signed for each in side.told] == [b""]

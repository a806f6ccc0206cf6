"""What members say of an answer is taken from those who have a part in it: of themselves, in order, within bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.core.steps import Opening, Prefix
from shardcompute.node.driver.receipts import collector
from shardcompute.node.driver.receipts.collector import ReceiptCollector, check_receipt
from shardcompute.node.driver.receipts.record import AnswerRecord
from shardcompute.node.driver.receipts.store import ReceiptStore, pack_text
from shardcompute.security import Credentials
from shardcompute.security.receipts import Receipt, StageTranscript, read_receipt, verify_receipt
from shardcompute.wire import StageSigned
from support.paper_chain import EPOCH, FRAME, SESSION, PaperChain, PaperStage, tokens_of

PROMPT, TOKENS = 40, 100


@dataclass
class Port:
    """A chain's epoch that writes down what it was asked to have signed."""

    nodes: list[str]
    epoch: int = EPOCH
    chain: str = "paper-1"
    cuts: list[tuple[int, bool]] = field(default_factory=list)

    def commit_session(self, session: int, length: int, *, is_over: bool) -> None:
        assert session == SESSION
        self.cuts.append((length, is_over))


def now(effect: Callable[[], None]) -> None:
    effect()


def opening(prefix: int = 0) -> Opening:
    return Opening(SESSION, Sampling(), PROMPT, prefix=Prefix(1, prefix) if prefix else None)


class Lab:
    """A chain on paper whose stages talk to a collector."""

    def __init__(self, folder: Path) -> None:
        self.chain = PaperChain(folder)
        self.store = ReceiptStore()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        own = Credentials(
            self.chain.driver, self.chain.driver_certificate, self.chain.authority.certificate_pem
        )
        self.collector = ReceiptCollector(lambda: own, self.store, call_later=self._later)
        self.tokens = tokens_of(TOKENS)
        self.request = GenerationRequest(
            prompt=tuple(self.tokens[:PROMPT]), max_tokens=TOKENS, receipt=self.chain.id
        )
        self.store.expect(self.chain.id, "key-1")
        self.port = Port(self.chain.nodes)
        record = self.collector.begin(SESSION, self.request, 0)
        assert record is not None
        self.record = record
        self.record.opened(self.port, FRAME, opening(), PROMPT - 1)
        self.collector.expect(self.record)
        self.chain.begin(self.tokens, PROMPT)
        self.chain.cut(self.chain.decode(PROMPT, TOKENS - 1))

    def _later(self, seconds: float, effect: Callable[[], None]) -> Callable[[], None]:
        self.timers.append((seconds, effect))
        return lambda: None

    def tell(self, stage: PaperStage, *, is_over: bool = True, sender: str = "") -> None:
        self.say(stage.transcript, stage, sender or stage.identity.node_id, is_over=is_over)

    def say(self, transcript: StageTranscript, stage: PaperStage, sender: str, *, is_over: bool) -> None:
        packed = msgspec.msgpack.encode(transcript)
        message = StageSigned("paper-1", SESSION, packed, stage.certificate, is_over)
        self.collector.take(message, sender)

    def finish(self) -> None:
        assert self.record.finish(self.tokens, now)
        self.collector.finish(self.record)

    def receipt(self) -> Receipt | None:
        content = self.store.find(self.chain.id, "key-1")
        return None if content is None else read_receipt(content)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_it_is_made_when_the_last_stage_has_signed(lab: Lab) -> None:
    lab.finish()
    assert lab.port.cuts == [(TOKENS - 1, True)]
    for stage in lab.chain.stages:
        assert lab.receipt() is None
        lab.tell(stage)
    receipt = lab.receipt()
    assert receipt is not None
    assert verify_receipt(receipt, lab.chain.authority.certificate_pem).picked == TOKENS - PROMPT
    assert receipt.tokens == lab.tokens


def test_without_one_of_them_it_is_made_in_time_and_says_who_is_missing(lab: Lab) -> None:
    lab.finish()
    for stage in lab.chain.stages[:2]:
        lab.tell(stage)
    [(_, make)] = lab.timers
    make()
    receipt = lab.receipt()
    assert receipt is not None
    with pytest.raises(Exception, match=lab.chain.nodes[2]):
        verify_receipt(receipt, receipt.authority)


def test_pieces_are_joined_and_told_again_without_harm(lab: Lab) -> None:
    lab.finish()
    for stage in lab.chain.stages:
        whole, node = stage.transcript, stage.identity.node_id
        lab.say(replace(whole, commitments=whole.commitments[:1]), stage, node, is_over=False)
        lab.say(replace(whole, commitments=whole.commitments[:2]), stage, node, is_over=False)
        lab.say(replace(whole, commitments=whole.commitments[2:]), stage, node, is_over=True)
    receipt = lab.receipt()
    assert receipt is not None
    assert verify_receipt(receipt, receipt.authority).compared


def test_nobody_speaks_for_another(lab: Lab) -> None:
    first, second, third = lab.chain.stages
    lab.finish()
    lab.tell(first, sender=second.identity.node_id)
    lab.tell(second)
    lab.tell(third)
    lab.timers[0][1]()
    receipt = lab.receipt()
    assert receipt is not None
    assert [each.header.claim.node for each in receipt.transcripts] == lab.chain.nodes[1:]


def test_a_stranger_is_not_heard(lab: Lab) -> None:
    stranger = lab.chain.make_stage(0, False, FRAME)
    lab.tell(stranger)
    lab.finish()
    for stage in lab.chain.stages:
        lab.tell(stage)
    receipt = lab.receipt()
    assert receipt is not None
    assert stranger.identity.node_id not in receipt.certificates


def test_what_cannot_be_read_or_does_not_follow_is_left_out(lab: Lab) -> None:
    first = lab.chain.stages[0]
    node, whole = first.identity.node_id, first.transcript
    for garbage in (b"\xc1", b"\x00", bytes(1000)):
        lab.collector.take(StageSigned("paper-1", SESSION, garbage, "", False), node)
    lab.say(replace(whole, commitments=whole.commitments[1:]), first, node, is_over=False)
    other = replace(whole, header=replace(whole.header, receipt="rcpt-" + "0" * 32))
    lab.say(other, first, node, is_over=False)
    foreign = replace(whole, header=replace(whole.header, session=SESSION + 1))
    lab.say(foreign, first, node, is_over=False)
    lab.finish()
    for stage in lab.chain.stages:
        lab.tell(stage)
    receipt = lab.receipt()
    assert receipt is not None
    assert verify_receipt(receipt, receipt.authority).rows == TOKENS - 1


def test_one_member_cannot_fill_the_memory(lab: Lab) -> None:
    first = lab.chain.stages[0]
    node, whole = first.identity.node_id, first.transcript
    for frame in range(500):
        header = replace(whole.header, opened_frame=1000 + frame)
        lab.say(replace(whole, header=header), first, node, is_over=False)
    lab.finish()
    lab.timers[0][1]()
    receipt = lab.receipt()
    assert receipt is not None
    assert len(receipt.transcripts) <= 64


def test_what_is_signed_for_one_answer_is_bounded(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = lab.chain.stages
    lab.tell(first, is_over=False)
    monkeypatch.setattr(collector, "_MOST_ANSWER_BYTES", len(msgspec.msgpack.encode(first.transcript)) + 100)
    lab.tell(second)
    lab.finish()
    lab.timers[0][1]()
    receipt = lab.receipt()
    assert receipt is not None
    assert [each.header.claim.node for each in receipt.transcripts] == [first.identity.node_id]
    assert lab.collector._used_bytes == 0
    assert third.signed


def test_an_answer_that_failed_has_none(lab: Lab) -> None:
    lab.collector.abandon(lab.record)
    for stage in lab.chain.stages:
        lab.tell(stage)
    assert lab.receipt() is None
    assert lab.store.find(lab.chain.id, None, wait_s=60.0) is None, "nobody waits for what will not come"


def test_who_asks_for_what_cannot_be_made(lab: Lab) -> None:
    check_receipt(replace_receipt(lab.request, ""), None)
    with pytest.raises(UsageError, match="alone"):
        check_receipt(lab.request, None)
    for bad in ("x", "rcpt-zz", "rcpt-" + "0" * 33):
        with pytest.raises(UsageError, match="no id"):
            check_receipt(replace_receipt(lab.request, bad), lab.collector)


def replace_receipt(request: GenerationRequest, receipt: str) -> GenerationRequest:
    return GenerationRequest(prompt=request.prompt, max_tokens=1, receipt=receipt)


def test_runs_of_a_chain_that_changes_its_shape(lab: Lab) -> None:
    record = AnswerRecord(SESSION, lab.request, PROMPT)
    old, new = Port(["a", "b"], 3), Port(["a", "c"], 4)
    record.opened(old, 5, opening(prefix=8), PROMPT - 1)
    record.cut(new, 60, now)
    record.resumed(new, 60)
    assert new.cuts == [(60, False)]
    # Its memory is given up, and it starts again from nothing.
    record.cut(new, 70, now)
    record.restarted(70)
    record.opened(new, 9, opening(), 70)
    assert record.finish(lab.tokens, now)
    told = [
        (run.epoch, run.opened_frame, run.start, run.stop, run.picked_from, run.nodes) for run in record.runs
    ]
    assert told == [
        (3, 5, 8, 60, PROMPT - 1, ["a", "b"]),
        (4, 5, 60, 70, 60, ["a", "c"]),
        (4, 9, 0, TOKENS - 1, 70, ["a", "c"]),
    ]
    assert new.cuts[-1] == (TOKENS - 1, True)


def test_a_run_in_which_nothing_was_picked_is_nothing_to_tell(lab: Lab) -> None:
    record = AnswerRecord(SESSION, lab.request, PROMPT)
    port = Port(["a"])
    record.opened(port, 5, opening(), PROMPT - 1)
    record.restarted(PROMPT - 1)
    record.opened(port, 6, opening(), PROMPT - 1)
    assert record.finish(lab.tokens, now)
    assert [run.opened_frame for run in record.runs] == [6]


def test_the_store_is_bounded_and_private() -> None:
    store = ReceiptStore(most_receipts=3, most_bytes=10_000)
    for number in range(5):
        store.expect(f"rcpt-{number}", "mine")
        store.put(f"rcpt-{number}", pack_text(b"content %d" % number))
    assert store.find("rcpt-0", "mine") is None
    assert store.find("rcpt-4", "mine") == b"content 4"
    assert store.find("rcpt-4", "other") is None
    assert store.find("rcpt-4", None) == b"content 4", "an operator"
    store.put("rcpt-unasked", pack_text(b"content"))
    assert store.find("rcpt-unasked", None) is None
    for other in (b"", pack_text(b"another")):
        store.put("rcpt-4", other)
        assert store.find("rcpt-4", "mine") == b"content 4", "what there is stays"
    store.expect("rcpt-5", "mine")
    store.put("rcpt-5", b"no zlib")
    assert store.find("rcpt-5", "mine") is None
    store.expect("rcpt-6", "mine")
    store.put("rcpt-6", bytes(20_000))
    assert store.find("rcpt-6", "mine") is None
    assert store.find("rcpt-4", "mine") is None, "the oldest go where one takes too much"

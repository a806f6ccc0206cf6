"""Keeper of the ledger: what it hears is on record in batches; a disk that fails and a file that is damaged stop the
ledger, not the cluster."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shardcompute.control.state import ClusterState
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.cluster.audits.auditor import AuditRecord
from shardcompute.node.cluster.ledger.file import LedgerFile
from shardcompute.node.cluster.ledger.keeper import LedgerKeeper, LedgerTerms
from shardcompute.node.cluster.ledger.meters import MeterReadings
from shardcompute.node.cluster.ledger.opening import open_ledger
from shardcompute.node.driver.receipts.store import pack_text
from shardcompute.security.authority import is_signed_by_authority
from shardcompute.security.receipts import Receipt, write_receipt
from shardcompute.trust.judgement import Blame, Judgement
from shardcompute.trust.ledger import (
    Contribution,
    LedgerError,
    LedgerHeader,
    SignedEntries,
    replay_ledger,
)
from shardcompute.trust.ledger.proofs import check_proof, read_proof
from shardcompute.trust.ledger.records import AuditTaken, LayoutSet, MemberChanged, ReceiptsTaken
from shardcompute.wire.control import LedgerDoubted, LookAtLedger
from support.ledgers import COORDINATOR, LedgerLab
from support.paper_chain import PaperChain, interrupted_receipt
from support.swarm.fake_cluster import serving_cluster

NEVER = LedgerTerms(settle_s=3600.0, batch_s=3600.0)
"""Nothing is written unless the test has it written."""


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> tuple[PaperChain, Receipt]:
    return interrupted_receipt(tmp_path_factory.mktemp("paper"))


class KeeperLab:
    def __init__(self, folder: Path, chain: PaperChain) -> None:
        self.path = folder / "ledger.jsonl"
        self.authority = chain.authority
        self.revoked: set[str] = set()
        self.readings = MeterReadings()
        self.now_s = 1_000_000.0
        self.file = LedgerFile(
            self.path,
            LedgerHeader(
                cluster=chain.authority.name, log=COORDINATOR, authority=chain.authority.certificate_pem
            ),
            chain.authority.sign,
            is_signed_by_authority,
            lambda: self.now_s,
        )
        self.keeper = LedgerKeeper(
            self.file,
            chain.authority.certificate_pem,
            lambda: self.revoked,
            lambda: self.readings,
            terms=NEVER,
        )

    def whole(self) -> SignedEntries:
        assert self.keeper.flush()
        with self.path.open("rb") as lines:
            return replay_ledger(lines, is_signed_by_authority)

    def found(self) -> dict[str, Contribution]:
        return {each.node: each for each in self.whole().accounts.contributions()}

    def give(self, receipt: Receipt, *, asked: bool = True) -> None:
        """A receipt, as the driver's collector makes it of an answer that was asked for."""
        if asked:
            prompt = tuple(receipt.tokens[: receipt.prompt_tokens])
            self.keeper.asked(GenerationRequest(prompt, max_tokens=1000, receipt=receipt.id))
        self.keeper.made(receipt.id, pack_text(write_receipt(receipt)))

    def audit(self, receipt: Receipt, node: str, *, finding: str = "failed") -> None:
        blame = Blame(node, finding, "because")  # type: ignore[arg-type]
        judgement = Judgement(finding, (blame,))  # type: ignore[arg-type]
        self.keeper.audited(AuditRecord(receipt.id, node, 0, 2, ("third",), judgement))


@pytest.fixture
def lab(tmp_path: Path, paper: tuple[PaperChain, Receipt]) -> Iterator[KeeperLab]:
    made = KeeperLab(tmp_path, paper[0])
    yield made
    made.keeper.close()


def test_a_receipt_is_credited_once_by_what_each_stage_signed_for(
    lab: KeeperLab, paper: tuple[PaperChain, Receipt]
) -> None:
    receipt = paper[1]
    lab.give(receipt)
    lab.give(receipt, asked=False)
    found = lab.found()
    last = receipt.runs[-1]
    claims = {each.header.claim.node: each.header.claim for each in receipt.transcripts}
    for node in last.nodes:
        rows = sum(run.stop - run.start for run in receipt.runs if node in run.nodes)
        claim = claims[node]
        assert found[node].tokens == rows
        assert found[node].token_layers == rows * (claim.stop - claim.start)
    lost = [node for run in receipt.runs for node in run.nodes if node not in last.nodes]
    assert 0 < found[lost[0]].tokens < receipt.runs[0].stop, "rows that it did not sign for are left out"


def test_what_nobody_asked_for_or_was_altered_is_not_credited(
    lab: KeeperLab, paper: tuple[PaperChain, Receipt]
) -> None:
    receipt = paper[1]
    lab.give(receipt, asked=False)
    assert not any(isinstance(each, ReceiptsTaken) for each in lab.whole().entries)
    other = tuple(each + 1 for each in receipt.tokens[: receipt.prompt_tokens])
    lab.keeper.asked(GenerationRequest(other, max_tokens=1000, receipt=receipt.id))
    lab.give(receipt, asked=False)
    assert not any(isinstance(each, ReceiptsTaken) for each in lab.whole().entries)
    lab.give(msgspec.structs.replace(receipt, signature=b"0" * 64))
    [entry] = [each for each in lab.whole().entries if isinstance(each, ReceiptsTaken)]
    assert (entry.count, entry.credited) == (1, {})


@pytest.mark.parametrize("when", ["before the receipt", "before the batch", "after the batch"])
def test_an_audit_takes_the_credit_back_whenever_it_comes(
    lab: KeeperLab, paper: tuple[PaperChain, Receipt], when: str
) -> None:
    receipt = paper[1]
    cheat = receipt.runs[-1].nodes[1]
    if when == "before the receipt":
        lab.audit(receipt, cheat)
        lab.whole()
    lab.give(receipt)
    if when == "after the batch":
        assert lab.found()[cheat].tokens > 0
    if when != "before the receipt":
        lab.audit(receipt, cheat)
        lab.audit(receipt, cheat)
    found = lab.found()
    assert found[cheat].tokens == 0
    assert found[cheat].uncredited_tokens > 0
    assert all(found[node].tokens > 0 for node in receipt.runs[-1].nodes if node != cheat)
    taken = [each for each in lab.whole().entries if isinstance(each, AuditTaken) and each.withdrawn]
    assert len(taken) == (1 if when == "after the batch" else 0)


def test_an_auditor_that_was_wrong_keeps_the_work_that_it_did_for_the_answer(
    lab: KeeperLab, paper: tuple[PaperChain, Receipt]
) -> None:
    receipt = paper[1]
    audited, auditor = receipt.runs[-1].nodes[:2]
    lab.give(receipt)
    blames = (Blame(audited, "passed", ""), Blame(auditor, "failed", "it disputed rows that are right"))
    lab.keeper.audited(AuditRecord(receipt.id, audited, 0, 2, (auditor,), Judgement("passed", blames)))
    found = lab.found()
    assert found[auditor].tokens > 0
    assert found[auditor].audits_against == 1


def test_a_receipt_is_proved_to_who_has_no_copy_and_no_other_is(
    lab: KeeperLab, paper: tuple[PaperChain, Receipt]
) -> None:
    receipt = paper[1]
    lab.give(receipt)
    lab.whole()
    lab.keeper.saw(serving_cluster(500).coordinator.state)
    lab.whole()
    content = lab.keeper.prove_receipt(receipt.id)
    proof = read_proof(content)
    entry = check_proof(proof, write_receipt(receipt), is_signed_by_authority)
    assert entry.count == 1
    with pytest.raises(LedgerError, match="path: the receipt is not among those"):
        check_proof(proof, write_receipt(receipt) + b" ", is_signed_by_authority)
    for name, value, place in (
        ("index", 1, "path"),
        ("entry_path", proof.entry_path[1:], "entry_path"),
        ("entry", proof.entry.replace('"count":1', '"count":2'), "entry_path"),
        ("head", msgspec.structs.replace(proof.head, size=proof.head.size + 1), "head.signature"),
        ("header", msgspec.structs.replace(proof.header, log="other"), "head.log"),
    ):
        with pytest.raises(LedgerError) as refused:
            check_proof(
                msgspec.structs.replace(proof, **{name: value}),
                write_receipt(receipt),
                is_signed_by_authority,
            )
        assert refused.value.place == place
    with pytest.raises(UsageError):
        lab.keeper.prove_receipt("rcpt-unknown")


def test_members_and_layouts_are_on_record_as_they_change(lab: KeeperLab) -> None:
    cluster = serving_cluster(500, 500)
    lab.keeper.saw(cluster.coordinator.state)
    lab.keeper.saw(cluster.coordinator.state)
    cluster.revoke_node("b")
    lab.revoked.add("b")
    lab.keeper.saw(cluster.coordinator.state)
    whole = lab.whole()
    members = [(each.node, each.standing) for each in whole.entries if isinstance(each, MemberChanged)]
    assert members == [("a", "joined"), ("b", "joined"), ("b", "revoked")]
    assert len(whole.accounts.layouts) == len(
        [each for each in cluster.coordinator.state.chains.values() if each.is_live]
    )
    lab.keeper.saw(ClusterState(driver="head"))
    assert lab.whole().accounts.standings == {"a": "left", "b": "revoked"}


def test_another_chain_of_the_same_name_begins_anew(lab: KeeperLab) -> None:
    state = serving_cluster(500, 500).coordinator.state
    [(id, chain)] = state.chains.items()
    for epoch in (7, 2, 2, 3):
        changed = msgspec.structs.replace(chain, epoch=epoch)
        lab.keeper.saw(msgspec.structs.replace(state, chains={id: changed}))
    found = [(each.epoch, bool(each.stages)) for each in lab.whole().entries if isinstance(each, LayoutSet)]
    assert found == [(7, True), (7, False), (2, True), (3, True)]


def test_what_could_never_be_written_does_not_stop_the_rest(lab: KeeperLab) -> None:
    state = serving_cluster(500).coordinator.state
    lab.keeper.saw(state)
    lab.whole()
    # A name that is longer than entries allow, which no node can have.
    lab.keeper.audited(AuditRecord("r" * 600, "a", 0, 2, (), Judgement("passed")))
    assert lab.keeper.flush()
    lab.keeper.saw(msgspec.structs.replace(state, nodes=dict(state.nodes)))
    assert lab.found()["a"].standing == "joined"


def test_meters_are_told_as_what_was_added(lab: KeeperLab) -> None:
    lab.keeper.saw(serving_cluster(500).coordinator.state)
    lab.readings = MeterReadings(steps={"a": 5, "stranger": 9}, seeded_bytes={COORDINATOR: 100})
    assert lab.found()["a"].steps == 5
    size = lab.whole().head.size
    assert lab.whole().head.size == size, "nothing new is not told"
    lab.readings = MeterReadings(steps={"a": 7, "stranger": 9}, seeded_bytes={COORDINATOR: 150})
    found = lab.found()
    assert (found["a"].steps, found[COORDINATOR].seeded_bytes) == (7, 150)
    assert "stranger" not in found


def test_what_members_say_they_seeded_adds_up_over_their_lives(lab: KeeperLab) -> None:
    lab.keeper.saw(serving_cluster(500).coordinator.state)
    for said in (10, 25, 5):
        lab.keeper.show("a", LookAtLedger(0, said))
    assert lab.found()["a"].seeded_bytes == 30
    lab.keeper.show("a", LookAtLedger(0, 6))
    lab.keeper.show("stranger", LookAtLedger(0, 100))
    found = lab.found()
    assert found["a"].seeded_bytes == 31
    assert "stranger" not in found


def test_a_disk_that_is_full_costs_nothing_but_time(
    lab: KeeperLab, monkeypatch: pytest.MonkeyPatch, paper: tuple[PaperChain, Receipt]
) -> None:
    lab.whole()

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        lab.keeper.saw(serving_cluster(500).coordinator.state)
        lab.give(paper[1])
        assert lab.keeper.flush()
        assert "No space left" in lab.keeper.problem
        assert "nothing is added to the ledger" in lab.keeper.warnings[0]
    found = lab.found()
    assert found["a"].standing == "joined"
    assert found[paper[1].runs[-1].nodes[0]].tokens > 0
    assert lab.keeper.warnings == ()


def test_a_damaged_file_stops_the_ledger_and_not_the_cluster(tmp_path: Path) -> None:
    paper = LedgerLab(tmp_path)
    content = paper.write()
    paper.path.write_bytes(content.replace(b'"tokens":40', b'"tokens":41', 1))
    keeper = open_ledger(tmp_path, paper.authority, COORDINATOR, lambda: (), MeterReadings, b"")
    assert "head over 6.root" in keeper.problem
    keeper.saw(serving_cluster(500).coordinator.state)
    assert keeper.show("a", LookAtLedger(0)) is None
    assert keeper.view().problem
    keeper.close()


def test_what_members_doubt_is_said_until_they_believe_again(lab: KeeperLab) -> None:
    lab.keeper.doubted("a", LedgerDoubted("rollback: less than before"))
    assert lab.keeper.warnings == ("a doubts the ledger: rollback: less than before",)
    assert lab.keeper.view().doubts == {"a": "rollback: less than before"}
    lab.keeper.doubted("a", LedgerDoubted(""))
    assert lab.keeper.warnings == ()


def test_a_day_of_constant_work_by_three_machines_stays_below_half_a_megabyte(
    lab: KeeperLab, paper: tuple[PaperChain, Receipt]
) -> None:
    """As many entries of each kind as the terms allow in a day, each of them of usual size."""
    lab.keeper.saw(serving_cluster(500, 500, 500).coordinator.state)
    lab.whole()
    lab.give(paper[1])
    lab.readings = MeterReadings(steps=dict.fromkeys("abc", 10**9), stored_bytes=dict.fromkeys("abc", 10**9))
    before = lab.path.stat().st_size
    lab.whole()
    one = lab.path.stat().st_size - before
    batches = 86_400 / LedgerTerms().batch_s
    assert one * batches < 500_000
    assert dataclasses.asdict(LedgerTerms()) == {"settle_s": 5.0, "batch_s": 300.0, "asked_s": 60.0}

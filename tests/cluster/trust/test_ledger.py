"""The ledger of a swarm: real answers are credited to who computed them, a cheat's are not, and members follow it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import msgspec

from shardcompute.core.generation import GenerationRequest
from shardcompute.node.cluster.ledger.file import LEDGER_FILE
from shardcompute.node.rpc.ledger_follower import SEEN_FILE
from shardcompute.security.authority import is_signed_by_authority
from shardcompute.security.receipts import new_receipt_id, read_receipt
from shardcompute.trust.ledger import Contribution, SeenLedger, SignedEntries, replay_ledger
from shardcompute.trust.ledger.records import LayoutSet, MemberChanged
from support.models.requests import greedy
from support.swarm.cheats import ROOMY, TOKENS, different, mark_of, skip_a_layer
from support.swarm.lab import SPREAD, Alone, LabSwarm, Talk, swarm


def ask(lab: LabSwarm, request: GenerationRequest) -> tuple[Talk, int]:
    """An answer, and how many rows its stages signed for."""
    talk = lab.start(replace(request, receipt=new_receipt_id()))
    talk.result()
    text = lab.cluster.pool.receipts.find(talk.request.receipt, None, wait_s=20.0)
    assert text is not None
    return talk, len(read_receipt(text).tokens) - 1


def replayed(lab: LabSwarm) -> SignedEntries:
    """What a third party finds in an export."""
    assert lab.cluster.ledger.flush()
    return replay_ledger(io.BytesIO(lab.cluster.ledger.export()), is_signed_by_authority)


def by_node(whole: SignedEntries) -> dict[str, Contribution]:
    return {each.node: each for each in whole.accounts.contributions()}


def test_answers_are_credited_to_the_machines_that_computed_them(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=ROOMY, stages=3, placing=SPREAD) as lab:
        prompt, other = different(alone, 2)
        lab.start(greedy(other, TOKENS)).result()
        _, rows = ask(lab, greedy(prompt, TOKENS))
        lab.wait_until(lambda: sum(each.tokens for each in by_node(replayed(lab)).values()) > 0, "the credit")
        whole = replayed(lab)
        found = by_node(whole)
        for stage in lab.chain().stages:
            credited = found[stage.node]
            assert (credited.tokens, credited.token_layers) == (rows, rows * (stage.stop - stage.start))
            assert (credited.standing, credited.uncredited_tokens) == ("joined", 0)
            assert credited.steps > rows // 2, "also those of the answer without a receipt"
            assert credited.stored_bytes > 0
        assert whole.accounts.receipts == 1, "the answer that has no receipt is credited to nobody"
        layouts = [each for each in whole.entries if isinstance(each, LayoutSet)]
        assert [each.nodes for each in layouts[-1].stages] == [(node,) for node in lab.chain().nodes]
        assert layouts[-1].epoch == lab.chain().epoch


def test_the_work_of_a_stage_that_cheats_is_not_credited(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=ROOMY, stages=3, placing=SPREAD, audit_rate=1.0) as lab:
        cheat, members = lab.stage(1), lab.chain().nodes
        skip_a_layer(cheat, tiny)
        [prompt] = different(alone, 1)
        talk, rows = ask(lab, greedy(prompt, TOKENS))
        lab.wait_until(lambda: mark_of(lab, talk) == "failed", "the answer's mark")
        lab.wait_until(
            lambda: replayed(lab).accounts.standings[cheat.node] == "quarantined", "the quarantine on record"
        )
        whole = replayed(lab)
        found = by_node(whole)
        assert (found[cheat.node].tokens, found[cheat.node].uncredited_tokens) == (0, rows)
        assert found[cheat.node].audits_against == 1
        for honest in (node for node in members if node != cheat.node):
            assert (found[honest].tokens, found[honest].uncredited_tokens) == (rows, 0)
        standings = [
            each.standing
            for each in whole.entries
            if isinstance(each, MemberChanged) and each.node == cheat.node
        ]
        assert standings == ["joined", "quarantined"]


def test_members_keep_the_last_head_and_a_coordinator_that_forgets_is_found_out(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=(40,), stages=1) as lab:
        early = replayed(lab).head
        [prompt] = different(alone, 1)
        ask(lab, greedy(prompt, TOKENS))
        assert replayed(lab).head.size > early.size
        [worker] = lab.workers
        worker._control._ledger.begin(has_ledger=True)  # it looks at its next heartbeat
        lab.wait_until(lambda: seen_size(tmp_path) > early.size, "the head on the member's disk")
        assert lab.cluster.ledger.warnings == ()
        lab.kill_cluster()
        path = lab.options.folder / LEDGER_FILE
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: 2 + early.size]))
        lab.open_cluster()
        lab.wait_until(lambda: lab.cluster.ledger.warnings != (), "what the member says")
        [warning] = lab.cluster.ledger.warnings
        assert worker.node in warning
        assert "doubts the ledger: rollback" in warning or "doubts the ledger: fork" in warning
        assert seen_size(tmp_path) > early.size, "the forked head is not adopted"


def seen_size(folder: Path) -> int:
    """Entries under the last head that a member keeps."""
    for path in folder.rglob(SEEN_FILE):
        heads = msgspec.json.decode(path.read_bytes(), type=SeenLedger).heads
        return max((head.size for head in heads.values()), default=0)
    return 0

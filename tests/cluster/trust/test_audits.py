"""Audits of answers that a swarm computed: the honest pass, a machine that cheats is found, blamed and replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardcompute.core.generation import GenerationRequest
from shardcompute.security.receipts import new_receipt_id
from shardcompute.trust.reputation import NEW
from support.models.requests import greedy, sampled
from support.swarm.cheats import ROOMY, TOKENS, different, mark_of, skip_a_layer, wait_audited
from support.swarm.lab import SPREAD, Alone, LabSwarm, Talk, swarm


def ask(lab: LabSwarm, request: GenerationRequest) -> Talk:
    talk = lab.start(replace(request, receipt=new_receipt_id()))
    talk.result()
    return talk


def test_honest_stages_pass_and_earn_a_reputation(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=ROOMY, stages=3, placing=SPREAD, wire="int8", audit_rate=1.0) as lab:
        one, two = different(alone, 2)
        talks = [ask(lab, greedy(one, TOKENS)), ask(lab, sampled(two, TOKENS))]
        wait_audited(lab, 6)
        assert [mark_of(lab, talk) for talk in talks] == ["passed", "passed"]
        for node in lab.state.nodes.values():
            assert (node.audits, node.audits_failed) == (2, 0)
            assert node.reputation > NEW
        # What was loaded to compute again is gone.
        lab.wait_until(
            lambda: all(len(node.shards) == 1 for node in lab.state.nodes.values()), "one shard on each"
        )


def test_a_cheat_in_the_middle_is_caught_blamed_and_replaced(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=ROOMY, stages=3, placing=SPREAD, audit_rate=1.0) as lab:
        one, two, three = different(alone, 3)
        cheat = lab.stage(1)
        skip_a_layer(cheat, tiny)
        wrong = ask(lab, greedy(one, TOKENS))
        lab.wait_until(
            lambda: lab.state.nodes[cheat.node].status == "quarantined",
            lambda: f"the quarantine of {cheat.node}: {lab.describe()}",
        )
        blamed = lab.state.nodes[cheat.node]
        assert "is not what" in blamed.quarantine
        assert "agrees" in blamed.quarantine, "a third machine has decided"
        lab.wait_until(lambda: mark_of(lab, wrong) == "failed", "the answer's mark")
        lab.wait_serving(stages=2)
        assert cheat.node not in lab.chain().members
        others = [node for node in lab.state.nodes.values() if node.id != cheat.node]
        assert all(node.quarantine == "" for node in others)
        for request in (greedy(two, TOKENS), sampled(three, TOKENS)):
            talk = lab.start(replace(request, receipt=new_receipt_id()))
            assert talk.result() == alone.answer(request)
        # An operator may let it work again: it begins anew, and is audited as the new are.
        lab.cluster.pardon(cheat.node)
        lab.wait_until(lambda: lab.state.nodes[cheat.node].status == "ready", "the pardon")
        assert lab.state.nodes[cheat.node].reputation == NEW

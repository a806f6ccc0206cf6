"""Audits of answers that a swarm computed: the honest pass, a machine that cheats is found, blamed and replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.generation import GenerationRequest
from shardcompute.models.spec import Stage
from shardcompute.runtime.shard import open_shard
from shardcompute.security.receipts import new_receipt_id
from shardcompute.trust.reputation import NEW
from support.models.requests import greedy, prompts, sampled
from support.swarm.lab import SPREAD, Alone, LabSwarm, LabWorker, Talk, open_tiny, swarm

TOKENS = 40
ROOMY = (40, 40, 40)
"""Each can hold another stage beside its own."""


def ask(lab: LabSwarm, request: GenerationRequest) -> Talk:
    talk = lab.start(replace(request, receipt=new_receipt_id()))
    talk.result()
    return talk


def mark_of(lab: LabSwarm, talk: Talk) -> str:
    return lab.cluster.pool.receipts.mark_of(talk.request.receipt)


def wait_audited(lab: LabSwarm, audits: int) -> None:
    def are_done() -> bool:
        return sum(node.audits for node in lab.state.nodes.values()) >= audits

    lab.wait_until(are_done, lambda: f"{audits} audits: {[n.audits for n in lab.state.nodes.values()]}")


def different(alone: Alone, count: int) -> Sequence[tuple[int, ...]]:
    """Prompts that share no beginning, so that none is known from another's answer."""
    found: dict[int, tuple[int, ...]] = {}
    for prompt in prompts(alone.service.tokenizer):
        found.setdefault(prompt[0], prompt)
    return list(found.values())[:count]


def skip_a_layer(worker: LabWorker, path: Path) -> None:
    """From now on its stage leaves its first layer out, and signs for what comes of that."""
    [(place, runtime)] = worker.stages.shards().items()
    with open_tiny(path) as checkpoint:
        cut = Stage(place[1] + 1, place[2], checkpoint.spec.layer_count)
        options = ExecutorOptions(kv_bytes=16 << 20, context_length=512)
        fewer = open_shard(checkpoint, stage=cut, options=options)
    honest, runtime._executor = runtime._executor, fewer
    honest.close()


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

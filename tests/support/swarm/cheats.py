"""Swarms in which somebody cheats: prompts, a stage that leaves a layer out, and waiting for audits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.models.spec import Stage
from shardcompute.runtime.shard import open_shard
from support.models.requests import prompts
from support.swarm.lab import Alone, LabSwarm, LabWorker, Talk, open_tiny

TOKENS = 40
ROOMY = (40, 40, 40)
"""Each can hold another stage beside its own."""


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

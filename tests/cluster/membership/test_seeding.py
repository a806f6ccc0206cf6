"""A machine that is too small to compute seeds weights: whoever comes fetches them there, and not from the ring."""

from __future__ import annotations

from pathlib import Path

from shardcompute.control.roles.seeding import is_seeded
from support.swarm.lab import swarm


def test_a_weak_machine_gives_its_layers_to_whoever_comes(tmp_path: Path, tiny: Path) -> None:
    with swarm(tmp_path, tiny, layers=(4, 4), stages=2) as lab:
        shape, epoch = lab.chain().stages, lab.chain().epoch
        weak = lab.add_worker(0, seed_bytes=1 << 30)

        def has_seeded() -> bool:
            return weak.node in lab.state.nodes and is_seeded(lab.state.nodes[weak.node])

        lab.wait_until(has_seeded, lab.describe)
        others = [worker for worker in lab.workers if worker is not weak]
        before = sum(sum(worker.sent_bytes().values()) for worker in others)
        new = lab.add_worker(4)
        lab.wait_serving(stages=2, standbys=1)
        given = weak.sent_bytes().get(new.node, 0)
        assert given > 0
        assert sum(sum(worker.sent_bytes().values()) for worker in others) == before
        assert (lab.chain().stages, lab.chain().epoch) == (shape, epoch)
        lab.wait_until(
            lambda: lab.state.nodes[weak.node].seeded_bytes >= given,
            "the coordinator to hear how much was given",
        )

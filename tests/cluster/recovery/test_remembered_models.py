"""What people asked a running cluster to serve is served again after the coordinator was started again."""

from __future__ import annotations

from pathlib import Path

from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from support.models.requests import mixture
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import Alone, swarm


def test_models_of_the_admin_come_back(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    another = save_tiny_llama(tmp_path / "another", seed=2)
    settings = Settings(data_dir=tmp_path, offline=True)
    with swarm(tmp_path, tiny, layers=(8, 8), stages=1) as lab:
        with ClusterAdmin(lab.cluster, settings) as admin:
            admin.load_model(str(another))
            lab.wait_until(lambda: lab.is_serving("another"), lab.describe)
            assert [order.name for order in lab.cluster.remembered()] == ["another"]
        lab.kill_cluster()
        lab.open_cluster()
        lab.serve("tiny")
        with ClusterAdmin(lab.cluster, settings) as admin:
            admin.restore(without="tiny")
            lab.wait_serving("another")
            lab.wait_serving("tiny")
            request = mixture(alone, 1, 12)[0]
            assert lab.ask(request, "tiny") == alone.answer(request)
            assert len(lab.ask(request, "another").tokens) == 12
            admin.unload_model("another")
            assert lab.cluster.remembered() == ()

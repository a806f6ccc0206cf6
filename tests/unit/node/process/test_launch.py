"""Launch of a cluster: what is done while workers start, and what waits for them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardcompute.node.cluster import Cluster
from shardcompute.node.process import launch

_WORKER = SimpleNamespace(can_work=True, is_live=True)


class _Cluster:
    """Records what is asked of it. A worker comes while a model is prepared."""

    def __init__(self, name: str, served: tuple[str, ...] = ()) -> None:
        self.done: list[str] = []
        self.state = SimpleNamespace(nodes={})
        self.coordinator = SimpleNamespace(listen=self._listen, state=self.state)
        self.pool = SimpleNamespace(models=lambda: [SimpleNamespace(name=each) for each in served])
        self.checkpoint = SimpleNamespace(name=name)

    def _listen(self, listener: Callable[[Any], None]) -> None:
        self.done.append("listened")

    def prepare(self, checkpoint: object, form: str) -> str:
        self.done.append("prepared")
        self.state.nodes["w"] = _WORKER
        return "model"

    def serve_prepared(self, prepared: str, *, chains: int, parallel: object) -> None:
        self.done.append(f"served {prepared} by {len(self.state.nodes)}")


def _serve(cluster: _Cluster) -> list[str]:
    served = launch.Served(cast(Any, cluster.checkpoint))
    launch.serve_from_workers(cast(Cluster, cluster), served, 1)
    return cluster.done


def test_a_model_is_prepared_while_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_WORKERS_WITHIN_S", 0.0)
    assert _serve(_Cluster("m")) == ["prepared", "listened", "served model by 1"]


def test_what_is_served_already_is_left_alone() -> None:
    assert _serve(_Cluster("m", served=("m",))) == []

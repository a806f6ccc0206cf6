"""How fine-tuning runs go, told over HTTP and read again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shardcompute.api import create_app
from shardcompute.cluster_client import ClusterClient
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.finetuning.curves import CurveStep, RunReport
from support.api.bridge import LOCAL_SECRET, Bridge
from support.swarm.fake_cluster import NOW_S, serving_cluster

LOCAL = "http://127.0.0.1"
SIGNED = {"authorization": f"Bearer {LOCAL_SECRET}"}


@pytest.fixture
def app(service: Any, tmp_path: Any) -> Iterator[Any]:
    settings = Settings(data_dir=tmp_path, offline=True)
    with ClusterAdmin(serving_cluster(500, 500), settings, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        yield create_app(service, admin=admin, local_secret=LOCAL_SECRET)


def ask(app: Any, method: str, **options: Any) -> httpx.Response:
    with httpx.Client(base_url=LOCAL, transport=Bridge(app), headers=SIGNED) as client:
        return client.request(method, "/cluster/finetuning", **options)


def test_what_a_driver_tells_is_what_a_page_reads(app: Any) -> None:
    points = (CurveStep(1, 2.5, 0.5, 100.0), CurveStep(2, 2.0, 0.25, 110.0, 2.25))
    with ClusterClient(LOCAL, api_key=LOCAL_SECRET, transport=Bridge(app)) as client:
        client.tell_run(RunReport("a1", "tiny", 10, 2, points))
    [run] = ask(app, "GET").json()["data"]
    assert (run["model"], run["steps"], run["workers"], run["status"]) == ("tiny", 10, 2, "running")
    assert [point["loss"] for point in run["points"]] == [2.5, 2.0]
    assert [point["held_out"] for point in run["points"]] == [None, 2.25]


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "../x"},
        {"points": [{"step": 0, "loss": 1.0, "norm": 1.0, "tokens_per_s": 1.0}]},
        {"points": [{"step": 1, "loss": 1.0, "norm": 1.0, "tokens_per_s": 1.0}] * 600},
        {"workers": -1},
    ],
)
def test_what_makes_no_sense_is_refused_and_not_shown(app: Any, wrong: dict[str, Any]) -> None:
    told = {"id": "a", "model": "m", "steps": 3, "workers": 1, "points": [], **wrong}
    assert ask(app, "POST", json=told).status_code == 400
    assert ask(app, "GET").json()["data"] == []

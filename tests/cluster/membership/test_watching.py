"""What operators can see of a real swarm: one request in every log, and a lost machine in the metrics."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shardcompute.api import create_app
from shardcompute.api.metrics.collector import GenerationMetrics
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from support.api.api_server import ApiServer
from support.api.api_server import request as http
from support.api.promtool import assert_sound, needs_promtool
from support.models.requests import greedy, prompts
from support.swarm.lab import Alone, swarm


def test_a_request_is_found_in_the_logs_of_driver_and_stages(
    tmp_path: Path, tiny: Path, alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    request = greedy(prompts(alone.service.tokenizer)[0], 4)
    with (
        swarm(tmp_path, tiny, layers=(3, 3), stages=2) as lab,
        caplog.at_level(logging.DEBUG, "shardcompute"),
    ):
        lab.start(request).result()
        lab.wait_until(
            lambda: any(record.name.endswith(".request_log") for record in caplog.records), "the end's line"
        )
        (view,) = lab.cluster.pool.requests.views()
    marks = [(record.name.rpartition(".")[2], record.__dict__) for record in caplog.records]
    driver = [fields for name, fields in marks if name == "pool" and fields.get("request") == view.id]
    assert [str(fields["session"]) for fields in driver] == [view.session]
    stages = [fields for name, fields in marks if name == "step_loop" and "session" in fields]
    begun = [fields for fields in stages if "begins" in fields["message"]]
    # On both stages; again where one was taken for dead meanwhile.
    assert {str(fields["session"]) for fields in begun} == {view.session}
    assert len(begun) >= 2
    ends = [fields for name, fields in marks if name == "request_log"]
    assert [(fields["request"], fields["session"], fields["chain"]) for fields in ends] == [
        (view.id, view.session, view.chain)
    ]


def test_a_lost_machine_is_counted(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    request = greedy(prompts(alone.service.tokenizer)[0], 8)
    with (
        swarm(tmp_path, tiny, layers=(3, 3, 3), stages=2) as lab,
        ClusterAdmin(lab.cluster, Settings(tmp_path)) as admin,
    ):
        lab.start(request).result()
        assert admin.health().incidents.lost_nodes == 0
        lab.kill(lab.stage(1))
        lab.wait_until(lambda: admin.health().incidents.lost_nodes == 1, "the loss")
        lab.wait_serving(stages=2)
        lab.start(request).result()
        health = admin.health()
        assert health.incidents.failovers[lab.model] >= 1
        assert health.incidents.replans[lab.model] >= 1
        assert health.nodes_by_status["lost"] == 1
        assert sum(health.weights_sent_bytes.values()) > 0
        text = GenerationMetrics().snapshot(lab.cluster.pool, health).render().decode()
        at_work = {stage.node for stage in lab.cluster.pool.load().stages if stage.compute_s > 0}
        assert set(lab.chain().nodes) <= at_work
        assert all(f'node="{node}"' in text for node in at_work)


@needs_promtool
def test_promtool_reads_a_scrape_of_a_running_server(tmp_path: Path, tiny: Path) -> None:
    """Answers plain and drafted, refused requests, and the loss of a machine: whatever the labels hold by then."""
    with (
        swarm(tmp_path, tiny, layers=(3, 3, 3), stages=2) as lab,
        ClusterAdmin(lab.cluster, Settings(tmp_path)) as admin,
        ApiServer(create_app(lab.cluster.pool, api_keys=["observe key"], admin=admin)) as api,
    ):
        scrape = http("/metrics", method="GET")
        assert_sound(api.ask(scrape)[1].decode())  # nothing was asked yet
        ask = {"prompt": "one two one two", "max_tokens": 8, "temperature": 0}
        assert api.post("/v1/completions", ask)[0] == 200
        assert api.post("/v1/completions", ask | {"speculation": {"drafter": "ngram"}})[0] == 200
        assert api.post("/v1/completions", ask | {"model": 'no "such\\ model\n'})[0] == 404
        assert api.post('/v1/no\\such"path', {})[0] == 404
        lab.kill(lab.stage(1))
        lab.wait_until(lambda: admin.health().incidents.lost_nodes == 1, "the loss")
        lab.wait_serving(stages=2)
        assert api.post("/v1/completions", ask)[0] == 200
        status, text = api.ask(scrape)
    assert status == 200
    assert_sound(text.decode())
    assert f'shardcompute_generations_total{{model_name="{lab.model}",reason="length"}} 3' in text.decode()

"""Answers wait while weights travel, for as long as they do, and end with what happened where they do not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardcompute.api import create_app
from shardcompute.api.body import Limits
from shardcompute.control.events import ShardProgressed
from shardcompute.core.errors import CapacityError
from shardcompute.node.coordinator import executor
from shardcompute.node.rpc.commands import LoadLayers
from shardcompute.node.worker.shard_loader import MeasuredShard
from support.api.api_server import ApiServer, read_all, request
from support.models.requests import mixture
from support.swarm.lab import Alone, LabSwarm, LabWorker, swarm

PATIENCE_S = 4.0
DEADLINE_S = 40.0


class Source:
    """Weights come when the test says so: `arrive` tells that a fraction of them is there."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.is_there = threading.Event()
        self._tell: Callable[[float], None] = lambda fraction: None

    def fetch(self, worker: LabWorker, command: LoadLayers) -> None:
        def tell(fraction: float) -> None:
            place = (command.chain, command.start, command.stop)
            worker._control.tell(ShardProgressed(worker.node, worker._control.incarnation, *place, fraction))

        self._tell = tell
        self.is_asked.set()
        assert self.is_there.wait(DEADLINE_S)

    def arrive(self, fraction: float) -> None:
        assert self.is_asked.wait(DEADLINE_S)
        self._tell(fraction)


@contextmanager
def slow_source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """Whoever loads from now on loads from there."""
    source, load = Source(), LabWorker._load_shard

    def load_slowly(worker: LabWorker, command: LoadLayers) -> MeasuredShard | None:
        source.fetch(worker, command)
        return load(worker, command)

    monkeypatch.setattr(LabWorker, "_load_shard", load_slowly)
    try:
        yield source
    finally:
        source.is_there.set()


def waits_for(lab: LabSwarm) -> str:
    driver = lab.cluster.pool.find_driver(lab.chain().id)
    assert driver is not None
    return driver.waits_for()


def test_an_answer_waits_longer_than_its_patience_while_weights_arrive(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixture(alone, 2, 40)
    with swarm(tmp_path, tiny, layers=(4, 4), stages=2, patience_s=PATIENCE_S) as lab:
        talks = [lab.start(each) for each in requests]
        lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
        with slow_source(monkeypatch) as source:
            lab.kill(lab.stage(1))
            newcomer = lab.add_worker(4)
            source.arrive(0.25)
            lab.wait_until(lambda: "25%" in waits_for(lab), lambda: waits_for(lab))
            assert newcomer.folder.name in waits_for(lab)
            lab.wait_real_time(PATIENCE_S + 0.5)
            source.arrive(0.5)
            lab.wait_until(lambda: "50%" in waits_for(lab), lambda: waits_for(lab))
            assert not any(talk.is_over for talk in talks)
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        assert waits_for(lab) == ""
        lab.wait_quiet()


def test_an_answer_ends_with_what_it_waited_for_when_nothing_arrives(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    [request] = mixture(alone, 1, 60)
    options = {"patience_s": DEADLINE_S, "quiet_s": 2.0}
    with swarm(tmp_path, tiny, layers=(4, 4), stages=2, **options) as lab:
        talk = lab.start(request)
        lab.wait_until(lambda: len(talk.tokens) >= 5, "some tokens")
        with slow_source(monkeypatch) as source:
            lab.kill(lab.stage(1))
            newcomer = lab.add_worker(4)
            source.arrive(0.25)
            with pytest.raises(CapacityError, match="no further") as caught:
                talk.result()
            assert f"{newcomer.folder.name} has 25% of layers" in str(caught.value)
        lab.wait_serving(stages=2)
        assert lab.ask(request) == alone.answer(request), "the source is back"
        lab.wait_quiet()


def test_layers_that_never_come_are_told_of_when_nobody_else_can_load_them(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_LOAD_QUIET_S", 1.0)
    [request] = mixture(alone, 1, 60)
    with swarm(tmp_path, tiny, layers=(4, 4), stages=2, patience_s=DEADLINE_S) as lab:
        talk = lab.start(request)
        lab.wait_until(lambda: len(talk.tokens) >= 5, "some tokens")
        with slow_source(monkeypatch) as source:
            lab.kill(lab.stage(1))
            newcomer = lab.add_worker(4)
            source.arrive(0.25)
            lab.cluster.pool._patience_s = 0.5
            with pytest.raises(
                CapacityError, match="could not load it: loading has come no further than 25%"
            ):
                talk.result()
            assert newcomer.folder.name in str(talk.error)


def test_a_stream_is_kept_alive_meanwhile(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        swarm(tmp_path, tiny, layers=(4, 4), stages=2, patience_s=DEADLINE_S) as lab,
        ApiServer(create_app(lab.cluster.pool, limits=Limits(ping_interval_s=0.05))) as server,
    ):
        body = {
            "model": lab.model,
            "prompt": [5, 6, 7, 8],
            "max_tokens": 200,
            "temperature": 0,
            "stream": True,
        }
        asked = request("/v1/completions", json.dumps(body).encode())
        undisturbed = text_of(server.ask(asked)[1])
        with slow_source(monkeypatch) as source, server.connect() as sock:
            sock.sendall(asked)
            answer = read_all(sock)
            content = next(answer)
            while content.count(b"data: ") < 3:
                content += next(answer)
            lab.kill(lab.stage(1))
            lab.add_worker(4)
            source.arrive(0.25)
            while not content.endswith(b": ping\n\n\r\n") or content.count(b": ping\n\n") < 3:
                content += next(answer)
            source.is_there.set()
            content += b"".join(answer)
        assert text_of(content) == undisturbed
        assert len(undisturbed) > 0


def text_of(content: bytes) -> str:
    """Of a stream of completions."""
    lines = [line for line in content.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)

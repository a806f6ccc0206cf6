"""A cluster behind its real routes, and a server behind faked ones, that commands reach whatever the address."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from shardcompute.api import create_app
from shardcompute.cluster_client import ClusterClient
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.admin.views import ClusterView
from shardcompute.security.local_secret import SECRET_FILE
from support.api.bridge import LOCAL_SECRET, Bridge
from support.swarm.fake_cluster import NOW_S, FakeCluster, serving_cluster

HERE = ("--url", "http://127.0.0.1:8000")


@dataclass
class Lab:
    """A cluster, what speaks for it, and what happens in it between one look of a watcher and the next."""

    cluster: FakeCluster
    admin: ClusterAdmin
    script: list[Callable[[], Any]] = field(default_factory=list)
    addresses: list[tuple[str, str | None]] = field(default_factory=list)

    def watch(self) -> Iterator[ClusterView]:
        yield self.admin.state()
        for step in self.script:
            step()
            yield self.admin.state()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Commands that connect reach this cluster, whatever the address."""
    cluster = serving_cluster(500, 500, 500)
    settings = Settings(data_dir=tmp_path, offline=True)
    with ClusterAdmin(cluster, settings, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        lab = Lab(cluster, admin)
        app = create_app(object(), admin=admin, local_secret=LOCAL_SECRET)  # type: ignore[arg-type]

        class Connected(ClusterClient):
            def __init__(self, url: str, *, api_key: str | None = None, **options: Any) -> None:
                lab.addresses.append((url, api_key))
                super().__init__("http://127.0.0.1", api_key=LOCAL_SECRET, transport=Bridge(app))

            def watch(self) -> Generator[ClusterView, None, None]:
                yield from lab.watch()

        monkeypatch.setattr("shardcompute.cluster_client.ClusterClient", Connected)
        yield lab


def say_running(folder: Path, **fields: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    process = psutil.Process()
    told = {
        "pid": os.getpid(),
        "create_time_s": process.create_time(),
        "started_at_s": 0.0,
        "api_url": "http://127.0.0.1:9000",
        **fields,
    }
    path = folder / "cluster.json"
    path.touch(0o600)
    path.write_text(json.dumps(told))
    secret = folder / SECRET_FILE
    secret.touch(0o600)
    secret.write_text("sk-local-own\n")


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process counts as one of ours, however the tests were started."""
    monkeypatch.setattr("shardcompute.node.process.pidfile._PROGRAM", "")


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


@dataclass
class Server:
    """Answers tokens and completions as a server of `served` would."""

    served: list[str] = field(default_factory=lambda: ["org/tiny", "org/other"])
    pieces: list[str] = field(default_factory=lambda: ["Pa", "ris"])
    ending: str = "[DONE]"
    bodies: list[Any] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] = field(
        default_factory=lambda: {
            "queue_s": 0.1,
            "prefill_s": 0.5,
            "decode_s": 2.0,
            "prompt_tokens": 8,
            "generated_tokens": 5,
        }
    )

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.served]})
        body = json.loads(request.content)
        self.bodies.append((request.url.path, body))
        if request.url.path == "/tokenize":
            text = body.get("prompt") or "".join(f"{m['role']}:{m['content']}|" for m in body["messages"])
            return httpx.Response(200, json={"tokens": [ord(character) for character in text]})
        events = [event({"choices": [{"text": piece, "finish_reason": None}]}) for piece in self.pieces]
        if self.ending == "[DONE]":
            last = [{"text": "", "finish_reason": "stop"}]
            events += [event({"choices": last, "timings": self.timings})]
            events += [event({"choices": [], "usage": self.usage})] if self.usage else []
            events += ["data: [DONE]\n\n"]
        else:
            events += [self.ending]
        return httpx.Response(200, content="".join(events).encode())

    @property
    def prompts(self) -> list[str]:
        return ["".join(map(chr, body["prompt"])) for path, body in self.bodies if path == "/v1/completions"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()

    class Connected(ClusterClient):
        def __init__(self, url: str, *, api_key: str | None = None, **options: Any) -> None:
            super().__init__(url, api_key=api_key, transport=httpx.MockTransport(server))

    monkeypatch.setattr("shardcompute.cluster_client.ClusterClient", Connected)
    return server

"""Two coordinators in processes of their own and a real etcd: one is killed, the other leads, workers follow."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

from support.network.lab_links import wait_until
from support.network.real_etcd import needs_etcd, real_etcd
from support.swarm.processes import Started, run, started

PATIENCE_S = 60.0


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(each.getsockname()[1]) for each in sockets]


def coordinator(model: Path, folder: Path, store: str) -> contextlib.AbstractContextManager[Started]:
    api, cluster, join = free_ports(3)
    ports = ("--port", api, "--cluster-port", cluster, "--join-port", join)
    return started(
        "coordinator", model, "--data-dir", folder, "--store", store, *ports, "--kv-tokens", "2048"
    )


def complete(url: str) -> str:
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    order = urllib.request.Request(f"{url}/v1/completions", content, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(order, timeout=60) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


def answers(url: str) -> str | None:
    try:
        return complete(url)
    except (urllib.error.URLError, ConnectionError):
        return None


@needs_etcd
def test_a_killed_coordinator_is_followed_by_another(smollm2_gguf: Path, tmp_path: Path) -> None:
    with real_etcd(tmp_path / "etcd") as etcd, contextlib.ExitStack() as stack:
        first = stack.enter_context(coordinator(smollm2_gguf, tmp_path / "one", etcd.url))
        token = first.wait_for(r"shardcompute join (sc1\.\S+)")[1]
        url = first.wait_for(r"listens at (http://\S+)")[1]
        worker = stack.enter_context(
            started("join", token, "--data-dir", tmp_path / "worker", "--threads", "1")
        )
        worker.wait_for("serv|joined")
        refused = run("coordinator", smollm2_gguf, "--data-dir", tmp_path / "two", "--store", etcd.url)
        assert "whose authority is not on this machine" in refused.stderr
        shutil.copytree(tmp_path / "one" / "authority", tmp_path / "two" / "authority")
        second = stack.enter_context(coordinator(smollm2_gguf, tmp_path / "two", etcd.url))
        second.wait_for("takes over when it is gone")
        first.wait_for("is ready at")
        expected = complete(url)
        wait_until(
            lambda: (tmp_path / "worker" / "member.json").read_text().count("tcp:") == 2,
            "it knows both",
            PATIENCE_S,
        )
        first.signal(signal.SIGKILL)
        second.wait_for("this coordinator leads, in epoch")
        url = second.wait_for(r"is ready at (http://\S+)")[1]
        wait_until(lambda: answers(url) == expected, "the other answers", PATIENCE_S)
        assert second.signal(signal.SIGINT) == 0

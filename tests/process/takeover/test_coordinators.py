"""Two coordinators in processes of their own and a real etcd: one is killed, the other leads, workers follow."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from types import MappingProxyType

from support.network.lab_links import wait_until
from support.network.real_etcd import needs_etcd, real_etcd
from support.swarm.processes import Started, run, started

PATIENCE_S = 60.0


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(each.getsockname()[1]) for each in sockets]


def command(model: Path, folder: Path, store: str) -> tuple[str | Path, ...]:
    """Starts a coordinator at ports that nobody else has."""
    api, cluster, join = free_ports(3)
    ports = ("--port", api, "--cluster-port", cluster, "--join-port", join)
    return ("coordinator", model, "--data-dir", folder, "--store", store, *ports, "--kv-tokens", "2048")


def coordinator(model: Path, folder: Path, store: str) -> contextlib.AbstractContextManager[Started]:
    return started(*command(model, folder, store))


def ask(url: str, headers: Mapping[str, str] = MappingProxyType({}), **fields: object) -> HTTPResponse:
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, **fields}
    order = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    reply: HTTPResponse = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(order, timeout=60)
    return reply


def complete(url: str) -> str:
    with ask(url) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


@dataclass
class Heard:
    """What a client has of a stream: text up to the last id."""

    text: str = ""
    last_id: str = "0"
    is_over: bool = False

    def listen(self, url: str, most: int = 1_000_000) -> None:
        """Go on with it, for so many events at most. What comes without an id belongs to the next one."""
        fields: dict[str, object] = {"stream": True, "temperature": 0.8, "max_tokens": 150}
        with ask(url, {"Last-Event-ID": self.last_id}, **fields) as reply:
            id = pending = ""
            for line in reply:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "id":
                    id = value
                elif name == "data" and value == "[DONE]":
                    self.is_over = True
                elif name == "data":
                    pending += json.loads(value)["choices"][0]["text"]
                elif not name and id:
                    self.text, self.last_id, id, pending = self.text + pending, id, "", ""
                    most -= 1
                    if not most:
                        return


def answers(url: str) -> str | None:
    try:
        return complete(url)
    except (urllib.error.URLError, ConnectionError):
        return None


def coordinators(folder: Path) -> list[str]:
    told = json.loads(run("status", "--json", "--data-dir", folder).stdout)
    return [each["status"] for each in told["coordinators"]]


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
        refused = run(*command(smollm2_gguf, tmp_path / "two", etcd.url))
        assert "whose authority is not on this machine" in refused.stderr
        shutil.copytree(tmp_path / "one" / "authority", tmp_path / "two" / "authority")
        second = stack.enter_context(coordinator(smollm2_gguf, tmp_path / "two", etcd.url))
        second.wait_for("takes over when it is gone")
        first.wait_for("is ready at")
        told = run("status", "--data-dir", tmp_path / "two")
        assert told.returncode != 0
        assert f"does, at {url}" in told.stderr
        wait_until(lambda: coordinators(tmp_path / "one") == ["leads", "waits"], "it lists both", PATIENCE_S)
        expected = complete(url)
        wait_until(
            lambda: (tmp_path / "worker" / "member.json").read_text().count("tcp:") == 2,
            "it knows both",
            PATIENCE_S,
        )
        heard, again = Heard(), Heard()
        heard.listen(url, most=3)
        again.text, again.last_id = heard.text, heard.last_id
        heard.listen(url, most=20)
        first.signal(signal.SIGKILL)
        second.wait_for("this coordinator leads, in epoch")
        url = second.wait_for(r"is ready at (http://\S+)")[1]
        wait_until(lambda: answers(url) == expected, "the other answers", PATIENCE_S)
        for each in (heard, again):
            each.listen(url)
        assert heard.is_over
        assert heard.text == again.text, "wherever it broke off, the same answer"
        assert len(heard.text) > 200
        assert second.signal(signal.SIGINT) == 0

"""A worker is emptied, restarted and taken back while somebody is being answered, who notices nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from shardcompute.client import Client
from support.swarm.processes import Swarm, memory_for, run, started, swarm_of

pytestmark = pytest.mark.timeout(180)
SMALL = ("--kv-tokens", "2048", "--threads", "1")
STORY = "Tell me a story about a dragon."


def _guest(swarm: Swarm) -> dict[str, Any] | None:
    nodes = [node for node in swarm.state()["nodes"] if node["name"] == "guest"]
    return next((node for node in nodes if node["status"] == "ready"), None)


def _covers(ranges: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    held = {layer for each in ranges for layer in range(each["start"], each["stop"])}
    return all(layer in held for each in others for layer in range(each["start"], each["stop"]))


def test_a_worker_is_restarted_while_answers_go_on(smollm2_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    memory = memory_for(smollm2_gguf, 2)
    options = ("--data-dir", tmp_path / "guest", "--name", "guest", *memory, "--threads", "1")
    # Elsewhere, it cannot read the coordinator's own file, and keeps what it fetches.
    (tmp_path / "elsewhere").mkdir()
    within = ("env", f"TMPDIR={tmp_path / 'elsewhere'}")
    with (
        swarm_of(smollm2_gguf, folder, "--workers", "2", *memory, *SMALL) as swarm,
        Client(swarm.url) as client,
    ):

        def tell() -> str:
            return client.chat(STORY, max_tokens=48, temperature=0).text

        undisturbed = tell()
        with started("join", swarm.token, *options, within=within) as guest:
            swarm.wait_until(lambda: (_guest(swarm) or {}).get("cached"))
            before = _guest(swarm)
            assert before is not None
            stop, told = threading.Event(), list[str]()
            asking = threading.Thread(target=lambda: _ask_until(stop, tell, told))
            asking.start()
            try:
                done = run("drain", "guest", "--data-dir", folder)
                assert done.returncode == 0, done.stderr
                assert "guest is empty and has left" in done.stderr
                assert guest.end() == 0
                with started("worker", *options, within=within) as again:
                    again.wait_for("in the cluster")
                    swarm.wait_until(lambda: _guest(swarm))
                    returned = _guest(swarm)
                    assert returned is not None
                    assert returned["id"] == before["id"]
                    assert _covers(returned["cached"], before["cached"]), "what it had on disk is there"
            finally:
                stop.set()
                asking.join()
        assert told
        assert set(told) == {undisturbed}, json.dumps(told)


def _ask_until(stop: threading.Event, tell: Any, told: list[str]) -> None:
    while not stop.is_set():
        told.append(tell())

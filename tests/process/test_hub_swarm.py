"""A model that stays at a hub, served by three processes that read their own parts there."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.models.tiny_checkpoint import save_tiny_llama
from support.network.fake_hub import FakeHub, serving
from support.swarm.processes import memory_for, started, swarm_of

REPO = "org/made-up"
MODEL_BYTES = 60 << 20
KEPT_BYTES = 2 << 20
"""Journal, keys, history, logs: whatever the model's size is."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub()) as opened:
        monkeypatch.setenv("SHARDCOMPUTE_HUB_URL", opened.url)
        monkeypatch.setenv("SHARDCOMPUTE_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield opened


def answer(url: str, model: str, after_tokens: int = 0, then: Callable[[], object] = lambda: None) -> str:
    """A streamed answer; `then` is called once this many pieces of it are there."""
    body = {"model": model, "prompt": "Once", "max_tokens": 64, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, count = "", 0
    with urllib.request.urlopen(request, timeout=60) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                if count == after_tokens:
                    then()
                count += 1
                text += json.loads(line[6:])["choices"][0]["text"]
    assert count > after_tokens
    return text


def kept_bytes(folder: Path) -> int:
    """What lies in a folder, but for what its workers keep."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and "workers" not in path.relative_to(folder).parts
    )


def test_three_workers_read_their_parts_at_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "plain", intermediate=MODEL_BYTES // 6 // 768)
    hub.put_folder(REPO, model)
    limits = ("--workers", "3", "--kv-tokens", "2048", "--threads", "1", *memory_for(model, 3))
    with started("up", model, "--local", "--port", "0", "--threads", "1") as single:
        expected = answer(single.wait_for(r"is ready at (http://\S+)")[1], "plain")
    with swarm_of(Path(REPO), tmp_path / "cluster", *limits) as swarm:
        swarm.wait_until(lambda: len(swarm.stage_names()) == 3)
        assert answer(swarm.url, REPO) == expected
        assert MODEL_BYTES < hub.sent_bytes < 1.2 * MODEL_BYTES
        hub.sent_bytes = 0
        name = swarm.stage_names()[1]
        victim = swarm.worker(name)

        def lose_machine() -> None:
            victim.kill()
            shutil.rmtree(tmp_path / "cluster" / "workers" / name / "shards")

        assert answer(swarm.url, REPO, 8, lose_machine) == expected
        assert hub.sent_bytes > MODEL_BYTES // 8, "whoever goes on has fetched for itself"
        assert kept_bytes(tmp_path / "cluster") < KEPT_BYTES
        assert kept_bytes(tmp_path / "home") < KEPT_BYTES

"""A model that stays at a hub, served by three processes that read their own parts there."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcompute.security.local_secret import read_local_secret
from support.models.tiny_checkpoint import save_tiny_llama
from support.network.fake_hub import FakeHub, Fault, serving
from support.swarm import processes
from support.swarm.processes import Swarm, memory_for, started, swarm_of

REPO = "org/made-up"
MODEL_BYTES = 60 << 20
KEPT_BYTES = 4 << 20
"""Journal, keys, history, logs: whatever the model's size is."""
MARGIN_BYTES = 32 << 20
"""Between two runs of a coordinator."""


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


def sent_bytes(swarm: Swarm) -> float:
    """Of weights, by the coordinator."""
    headers = {"authorization": f"Bearer {read_local_secret(swarm.folder)}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{swarm.url}/metrics", headers=headers), timeout=60
    ) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith("shardcompute_weights_sent_bytes_total{")]
    assert found, "workers have at least asked for the vocabulary"
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("this system does not tell what a process has taken at most")
    [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def serve_and_lose_one(
    hub: FakeHub, folder: Path, model_bytes: int, layers: int, *, is_answering: bool
) -> int:
    """A made-up model of this size at the hub, from three workers, one of which is lost with all that it has, perhaps
    while it answers: the same answers as from one process. Gives the most memory that the coordinator has taken."""
    model = save_tiny_llama(folder / "plain", layers=layers, intermediate=model_bytes // layers // 768)
    hub.put_folder(REPO, model)
    limits = ("--workers", "3", "--kv-tokens", "2048", "--threads", "1", *memory_for(model, 3))
    with started("up", model, "--local", "--port", "0", "--threads", "1") as single:
        expected = answer(single.wait_for(r"is ready at (http://\S+)")[1], "plain")
    hub.sent_bytes = 0
    with swarm_of(Path(REPO), folder / "cluster", *limits) as swarm:
        swarm.wait_until(lambda: len(swarm.stage_names()) == 3)
        assert answer(swarm.url, REPO) == expected
        assert model_bytes < hub.sent_bytes < 1.2 * model_bytes
        hub.sent_bytes = 0
        name = swarm.stage_names()[1]
        victim = swarm.worker(name)

        def lose_machine() -> None:
            victim.kill()
            shutil.rmtree(folder / "cluster" / "workers" / name / "shards")

        if is_answering:
            assert answer(swarm.url, REPO, 8, lose_machine) == expected
        else:
            lose_machine()
            swarm.wait_until(lambda: hub.sent_bytes > model_bytes // 8 and swarm.stage_names())
            assert answer(swarm.url, REPO) == expected
        assert hub.sent_bytes > model_bytes // 8, "whoever goes on has fetched for itself"
        assert kept_bytes(folder / "cluster") < KEPT_BYTES
        assert sent_bytes(swarm) < KEPT_BYTES, "the vocabulary, and no weights"
        kept = kept_bytes(folder / "cluster")
        peak = peak_bytes(swarm.started.pid)
    print(
        f"a model of {model_bytes} bytes: the coordinator kept {kept} bytes and took {peak} of memory at most"
    )
    return peak


def test_three_workers_read_their_parts_at_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    serve_and_lose_one(hub, tmp_path, MODEL_BYTES, 6, is_answering=True)
    assert kept_bytes(tmp_path / "home") < KEPT_BYTES


def single_answer(model: Path) -> str:
    with started("up", model, "--local", "--port", "0", "--threads", "1") as single:
        return answer(single.wait_for(r"is ready at (http://\S+)")[1], model.name)


def test_in_a_closed_network_the_coordinator_alone_reads_at_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    """`--via-coordinator`: once, from a hub that is busy and breaks off; a machine that lost all asks nobody else."""
    model = save_tiny_llama(tmp_path / "plain", layers=6, intermediate=2048)
    hub.put_folder(REPO, model)
    [weights] = [path.name for path in model.glob("*.safetensors")]
    cut_bytes = 2 << 20
    hub.fail(
        f"/storage/{REPO}/{weights}",
        Fault(status=429, headers={"Retry-After": "0"}),
        Fault(cut_after=cut_bytes),
    )
    limits = ("--workers", "3", "--kv-tokens", "2048", "--threads", "1", *memory_for(model, 3))
    with swarm_of(Path(REPO), tmp_path / "cluster", "--via-coordinator", *limits) as swarm:
        swarm.wait_until(lambda: len(swarm.stage_names()) == 3)
        asked = hub.requests("/storage/")
        assert [each.headers.get("range") for each in asked] == [None, None, f"bytes={cut_bytes}-"]
        name = swarm.stage_names()[1]
        expected = answer(swarm.url, REPO)

        def lose_machine() -> None:
            swarm.worker(name).kill()
            shutil.rmtree(tmp_path / "cluster" / "workers" / name / "shards", ignore_errors=True)

        assert answer(swarm.url, REPO, 8, lose_machine) == expected == single_answer(model)
        assert len(hub.requests("/storage/")) == len(asked)


def test_a_coordinator_starts_again_while_its_hub_is_out_of_reach(hub: FakeHub, tmp_path: Path) -> None:
    """It has kept what it knows of the model, and its workers have their weights."""
    model = save_tiny_llama(tmp_path / "plain", layers=6)
    hub.put_folder(REPO, model)
    limits = ("--workers", "2", "--kv-tokens", "2048", "--threads", "1", *memory_for(model, 2))
    with swarm_of(Path(REPO), tmp_path / "cluster", *limits) as swarm:
        swarm.wait_until(lambda: len(swarm.stage_names()) == 2)
        expected = answer(swarm.url, REPO)
        assert swarm.started.signal(signal.SIGTERM) == 0
    hub.every["/"] = Fault(status=503, headers={"Retry-After": "0"})
    asked = len(hub.requests("/storage/"))
    with swarm_of(Path(REPO), tmp_path / "cluster", *limits) as swarm:
        swarm.wait_until(lambda: len(swarm.stage_names()) == 2)
        assert answer(swarm.url, REPO) == expected
    assert len(hub.requests("/storage/")) == asked


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_coordinator_takes_as_much_for_a_large_model_as_for_a_small_one(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 GB; run it with -s to see the figures."""
    monkeypatch.setattr(processes, "PATIENCE_S", 600.0)
    small = serve_and_lose_one(hub, tmp_path / "small", MODEL_BYTES, 24, is_answering=False)
    large = serve_and_lose_one(hub, tmp_path / "large", 2000 << 20, 24, is_answering=False)
    assert large < small + MARGIN_BYTES

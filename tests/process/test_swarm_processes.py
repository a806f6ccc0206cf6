"""A cluster of real processes: it serves, survives the loss of a worker, takes others in, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardcompute.node.process.pidfile import CLUSTER_FILE, Running, read_running
from support.swarm.processes import FREE_PORTS, Swarm, memory_for, run, started, swarm_of, wait_gone

openai = pytest.importorskip("openai")

SMALL = ("--kv-tokens", "2048", "--threads", "1")
# Less than the model needs, so that no worker can serve it alone; two can.
THREE = ("--workers", "3", *SMALL)
ONE = ("--workers", "1", *SMALL)
MODEL = "SmolLM2-135M-Instruct.Q4_1"
STORY = [{"role": "user", "content": "Tell me a story about a dragon."}]


@pytest.fixture(scope="module")
def swarm(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with swarm_of(
        smollm2_gguf, tmp_path_factory.mktemp("swarm") / "cluster", *THREE, *memory_for(smollm2_gguf, 3)
    ) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def client(swarm: Swarm) -> Iterator[Any]:
    import httpx

    with (
        httpx.Client(trust_env=False) as transport,
        openai.OpenAI(
            base_url=f"{swarm.url}/v1", api_key="none", max_retries=0, timeout=60, http_client=transport
        ) as client,
    ):
        yield client


def _tell_story(client: Any, after_tokens: int = 0, then: Callable[[], object] = lambda: None) -> str:
    """A streamed answer; `then` is called once this many pieces of it are there."""
    text = ""
    with client.chat.completions.create(
        model=MODEL, messages=STORY, max_tokens=64, temperature=0, stream=True
    ) as stream:
        for count, chunk in enumerate(stream):
            if count == after_tokens:
                then()
            text += chunk.choices[0].delta.content or ""
    return text


def test_openai_clients_talk_to_several_workers(swarm: Swarm, client: Any) -> None:
    assert len(swarm.stage_names()) > 1
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=64, temperature=0)
    assert answer.usage.completion_tokens == 64
    assert _tell_story(client) == answer.choices[0].message.content


def test_killed_worker_is_not_noticed_in_the_answer(swarm: Swarm, client: Any) -> None:
    undisturbed = _tell_story(client)
    victim = swarm.stage_names()[0]
    process = swarm.worker(victim)
    assert _tell_story(client, 8, process.kill) == undisturbed
    swarm.started.wait_for(rf"{victim} was ended by SIGKILL; it is started again")
    swarm.wait_until(lambda: any(victim in c.cmdline() for c in swarm.started.children()))
    assert swarm.worker(victim).pid != process.pid
    swarm.wait_until(lambda: victim in swarm.node_names().values())


def test_others_join_from_their_own_folders_and_come_back(swarm: Swarm, tmp_path: Path) -> None:
    arguments = (
        "--data-dir",
        tmp_path / "worker",
        "--name",
        "guest",
        "--max-memory",
        "300M",
        "--threads",
        "1",
    )
    with started("join", swarm.token, *arguments) as guest:
        guest.wait_for("joined home as n")
        swarm.wait_until(lambda: "guest" in swarm.node_names().values())
        assert guest.signal(signal.SIGTERM) == 0
    swarm.wait_until(lambda: "guest" not in swarm.node_names().values())
    with started("worker", *arguments) as guest:
        swarm.wait_until(lambda: "guest" in swarm.node_names().values())
        twice = run("join", swarm.token, *arguments)
        assert twice.returncode == 2
        assert f"pid {guest.pid}" in twice.stderr
        assert guest.signal(signal.SIGINT) == 0
    assert guest.lines[-1] == "stopped"
    swarm.wait_until(lambda: "guest" not in swarm.node_names().values())


def test_folder_is_started_once(swarm: Swarm, smollm2_gguf: Path) -> None:
    second = run("up", smollm2_gguf, "--data-dir", swarm.folder, *FREE_PORTS)
    assert second.returncode == 2
    assert f"pid {swarm.started.pid} at {swarm.url}" in second.stderr
    assert swarm.stage_names()


def test_state_file_is_private_and_tells_where_to_go(swarm: Swarm) -> None:
    path = swarm.folder / CLUSTER_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    running = read_running(path)
    assert running is not None
    assert (running.pid, running.api_url, running.name) == (swarm.started.pid, swarm.url, "home")
    assert running.cluster_port
    assert running.join_port


def test_logs_of_all_processes_without_secrets(swarm: Swarm) -> None:
    shown = run("logs", "--data-dir", swarm.folder, "--lines", "1000").stdout
    assert all(f"{name}  2" in shown for name in ("worker-1   ", "worker-2   ", "coordinator"))
    assert swarm.token not in shown
    one = run("logs", "worker-2", "--data-dir", swarm.folder)
    assert "registered as" in one.stdout
    unknown = run("logs", "worker-9", "--data-dir", swarm.folder)
    assert unknown.returncode == 2
    assert "worker-2" in unknown.stderr


def test_doctor_finds_the_cluster_well(swarm: Swarm) -> None:
    done = run("doctor", "--data-dir", swarm.folder, "--json")
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, [each for each in findings.values() if each["level"] == "bad"]
    assert f"pid {swarm.started.pid}" in findings["cluster"]["text"]
    assert {"HTTP API", "clock and coordinator", "secrets"} <= set(findings)


def test_tokens_that_do_not_admit(swarm: Swarm, tmp_path: Path) -> None:
    folder = ("--data-dir", tmp_path / "worker")
    broken = run("join", swarm.token[:-3], *folder)
    assert broken.returncode == 2
    made = swarm.ask("POST", "/cluster/tokens", {})
    swarm.ask("DELETE", f"/cluster/tokens/{made['id']}")
    revoked = run("join", made["token"], *folder)
    assert revoked.returncode == 10
    assert "revoked" in revoked.stderr
    nowhere = run("worker", *folder)
    assert nowhere.returncode == 2
    assert "no cluster has been joined" in nowhere.stderr


def test_down_stops_everything_and_the_cluster_comes_back(smollm2_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    with swarm_of(smollm2_gguf, folder, *ONE) as swarm:
        family = [psutil.Process(swarm.started.pid), *swarm.started.children()]
        nodes = set(swarm.node_names())
        token = swarm.token
        done = run("down", "--data-dir", folder)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "stopped")
        assert swarm.started.end() == 0
        assert wait_gone(family) == []
    assert not (folder / CLUSTER_FILE).exists()
    again = run("down", "--data-dir", folder)
    assert again.returncode == 0
    assert "nothing is running" in again.stderr
    unreachable = run("join", token, "--data-dir", tmp_path / "worker")
    assert unreachable.returncode == 9
    other = run("up", smollm2_gguf, "--data-dir", folder, "--name", "other", *FREE_PORTS)
    assert other.returncode == 2
    assert "'home'" in other.stderr
    # What a crash leaves behind is no obstacle: the id may be somebody else's by now.
    left = {"pid": os.getpid(), "create_time_s": 1, "started_at_s": 1}
    (folder / CLUSTER_FILE).write_text(json.dumps(left))
    with swarm_of(smollm2_gguf, folder, *ONE) as swarm:
        assert set(swarm.node_names()) == nodes
        assert swarm.started.signal(signal.SIGINT) == 0
        assert swarm.started.lines[-2:] == ["stopping", "stopped"]


def test_workers_do_not_outlive_their_parent(smollm2_gguf: Path, tmp_path: Path) -> None:
    with started(
        "up", smollm2_gguf, "--data-dir", tmp_path / "cluster", *FREE_PORTS, "--workers", "2", *SMALL
    ) as up:
        up.wait_for("worker-2 joined")
        children = up.children()
        assert len(children) == 2
        assert up.signal(signal.SIGKILL) == -signal.SIGKILL
        assert wait_gone(children) == []


def test_stopping_while_starting(smollm2_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    with started("up", smollm2_gguf, "--data-dir", folder, *FREE_PORTS, *ONE) as up:
        up.wait_for("starting 1 worker")
        assert up.signal(signal.SIGTERM) in (0, 130)
    assert not (folder / CLUSTER_FILE).exists()


def test_busy_cluster_port_is_named(smollm2_gguf: Path, tmp_path: Path, swarm: Swarm) -> None:
    running = read_running(swarm.folder / CLUSTER_FILE)
    assert isinstance(running, Running)
    port = str(running.cluster_port)
    busy = run("up", smollm2_gguf, "--data-dir", tmp_path / "c", "--port", "0", "--cluster-port", port)
    assert busy.returncode == 2
    assert f"Port {port} is already in use by " in busy.stderr
    assert f"(pid {running.pid})" in busy.stderr


QUESTION = "Why is the sky blue?"
ASK = """
import sys
from shardcompute.client import Client
with Client(sys.argv[1], api_key=sys.argv[2]) as client:
    print(client.chat(sys.argv[3], model=sys.argv[4], max_tokens=8, temperature=0).text)
"""


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: 10.213.7.1 and 10.213.7.2."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"sc{os.getpid()}a", f"sc{os.getpid()}b")

    def do(*arguments: str) -> None:
        subprocess.run([ip, *arguments], check=True, capture_output=True, text=True)

    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                do("netns", "add", name)
                stack.callback(do, "netns", "del", name)
            do(
                "link",
                "add",
                "cable",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                names[1],
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system makes no network namespaces: {error.stderr}")
        for number, name in enumerate(names, start=1):
            do("-n", name, "address", "add", f"10.213.7.{number}/24", "dev", "cable")
            do("-n", name, "link", "set", "cable", "up")
            do("-n", name, "link", "set", "lo", "up")
        yield names


def test_worker_joins_over_a_network(smollm2_gguf: Path, tmp_path: Path, namespaces: tuple[str, str]) -> None:
    expected = run("run", smollm2_gguf, QUESTION, "--max-tokens", "8", "--temperature", "0")
    here, there = (("ip", "netns", "exec", name) for name in namespaces)
    cluster = (
        "--data-dir",
        tmp_path / "cluster",
        "--host",
        "0.0.0.0",
        "--advertise",
        "10.213.7.1",
        "--no-workers",
    )
    with started("up", smollm2_gguf, *cluster, "--kv-tokens", "2048", within=here) as up:
        token = up.wait_for(r"^  shardcompute join (sc1\.\S+)$")[1]
        worker = ("--data-dir", tmp_path / "worker", "--name", "far", "--threads", "1")
        with started("join", token, *worker, within=there) as far:
            up.wait_for("is served by far")
            up.wait_for("is ready at ")
            key = up.wait_for(r"API key for clients, shown this once: (\S+)")[1]
            ask = [*there, sys.executable, "-c", ASK, "http://10.213.7.1:8000"]
            answer = subprocess.run(
                [*ask, key, QUESTION, MODEL], capture_output=True, text=True, check=False, timeout=60
            )
            assert answer.stdout == expected.stdout, answer.stderr
            stranger = subprocess.run(
                [*ask, "none", QUESTION, MODEL], capture_output=True, text=True, check=False, timeout=60
            )
            assert "API key" in stranger.stderr
            assert far.signal(signal.SIGINT) == 0
        assert up.signal(signal.SIGINT) == 0


def test_coordinator_needs_no_engine() -> None:
    code = (
        "import sys, shardcompute.node.cluster, shardcompute.node.process.launch\n"
        "import shardcompute.node.admin.admin, shardcompute.api\n"
        "print([name for name in ('onnxruntime', 'onnx', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_coordinator_serves_what_joins(smollm2_gguf: Path, tmp_path: Path) -> None:
    with started(
        "coordinator", smollm2_gguf, "--data-dir", tmp_path / "c", *FREE_PORTS, "--kv-tokens", "2048"
    ) as coordinator:
        token = coordinator.wait_for(r"shardcompute join (sc1\.\S+)")[1]
        libraries = {Path(entry.path).name for entry in psutil.Process(coordinator.pid).memory_maps()}
        assert not any("onnxruntime" in name for name in libraries)
        with started("join", token, "--data-dir", tmp_path / "worker", "--threads", "1"):
            coordinator.wait_for("is served by")
        assert coordinator.signal(signal.SIGINT) == 0

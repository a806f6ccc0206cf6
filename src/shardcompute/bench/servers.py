"""Real servers for benchmarks: processes started for a measurement, asked over HTTP, stopped afterwards."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from shardcompute.bench.streaming import ask_at_once, chunks_of
from shardcompute.core.errors import BackendError
from shardcompute.core.phases import Phase, read_phases
from shardcompute.node.process.log_files import log_folder
from shardcompute.security.local_secret import read_local_secret

_READY_S = 300.0
_STOP_S = 20.0
_LOGGED = re.compile(r"\d{4}-\d\d-\d\dT\S+Z ")
_ERROR = re.compile(r"\S+Z (ERROR|CRITICAL) ")


@dataclass(slots=True)
class StreamedReply:
    """One streamed answer as a client saw it: when each token came (seconds after the request), and the text."""

    arrivals_s: list[float] = field(default_factory=list)
    text: str = ""
    began_s: float = 0.0
    """By `time.perf_counter`."""
    timings: dict[str, Any] = field(default_factory=dict)
    """What the server said of it."""

    @property
    def first_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


class Server:
    """A running `shardcompute up`."""

    def __init__(self, name: str, url: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.url = url
        self.folder = folder
        self.process = process
        self.client = httpx.Client(base_url=url, timeout=300.0)

    @property
    def operator(self) -> dict[str, str]:
        """Headers of whoever operates the cluster."""
        return {"Authorization": f"Bearer {read_local_secret(self.folder)}"}

    def state(self) -> dict[str, Any]:
        """What the cluster says of itself."""
        answer = self.client.get("/cluster/state", headers=self.operator)
        answer.raise_for_status()
        state: dict[str, Any] = answer.json()
        return state

    def complaints(self, most: int = 3) -> list[str]:
        """The newest errors in the logs of its processes: the folder is gone when the server is."""
        found = []
        for log in log_folder(self.folder).glob("*.log"):
            found += find_errors(log.read_text(encoding="utf-8", errors="replace").splitlines())
        return sorted(found)[-most:]

    def phases(self) -> dict[str, list[Phase]]:
        """What each of its processes has logged of its start, by the name of the log."""
        logs = sorted(log_folder(self.folder).glob("*.log"))
        return {
            log.stem: read_phases(log.read_text(encoding="utf-8", errors="replace").splitlines())
            for log in logs
        }

    def count_tokens(self, text: str) -> int:
        """How long a text is for the model that is served."""
        answer = self.client.post("/tokenize", json={"prompt": text})
        answer.raise_for_status()
        count: int = answer.json()["count"]
        return count

    def stream(
        self, prompt: Sequence[int], tokens: int, on_first: Callable[[], object] = lambda: None
    ) -> StreamedReply:
        """One greedy answer of exactly `tokens` tokens; `on_first` hears of the first of them."""
        body = {
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "logprobs": 0,
            "speculation": {"drafter": "off"},
        }
        started = time.perf_counter()
        result = StreamedReply(began_s=started)
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            for chunk in chunks_of(response):
                for choice in chunk["choices"]:
                    count = len((choice.get("logprobs") or {}).get("tokens", []))
                    if count and not result.arrivals_s:
                        on_first()
                    result.arrivals_s += [time.perf_counter() - started] * count
                    result.text += choice["text"]
                result.timings = chunk.get("timings") or result.timings
        return result

    def streams(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[StreamedReply], float]:
        """Several answers at once, and how long all of them took."""
        return ask_at_once(prompts, lambda prompt: self.stream(prompt, tokens))


def find_errors(lines: Sequence[str]) -> list[str]:
    """What log lines say of errors: each with the last line of its traceback, which names the exception."""
    blocks: list[list[str]] = []
    for line in lines:
        if _LOGGED.match(line) or not blocks:
            blocks.append([line])
        else:
            blocks[-1].append(line)
    return [" … ".join([first, *trace[-1:]]) for first, *trace in blocks if _ERROR.match(first)]


def cluster_arguments(workers: int, form: str, *more: str) -> list[str]:
    """Options of `up` for a local cluster of workers with one thread each, on any free ports."""
    alone = ["--threads", "1", "--cluster-port", "0", "--join-port", "0"]
    return ["--workers", str(workers), "--parallel", "tp=1", "--weights", form, *alone, *more]


@contextlib.contextmanager
def serving(name: str, model: str, arguments: Sequence[str]) -> Iterator[Server]:
    """A server in a folder of its own, ready to answer."""
    with tempfile.TemporaryDirectory(prefix="shardcompute-bench-", ignore_cleanup_errors=True) as folder:
        port = _free_port()
        command = [sys.executable, "-m", "shardcompute", "up", model, "--port", str(port)]
        if "--local" not in arguments:
            command += ["--data-dir", folder]
        log = Path(folder, "bench.log")
        with running([*command, *arguments], log) as process:
            server = Server(name, f"http://127.0.0.1:{port}", Path(folder), process)
            with server.client:
                _await_ready(server, log)
                yield server


def _await_ready(server: Server, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if server.client.get("/health").status_code == 200:
                return
        time.sleep(0.1)
    said = "; ".join([last_words(log), *server.complaints()])
    raise BackendError(f"{server.name} did not become ready: {said}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Asked to stop at the end, then made to. Supervised workers also end with our end of their stdin."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        if process.poll() is None:
            process.kill()
            process.wait()


def last_words(log: Path) -> str:
    """The end of what a process has written."""
    return "; ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-4:])

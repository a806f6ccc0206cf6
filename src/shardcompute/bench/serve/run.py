"""Runs `bench serve`: a server with one worker, clients in processes of their own, and the engine alone beside.

For every number of streams, prompt length and drafter, in turns and several rounds: tokens per second while all streams
are answering, the time to the first token, and what the engine does by itself at the same rows and context. The same
prompt has to get the same text at every load.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from shardcompute.bench.report import Result, Say
from shardcompute.bench.servers import Server, serving
from shardcompute.core.errors import BackendError
from shardcompute.core.phases import Phase

MOST_CLIENTS = 4
_ENGINE_STEPS = 24
_PARTS = ("compute_s", "stage_queue_s", "codec_s", "wire_s", "draft_s")


@dataclass(frozen=True, slots=True)
class ServeBench:
    """What to measure. `arguments` are further ones of `up`."""

    model: str
    form: str = "native"
    backend: str = ""
    device: str = ""
    streams: Sequence[int] = (1, 8, 32, 64)
    prompts: Sequence[int] = (64, 2000)
    most_streams: Mapping[int, int] = field(default_factory=dict)
    """By the length of prompts, the most streams that they are measured with."""
    drafters: Sequence[str] = ("auto", "off")
    tokens: int = 128
    rounds: int = 3
    long_prompt: int = 3000
    """Of so many tokens one is measured by itself; 0: none."""
    clients: int = MOST_CLIENTS
    seconds: float = 0.0
    """No round begins after so many seconds; 0: all of them are run."""
    engine: bool = True
    threads: int | None = None
    arguments: Sequence[str] = ()

    @property
    def kv_tokens(self) -> int:
        pages = [count * (-(-(prompt + self.tokens + 2) // 64) + 1) for prompt, count in self.loads]
        return 64 * (max(pages) + 64) + 4 * self.long_prompt

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Tokens of the prompt, and streams."""
        return [
            (prompt, count)
            for prompt in self.prompts
            for count in self.streams
            if count <= self.most_streams.get(prompt, count)
        ]

    @property
    def context(self) -> int:
        return max(*self.prompts, self.long_prompt) + self.tokens + 64


class JsonProcess:
    """A process that is told lines of JSON and answers with such."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answer()

    def tell(self, command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BackendError(f"{self.process.args!r} ended with status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def processes(count: int, module: str, *arguments: str) -> Iterator[list[JsonProcess]]:
    opened: list[JsonProcess] = []
    try:
        opened.extend(JsonProcess(module, *arguments) for _ in range(count))
        yield opened
    finally:
        for each in opened:
            each.close()


@dataclass(slots=True)
class Measured:
    """The rounds of one load."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second while all streams are answering."""
    totals: list[float] = field(default_factory=list)
    """Tokens per second from the first request to the last token."""
    first_s: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    server_us: list[float] = field(default_factory=list)
    """CPU time per token of the process that has driver and API, and of its worker's."""
    worker_us: list[float] = field(default_factory=list)


Keep = Callable[[Sequence[Result]], None]
"""Writes down what is known so far."""
Load = tuple[int, int, str]
"""(tokens of the prompt, streams, drafter)"""


class ServeRun:
    """A server that is being measured."""

    def __init__(
        self,
        bench: ServeBench,
        server: Server,
        clients: Sequence[JsonProcess],
        engine: JsonProcess | None,
        say: Say,
        keep: Keep,
    ) -> None:
        self._bench = bench
        self._keep = keep
        self._server = server
        self._clients = clients
        self._engine = engine
        self._say = say
        own = psutil.Process(server.process.pid)
        self._processes = [own, *own.children(recursive=True)]
        self._salts = itertools.count()
        self._began = time.monotonic()
        self.measured: dict[Load, Measured] = {}
        self.texts: dict[tuple[int, int], set[str]] = {}
        """By length and number of the prompt, all texts that were said to it."""

    def run(self) -> None:
        bench = self._bench
        for count in bench.streams:
            # The first steps of a size are the slowest, wherever it was not met before.
            self._ask(min(bench.prompts), count, "off", tokens=4)
        for number in range(bench.rounds):
            turn = number % len(bench.drafters)
            for prompt, count in bench.loads:
                engine = self._steps_per_s(prompt, count)
                for drafter in (*bench.drafters[turn:], *bench.drafters[:turn]):
                    if bench.seconds and number and time.monotonic() - self._began > bench.seconds:
                        return
                    self._round(prompt, count, drafter, engine)
                    self._keep(self.results())

    def _round(self, prompt: int, count: int, drafter: str, engine: float | None) -> None:
        before = self._cpu_s()
        replies = self._ask(prompt, count, drafter)
        tokens = sum(reply["tokens"] for reply in replies)
        cpu_us = [
            1e6 * (after - former) / tokens for after, former in zip(self._cpu_s(), before, strict=True)
        ]
        measured = self.measured.setdefault((prompt, count, drafter), Measured())
        rate, total = rates_of(replies)
        measured.rates.append(rate)
        measured.totals.append(total)
        measured.server_us.append(cpu_us[0])
        measured.worker_us.append(sum(cpu_us[1:]))
        measured.first_s += [reply["arrivals"][0] for reply in replies]
        if engine is not None:
            measured.engine.append(engine)
        for index, reply in enumerate(replies):
            self.texts.setdefault((prompt, index), set()).add(reply["text"])
            measured.drafted += reply["timings"].get("drafted_tokens", 0) or 0
            measured.accepted += reply["timings"].get("accepted_tokens", 0) or 0
        part = "" if not engine else f", {rate / engine:.3f} of the engine's {engine:,.1f}"
        first = statistics.median(reply["arrivals"][0] for reply in replies)
        step = ", ".join(
            f"{name.removesuffix('_s')} {1e3 * statistics.median(values):.2f}"
            for name in _PARTS
            if (values := [reply["timings"].get(name, 0.0) for reply in replies])
        )
        self._say(
            f"prompt {prompt}, {count} streams, {drafter}: {rate:,.1f} tok/s{part}; {total:,.1f} over all, first "
            f"token {first:.3f} s; a step in ms: {step}; CPU per token in us: server {cpu_us[0]:.0f}, worker "
            f"{sum(cpu_us[1:]):.0f}"
        )

    def _ask(self, prompt: int, count: int, drafter: str, tokens: int | None = None) -> list[dict[str, Any]]:
        bench = self._bench
        prompts = [prompt_ids(prompt, index) for index in range(count)]
        body = {
            "model": "default",
            "max_tokens": tokens or bench.tokens,
            # Nothing that was computed for another load is used again.
            "cache_salt": f"{next(self._salts)}",
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "speculation": {"drafter": drafter},
        }
        asked = min(len(self._clients), count)
        for index in range(asked):
            command = {"url": self._server.url, "body": body, "prompts": prompts[index::asked]}
            self._clients[index].tell(command)
        replies: list[Any] = [None] * count
        for index in range(asked):
            replies[index::asked] = self._clients[index].answer()
        failed = [reply["error"] for reply in replies if reply["error"]]
        if failed:
            raise BackendError(f"{len(failed)} of {count} streams failed: {failed[0]}")
        return replies

    def _cpu_s(self) -> list[float]:
        """What the server's process has computed, and each of its workers."""
        times = [process.cpu_times() for process in self._processes]
        return [each.user + each.system for each in times]

    def _steps_per_s(self, prompt: int, count: int) -> float | None:
        """Tokens per second of the engine alone, at the rows and the mean context of such a load."""
        if self._engine is None:
            return None
        past = prompt + self._bench.tokens // 2
        command = {
            "operation": "decode",
            "batch": count,
            "past": past,
            "steps": _ENGINE_STEPS,
            "picks": False,
        }
        self._engine.tell(command)
        seconds: float = self._engine.answer()["value"]
        return count * _ENGINE_STEPS / seconds

    def prefill(self, tokens: int) -> list[Result]:
        """The time to the first token of one long prompt, against what the engine needs for it."""
        first, engine = [], []
        for number in range(3):
            # Another prompt each time: what was computed is kept.
            ids = prompt_ids(tokens, 1000 + number)
            body = {"model": "default", "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True}
            self._clients[0].tell({"url": self._server.url, "body": body, "prompts": [ids]})
            reply = self._clients[0].answer()[0]
            if reply["error"]:
                self._say(f"the prompt of {tokens} tokens failed: {reply['error']}")
                return []
            first.append(reply["arrivals"][0])
            if self._engine is not None:
                self._engine.tell({"operation": "prefill", "tokens": tokens})
                engine.append(self._engine.answer()["value"])
        labels = {"prompt": tokens}
        results = [Result("first_token_alone", statistics.median(first[1:]), "s", labels)]
        if engine:
            results.append(Result("engine_prefill", statistics.median(engine[1:]), "s", labels))
            ratio = statistics.median(engine[1:]) / statistics.median(first[1:])
            results.append(Result("prefill_vs_engine", ratio, "ratio", labels))
        self._say("; ".join(f"{each.metric} {each.value:.4g} {each.unit}" for each in results))
        return results

    def results(self) -> list[Result]:
        found: list[Result] = []
        for (prompt, count, drafter), measured in self.measured.items():
            labels = {"prompt": prompt, "streams": count, "drafts": drafter}
            rates = sorted(measured.rates)
            found += [
                Result("throughput", statistics.median(rates), "tok/s", labels),
                Result("throughput_lowest", rates[0], "tok/s", labels),
                Result("throughput_highest", rates[-1], "tok/s", labels),
                Result("throughput_with_prompts", statistics.median(measured.totals), "tok/s", labels),
                Result("first_token", statistics.median(measured.first_s), "s", labels),
                Result("server_cpu_per_token", statistics.median(measured.server_us), "us", labels),
                Result("worker_cpu_per_token", statistics.median(measured.worker_us), "us", labels),
            ]
            if measured.engine:
                ratios = [rate / base for rate, base in zip(measured.rates, measured.engine, strict=True)]
                found.append(Result("engine", statistics.median(measured.engine), "tok/s", labels))
                found.append(Result("of_engine", statistics.median(ratios), "ratio", labels))
            if drafter == "auto":
                share = measured.accepted / measured.drafted if measured.drafted else 0.0
                found.append(Result("accepted_drafts", share, "fraction", labels))
                off = self.measured.get((prompt, count, "off"))
                if off is not None and len(off.rates) == len(measured.rates):
                    pairs = zip(measured.rates, off.rates, strict=True)
                    ratio = statistics.median(auto / plain for auto, plain in pairs)
                    found.append(Result("auto_vs_off", ratio, "ratio", labels))
        same = sum(len(texts) == 1 for texts in self.texts.values()) / max(len(self.texts), 1)
        found.append(Result("same_text", same, "fraction", {}))
        return found


def rates_of(replies: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Tokens per second while all streams are answering, and over all: a chunk counts as its share of the tokens."""
    origin = min(reply["began"] for reply in replies)
    times, weights, firsts, lasts = [], [], [], []
    for reply in replies:
        at = np.asarray(reply["arrivals"]) + (reply["began"] - origin)
        times.append(at)
        weights.append(np.full(len(at), reply["tokens"] / len(at)))
        firsts.append(at[0])
        lasts.append(at[-1])
    all_times, all_weights = np.concatenate(times), np.concatenate(weights)
    begin, end = max(firsts), min(lasts)
    total = float(all_weights.sum() / max(lasts))
    if end <= begin:
        return total, total
    inside = (all_times > begin) & (all_times <= end)
    return float(all_weights[inside].sum() / (end - begin)), total


def prompt_ids(length: int, number: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(3, 250, length)]


def run_serve_bench(bench: ServeBench, say: Say, keep: Keep = lambda results: None) -> list[Result]:
    """Measure everything; `keep` is told after every load what is known so far."""
    arguments = ["--workers", "1", "--weights", bench.form, "--cluster-port", "0", "--join-port", "0"]
    arguments += ["--kv-tokens", str(bench.kv_tokens), "--context", str(bench.context)]
    arguments += ["--backend", bench.backend] if bench.backend else []
    arguments += ["--device", bench.device] if bench.device else []
    arguments += ["--threads", str(bench.threads)] if bench.threads else []
    began, began_at_s = time.monotonic(), time.time()
    with serving("serve", bench.model, [*arguments, *bench.arguments]) as server:
        ready_s = time.monotonic() - began
        say(f"ready after {ready_s:.1f} s")
        parts = list(ready_parts(server.phases(), began_at_s))
        for each in parts:
            labels = each.labels
            say(
                f"  {labels['process']}: {labels['phase']} {each.value:.2f} s, until {labels['until_s']:.1f} s"
            )
        with contextlib.ExitStack() as opened:
            clients = opened.enter_context(processes(bench.clients, "shardcompute.bench.serve.client"))
            engine = opened.enter_context(_engine(bench)) if bench.engine else None
            results = [Result("ready", ready_s, "s", {}), *parts]
            keep(results)
            run = ServeRun(bench, server, clients, engine, say, lambda found: keep([*results, *found]))
            if bench.long_prompt:
                results += run.prefill(bench.long_prompt)
                keep(results)
            run.run()
            results += run.results()
            complaints = server.complaints()
    for complaint in complaints:
        say(f"the server complained: {complaint}")
    return results


def ready_parts(phases: Mapping[str, Sequence[Phase]], began_at_s: float) -> Iterator[Result]:
    """What the processes of a server did until it was ready, in the order in which they were done with it."""
    ended = [(each, process) for process, all_of_it in phases.items() for each in all_of_it]
    for each, process in sorted(ended, key=lambda pair: pair[0].until_s):
        labels = {
            "process": process,
            "phase": each.name,
            "until_s": round(each.until_s - began_at_s, 3),
        }
        yield Result("ready_part", each.seconds, "s", labels)


@contextlib.contextmanager
def _engine(bench: ServeBench) -> Iterator[JsonProcess]:
    arguments = ["--engine", "ours", "--model", bench.model, "--form", bench.form]
    arguments += ["--context", str(bench.context), "--kv-tokens", str(bench.kv_tokens)]
    arguments += ["--backend", bench.backend] if bench.backend else []
    arguments += ["--device", bench.device] if bench.device else []
    arguments += ["--threads", str(bench.threads)] if bench.threads else []
    with processes(1, "shardcompute.bench.engine.arm", *arguments) as [engine]:
        yield engine

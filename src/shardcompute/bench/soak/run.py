"""`bench soak`: a cluster of real processes under mixed load for a while; does anything grow, slow down or fail?

Streams are clients that ask one request after another. Every process is looked at all along; what the looks mean is
in `report`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import psutil

from shardcompute.bench.questions import QUESTIONS, system_prompt
from shardcompute.bench.report import Say
from shardcompute.bench.servers import Server, cluster_arguments, serving
from shardcompute.bench.soak.report import WARM_UP, Sample, SoakOutcome, SoakTally
from shardcompute.bench.soak.requests import Ask, Kind, RequestMix, is_of_schema
from shardcompute.bench.stages import memory_per_stage
from shardcompute.bench.wan.prompts import read_prompts
from shardcompute.core.errors import BackendError, UsageError

_LEAST_SAMPLES = 10
_REQUEST_S = 300.0
_AFTER_FAILURE_S = 1.0
_TOLD_EVERY_S = 5.0
_SHOWN_FAILURES = 10
_MIB = 1 << 20
_LEAST_KV_TOKENS = 2048
_KV_TOKENS_PER_STREAM = 192
_COUNTER = "shardcompute_generation_tokens_total"


@dataclass(frozen=True, slots=True)
class SoakBench:
    model_path: str
    form: str = "native"
    workers: int = 3
    streams: int = 32
    minutes: float = 5.0
    every_s: float = 2.0
    data: Path | None = None
    """Spec-Bench's questions, in place of our own."""
    kv_tokens: int = 0
    """0: so few that the streams use nearly all of them."""
    context: int = 2048
    system_tokens: int = 200
    long_tokens: int = 700
    most_tokens: int = 96

    def __post_init__(self) -> None:
        if self.streams < 1 or self.every_s <= 0:
            raise UsageError("there is nothing to measure", hint="give at least one to --streams")
        if self.minutes * 60 * (1 - WARM_UP) < _LEAST_SAMPLES * self.every_s:
            raise UsageError(
                f"{self.minutes:g} minutes are too short for samples every {self.every_s:g} s",
                hint="raise --minutes, or look more often with --every",
            )


def choose_kv_tokens(bench: SoakBench) -> int:
    """What the streams need together: memory that is never half empty hardly varies, and running short is part of the
    load."""
    return bench.kv_tokens or max(_LEAST_KV_TOKENS, bench.streams * _KV_TOKENS_PER_STREAM)


def run_soak_bench(bench: SoakBench, say: Say) -> SoakOutcome:
    texts = QUESTIONS if bench.data is None else [prompt.text for prompt in read_prompts(bench.data)]
    bench = replace(bench, kv_tokens=choose_kv_tokens(bench))
    memory = memory_per_stage(
        bench.model_path, bench.form, bench.workers, kv_tokens=bench.kv_tokens, context=bench.context
    )
    say(f"starting {bench.workers} workers")
    room = ["--kv-tokens", str(bench.kv_tokens), "--context", str(bench.context), "--max-memory", str(memory)]
    room += ["--parallel", f"pp={bench.workers}"]
    arguments = cluster_arguments(bench.workers, bench.form, "--prefer", "throughput", *room)
    with serving("cluster", bench.model_path, arguments) as server:
        text = "\n".join(texts)
        mix = RequestMix(
            texts,
            system_prompt(bench.system_tokens, server.count_tokens),
            int(bench.long_tokens * len(text) / server.count_tokens(text)),
            bench.most_tokens,
        )
        soak = _Soak(bench, server, len(server.state()["chains"][0]["stages"]), mix, say)
        asyncio.run(soak.run())
        return soak.outcome()


@dataclass(slots=True)
class _Soak:
    """One run. Everything happens on one event loop."""

    bench: SoakBench
    server: Server
    stages: int
    mix: RequestMix
    say: Say
    counts: dict[Kind, dict[str, int]] = field(default_factory=lambda: {kind: {} for kind in Kind})
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    generated: list[tuple[float, float]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    started_s: float = 0.0
    is_over: bool = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.bench.streams)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=_REQUEST_S, limits=limits, trust_env=False
        ) as client:
            await self._fill(client)
            self.started_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(self.bench.streams):
                    group.create_task(self._keep_asking(client))
                group.create_task(self._watch(client))

    def outcome(self) -> SoakOutcome:
        failures = self.failures[:_SHOWN_FAILURES]
        if failures:
            failures += [f"logged: {line}" for line in self.server.complaints()]
        tallies = {str(kind): SoakTally(**count) for kind, count in self.counts.items()}
        return SoakOutcome(
            self.bench.minutes,
            self.stages,
            tallies,
            failures,
            self.samples,
            self.generated,
            self.lost,
        )

    async def _fill(self, client: httpx.AsyncClient) -> None:
        """Use all the memory for keys and values once: until then it grows with every prompt, as it should."""
        count = -(-self.bench.kv_tokens // self.bench.long_tokens)
        for number in range(1, count + 1):
            self.say(f"filling the memory for conversations: prompt {number} of {count}")
            how, reason = await ask(client, self.mix.filler(-number))
            if how != "done":
                raise BackendError(f"the cluster does not answer: {reason}; {self.server.complaints()}")

    async def _keep_asking(self, client: httpx.AsyncClient) -> None:
        while not self.is_over:
            asked = self.mix.ask(next(self.numbers))
            try:
                async with asyncio.timeout(_REQUEST_S):
                    how, reason = await ask(client, asked)
            except TimeoutError:
                how, reason = "failed", f"no end within {_REQUEST_S:g} s"
            except httpx.HTTPError as error:
                how, reason = "failed", repr(error)
            count = self.counts[asked.kind]
            count[how] = count.get(how, 0) + 1
            if how == "failed":
                self.failures.append(f"{asked.kind}: {reason}")
                # Whatever is wrong, it is not made better by asking as fast as refusals come.
                await asyncio.sleep(_AFTER_FAILURE_S)

    async def _watch(self, client: httpx.AsyncClient) -> None:
        """Look at every process and at what has been generated, until the time is over or a process has ended."""
        processes = find_processes(self.server.process.pid)
        told_s = -_TOLD_EVERY_S
        for turn in itertools.count():
            due_s = self.started_s + turn * self.bench.every_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            at_s = time.monotonic() - self.started_s
            await self._look(client, processes, at_s)
            self.is_over = bool(self.lost) or at_s >= self.bench.minutes * 60
            if self.is_over:
                self.say("waiting for the last answers")
                return
            if at_s - told_s >= _TOLD_EVERY_S:
                told_s = at_s
                self.say(self._progress(at_s, len(processes)))

    async def _look(
        self, client: httpx.AsyncClient, processes: Mapping[str, psutil.Process], at_s: float
    ) -> None:
        for name, process in processes.items():
            try:
                self.samples.append(look_at(name, process, at_s))
            except psutil.NoSuchProcess:
                self.lost.append(name)
        try:
            self.generated.append((at_s, await _generated_tokens(client, self.server.operator)))
        except httpx.HTTPError as error:
            self.failures.append(f"metrics: {error!r}")

    def _progress(self, at_s: float, processes: int) -> str:
        ended = {
            how: sum(c.get(how, 0) for c in self.counts.values()) for how in ("done", "failed", "cancelled")
        }
        requests = ", ".join(f"{count} {how}" for how, count in ended.items())
        recent = self.generated[-4:]
        speed = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0]) if len(recent) > 1 else 0.0
        memory = ", ".join(
            f"{sample.process} {sample.resident_bytes / _MIB:.0f} MiB" for sample in self.samples[-processes:]
        )
        return f"{at_s:.0f} of {self.bench.minutes * 60:.0f} s: {requests}; {speed:.0f} tok/s; {memory}"


async def ask(client: httpx.AsyncClient, asked: Ask) -> tuple[str, str]:
    """How one request ended (done, failed, cancelled), and why it failed."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    pieces = 0
    async with client.stream("POST", "/v1/chat/completions", json=asked.body) as response:
        if response.status_code != 200:
            return "failed", f"status {response.status_code}: {(await response.aread()).decode()[:300]}"
        async with aclosing(cast(AsyncGenerator[str, None], response.aiter_lines())) as lines:
            async for line in lines:
                if line == "data: [DONE]":
                    return judge(asked, texts, reasons)
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return "failed", f"mid-stream: {chunk['error']}"
                pieces += _take(chunk, texts, reasons)
                if asked.leave_after and pieces >= asked.leave_after:
                    return "cancelled", ""
    return "failed", "the stream ended without [DONE]"


def judge(asked: Ask, texts: Mapping[int, str], reasons: Mapping[int, str]) -> tuple[str, str]:
    """Of a stream that was heard to its end, by the text and the reason of each answer."""
    if sorted(reasons) != list(range(asked.answers)):
        return "failed", f"{asked.answers} answers were asked for, {len(reasons)} ended"
    if asked.kind is Kind.SCHEMA and reasons[0] == "stop" and not is_of_schema(texts.get(0, "")):
        return "failed", f"not of the schema: {texts.get(0, '')[:200]!r}"
    return "done", ""


def _take(chunk: Mapping[str, Any], texts: dict[int, str], reasons: dict[int, str]) -> int:
    """How many pieces of text a chunk brought."""
    pieces = 0
    for choice in chunk.get("choices", ()):
        index = choice["index"]
        text = (choice.get("delta") or {}).get("content") or ""
        texts[index] = texts.get(index, "") + text
        pieces += bool(text)
        if choice.get("finish_reason"):
            reasons[index] = choice["finish_reason"]
    return pieces


def find_processes(root: int) -> dict[str, psutil.Process]:
    """The process that was started, called coordinator, and those below it by the names they were given."""
    top = psutil.Process(root)
    found = {"coordinator": top}
    for child in top.children(recursive=True):
        words = child.cmdline()
        name = words[words.index("--name") + 1] if "--name" in words[:-1] else f"{child.name()} {child.pid}"
        found[name] = child
    return found


def look_at(name: str, process: psutil.Process, at_s: float) -> Sample:
    """Raises NoSuchProcess when it has ended, whether or not somebody has asked how."""
    with process.oneshot():
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(process.pid, name)
        # Windows counts handles instead.
        descriptors: Callable[[], int] = getattr(process, "num_fds", None) or process.num_handles
        times = process.cpu_times()
        return Sample(
            at_s,
            name,
            process.memory_info().rss,
            descriptors(),
            process.num_threads(),
            times.user + times.system,
        )


async def _generated_tokens(client: httpx.AsyncClient, headers: Mapping[str, str]) -> float:
    """As the server counts them: those of cancelled requests and of every answer are among them."""
    answer = await client.get("/metrics", headers=headers)
    answer.raise_for_status()
    return count_generated(answer.text.splitlines())


def count_generated(lines: Sequence[str]) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_COUNTER))

"""`bench prefix`: a long system prompt before different questions, remembered against computed anew.

Both arms ask the same of the same cluster, in turn; they differ by `cache_salt` alone. Cold requests have a salt that
nobody used before, so nothing of them is known; warm ones share theirs. What is remembered must not change an answer.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardcompute.bench.questions import QUESTIONS, system_prompt
from shardcompute.bench.report import Result, Say, median_ratio
from shardcompute.bench.servers import Server, cluster_arguments, serving
from shardcompute.bench.stages import memory_per_stage
from shardcompute.bench.streaming import chunks_of
from shardcompute.core.errors import BackendError, UsageError

ARMS = ("cold", "warm")
_PROBE = "Who are you?"


@dataclass(frozen=True, slots=True)
class PrefixBench:
    model_path: str
    form: str = "native"
    workers: int = 3
    prompt_tokens: int = 1000
    tokens: int = 32
    rounds: int = 12
    kv_tokens: int = 8192
    context: int = 2048

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= len(QUESTIONS):
            raise UsageError(
                f"there are {len(QUESTIONS)} questions, one for each round",
                hint=f"give a number from 1 to {len(QUESTIONS)} to --rounds",
            )
        # Questions and the chat template take some tokens as well.
        if self.prompt_tokens * 1.2 + self.tokens > self.context:
            raise UsageError(
                f"a prompt of {self.prompt_tokens} tokens does not fit a context of {self.context}",
                hint="give a smaller number to --prompt-tokens",
            )


@dataclass(frozen=True, slots=True)
class PrefixReply:
    """One answer as a client saw it, with what the server's usage says."""

    arm: str
    question: int
    first_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixOutcome:
    stages: int
    replies: Sequence[PrefixReply]

    def of(self, arm: str) -> list[PrefixReply]:
        """By question."""
        return sorted((each for each in self.replies if each.arm == arm), key=lambda each: each.question)

    @property
    def problems(self) -> list[str]:
        """What must not be, in words."""
        found = []
        for cold, warm in zip(self.of("cold"), self.of("warm"), strict=True):
            if cold.text != warm.text:
                found.append(f"question {cold.question}: cold {cold.text!r}, warm {warm.text!r}")
            if cold.cached_tokens:
                found.append(
                    f"question {cold.question}: {cold.cached_tokens} tokens were known to a new salt"
                )
            if not warm.cached_tokens:
                found.append(f"question {warm.question}: nothing was remembered for the old salt")
        return found


def run_prefix_bench(bench: PrefixBench, say: Say) -> PrefixOutcome:
    memory = memory_per_stage(
        bench.model_path, bench.form, bench.workers, kv_tokens=bench.kv_tokens, context=bench.context
    )
    say(f"starting {bench.workers} workers")
    room = ["--kv-tokens", str(bench.kv_tokens), "--context", str(bench.context), "--max-memory", str(memory)]
    room += ["--parallel", f"pp={bench.workers}"]
    arguments = cluster_arguments(bench.workers, bench.form, *room)
    with serving("cluster", bench.model_path, arguments) as server:
        system = system_prompt(bench.prompt_tokens, server.count_tokens)
        salts = {"warm": secrets.token_hex(8)}
        replies: list[PrefixReply] = []
        # The first request of each arm is for the machine, and has the warm arm remember the system prompt.
        for turn in range(bench.rounds + 1):
            for arm in ARMS if turn % 2 else reversed(ARMS):
                say(f"{arm}: {'warming up' if turn == 0 else f'round {turn} of {bench.rounds}'}")
                question = QUESTIONS[turn - 1] if turn else _PROBE
                body = _body(system, question, bench.tokens, salts.get(arm) or secrets.token_hex(8))
                reply = _ask(server, body, arm, turn)
                if turn:
                    replies.append(reply)
        return PrefixOutcome(len(server.state()["chains"][0]["stages"]), replies)


def results_of(outcome: PrefixOutcome) -> list[Result]:
    results = [Result("stages", outcome.stages, "stages")]
    for arm in ARMS:
        replies, labels = outcome.of(arm), {"arm": arm}
        results += [
            Result("first_token", statistics.median(reply.first_s for reply in replies), "s", labels),
            Result("prompt_tokens", statistics.median(r.prompt_tokens for r in replies), "tokens", labels),
            Result("cached_tokens", statistics.median(r.cached_tokens for r in replies), "tokens", labels),
        ]
    cold, warm = outcome.of("cold"), outcome.of("warm")
    labels = {"arm": "warm"}
    ratio = median_ratio([reply.first_s for reply in warm], [reply.first_s for reply in cold])
    same = [one.text == other.text for one, other in zip(cold, warm, strict=True)]
    results.append(Result("warm_vs_cold", ratio, "ratio", labels))
    results.append(Result("same_text", sum(same) / len(same), "fraction", labels))
    return results


def raw_of(outcome: PrefixOutcome) -> dict[str, Any]:
    """What the JSON file has besides results."""
    return {"problems": outcome.problems, "replies": [asdict(reply) for reply in outcome.replies]}


def _body(system: str, question: str, tokens: int, salt: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"drafter": "off"},
        "cache_salt": salt,
    }


def _ask(server: Server, body: Mapping[str, Any], arm: str, question: int) -> PrefixReply:
    text, first_s, usage = "", 0.0, None
    started = time.perf_counter()
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for chunk in chunks_of(response):
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
            if text and not first_s:
                first_s = time.perf_counter() - started
            usage = chunk.get("usage") or usage
    if usage is None or not text:
        raise BackendError("an answer came without text or without usage")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return PrefixReply(arm, question, first_s, text, usage["prompt_tokens"], cached)

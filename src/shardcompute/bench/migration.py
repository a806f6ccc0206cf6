"""`bench migration`: a chain moves to another machine amid answers; how long they pause with their KV, and without."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcompute.bench.report import Result, Say
from shardcompute.bench.servers import Server, StreamedReply, serving
from shardcompute.bench.streaming import ask_at_once
from shardcompute.core.errors import BackendError

_ARMS = {"kv": (), "replay": ("--replay-moves",)}
_STANDBY_S = 120.0
_MOVE_S = 300.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class MigrationBench:
    """Two stages and a standby on this machine; while all `streams` are answered, the machine of a stage is drained."""

    model_path: str
    form: str = "native"
    streams: int = 8
    prompt: int = 1000
    tokens: int = 400
    rounds: int = 2

    @property
    def prompts(self) -> list[list[int]]:
        """Others for every stream, so that none begins with what another has computed."""
        draw = np.random.default_rng(7)
        return [[int(id) for id in draw.integers(100, 40_000, self.prompt)] for _ in range(self.streams)]

    def arguments(self, arm: str) -> list[str]:
        kv_tokens = str(2 * self.streams * (self.prompt + self.tokens + 32))
        alone = ["--threads", "1", "--cluster-port", "0", "--join-port", "0", "--no-relay"]
        layout = [
            "--workers",
            "3",
            "--parallel",
            "pp=2",
            "--weights",
            self.form,
            "--backend",
            "onnx",
        ]
        return [*layout, *alone, "--kv-tokens", kv_tokens, *_ARMS[arm]]


def run_migration_bench(bench: MigrationBench, say: Say) -> list[Result]:
    results: list[Result] = []
    truth: list[str] | None = None
    for round_ in range(bench.rounds):
        for arm in _ARMS if round_ % 2 == 0 else reversed(_ARMS):
            say(f"round {round_ + 1} of {bench.rounds}, {arm}: starting three workers")
            with serving(arm, bench.model_path, bench.arguments(arm)) as server:
                replies, move = _move_amid(bench, server, say)
            texts = [reply.text for reply in replies]
            truth = texts if truth is None else truth
            labels = {"arm": arm, "round": round_}
            # Before, prompts of others are computed between the tokens of those who have begun.
            gaps = [gap for reply in replies for gap in _gaps_from(reply, move.began_s)]
            usual = float(np.median(gaps))
            results += [
                Result("longest_pause", max(gaps), "s", labels),
                Result("usual_gap", usual, "s", labels),
                Result("move", move.ended_s - move.began_s, "s", labels),
                Result("same_text", float(texts == truth), "fraction", labels),
            ]
            say(f"{arm}: longest pause {max(gaps):.3f} s, usually {usual:.3f} s")
    return results


@dataclass(frozen=True, slots=True)
class _Move:
    """From the word to drain a machine until the chain ran without it."""

    began_s: float
    ended_s: float


def _move_amid(bench: MigrationBench, server: Server, say: Say) -> tuple[list[StreamedReply], _Move]:
    before = _await_chain(server)
    begun = threading.Semaphore(0)
    moves: list[_Move] = []

    def move() -> None:
        for _ in range(bench.streams):
            if not begun.acquire(timeout=_MOVE_S):
                return
        say("all streams have begun: draining the machine of a stage")
        moves.append(_drain(server, before))

    moving = threading.Thread(target=move, daemon=True)
    moving.start()
    replies, _ = ask_at_once(
        bench.prompts, lambda prompt: server.stream(prompt, bench.tokens, on_first=begun.release)
    )
    moving.join(_MOVE_S)
    if not moves:
        raise BackendError("the chain did not move", hint="the logs of the server say why")
    first_end = min(reply.began_s + reply.arrivals_s[-1] for reply in replies)
    if first_end < moves[0].ended_s:
        raise BackendError("an answer was over before the chain had moved", hint="ask for more --tokens")
    return replies, moves[0]


def _gaps_from(reply: StreamedReply, since_s: float) -> list[float]:
    """Between tokens of which the later one came behind that moment."""
    ends = [reply.began_s + arrival for arrival in reply.arrivals_s[1:]]
    return [gap for gap, end in zip(reply.gaps_s, ends, strict=True) if end > since_s]


def _chain(server: Server) -> dict[str, Any]:
    chains: list[dict[str, Any]] = server.state()["chains"]
    return chains[0]


def _await_chain(server: Server) -> dict[str, Any]:
    """The chain, once its standby is there."""
    deadline = time.monotonic() + _STANDBY_S
    while time.monotonic() < deadline:
        chain = _chain(server)
        if chain["status"] == "ready" and chain["standbys"]:
            time.sleep(1.0)
            return chain
        time.sleep(0.2)
    raise BackendError(f"no standby was there after {_STANDBY_S:g} s")


def _drain(server: Server, before: dict[str, Any]) -> _Move:
    """Drain the machine whose stage the standby has."""
    standby = before["standbys"][0]
    place = (standby["start"], standby["stop"])
    stages = before["stages"]
    victim = next((each for each in stages if (each["start"], each["stop"]) == place), stages[-1])["node"]
    started = time.perf_counter()
    answer = server.client.post(f"/cluster/nodes/{victim}/drain", json={}, headers=server.operator)
    answer.raise_for_status()
    while time.perf_counter() - started < _MOVE_S:
        chain = _chain(server)
        if chain["status"] == "ready" and victim not in {each["node"] for each in chain["stages"]}:
            return _Move(started, time.perf_counter())
        time.sleep(_LOOK_S)
    raise BackendError(f"the chain did not leave {victim} within {_MOVE_S:g} s")

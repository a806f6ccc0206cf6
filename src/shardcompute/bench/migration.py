"""`bench migration`: a chain moves to another machine amid answers; how long they pause with their KV, and without.

The longest pause is taken apart by what the coordinator and the workers log of the change of layout (`core.phases`):
the step that was under way and is lost, the last rows, connecting, activating, and the first step of the new layout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from shardcompute.bench.report import Result, Say
from shardcompute.bench.servers import Server, StreamedReply, serving
from shardcompute.bench.streaming import ask_at_once
from shardcompute.core.errors import BackendError
from shardcompute.core.phases import Phase
from shardcompute.node.coordinator.executor import ACTIVATING, CONNECTING, FENCING
from shardcompute.node.worker.migration.receiver import LAST_ROWS

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
                phases = [each for logged in server.phases().values() for each in logged]
            texts = [reply.text for reply in replies]
            truth = texts if truth is None else truth
            labels = {"arm": arm, "round": round_}
            # Before, prompts of others are computed between the tokens of those who have begun.
            pauses = [pause for reply in replies for pause in _pauses_from(reply, move.began_s)]
            gaps = [until_s - since_s for since_s, until_s in pauses]
            usual = float(np.median(gaps))
            since_s, until_s = max(pauses, key=lambda pause: pause[1] - pause[0])
            offset_s = _time_of_day_s()
            parts = pause_parts(since_s + offset_s, until_s + offset_s, phases)
            results += [
                Result("longest_pause", max(gaps), "s", labels),
                *(Result("part_of_it", each.seconds, "s", labels | {"part": each.name}) for each in parts),
                Result("usual_gap", usual, "s", labels),
                Result("move", move.ended_s - move.began_s, "s", labels),
                Result("same_text", float(texts == truth), "fraction", labels),
            ]
            told = ", ".join(f"{each.name} {each.seconds:.3f} s" for each in parts)
            say(f"{arm}: longest pause {max(gaps):.3f} s ({told}), usually {usual:.3f} s")
    return results


@dataclass(frozen=True, slots=True)
class PausePart:
    name: str
    seconds: float


def pause_parts(since_s: float, until_s: float, phases: Sequence[Phase]) -> list[PausePart]:
    """What a pause between two times of day was spent on, one after the other; [] where no layout was activated
    meanwhile. Parts add up to the pause."""
    activated = _last(phases, ACTIVATING, until_s)
    if activated is None or activated.until_s < since_s:
        return []
    connected = _last(phases, CONNECTING, activated.until_s)
    fenced = _last(phases, FENCING, activated.until_s)
    began_s = since_s if fenced is None else fenced.until_s - fenced.seconds
    fenced_s = min(max(since_s, began_s), activated.until_s)
    connected_s = fenced_s if connected is None else min(max(fenced_s, connected.until_s), activated.until_s)
    # Stages wait side by side: the one that waited longest counts.
    waited = (each for each in phases if each.name == LAST_ROWS and fenced_s <= each.until_s <= connected_s)
    awaited_s = max((min(each.seconds, each.until_s - fenced_s) for each in waited), default=0.0)
    return [
        PausePart("lost step", fenced_s - since_s),
        PausePart("last rows", awaited_s),
        PausePart("connecting", connected_s - fenced_s - awaited_s),
        PausePart("activating", activated.until_s - connected_s),
        PausePart("first step", until_s - activated.until_s),
    ]


def _last(phases: Iterable[Phase], name: str, until_s: float) -> Phase | None:
    found = [each for each in phases if each.name == name and each.until_s <= until_s]
    return max(found, key=lambda each: each.until_s, default=None)


def _time_of_day_s() -> float:
    """What is to be added to what `time.perf_counter` says."""
    return time.time() - time.perf_counter()


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


def _pauses_from(reply: StreamedReply, since_s: float) -> list[tuple[float, float]]:
    """From one token to the next, where that one came behind a moment."""
    arrived = [reply.began_s + arrival for arrival in reply.arrivals_s]
    return [(before_s, then_s) for before_s, then_s in pairwise(arrived) if then_s > since_s]


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

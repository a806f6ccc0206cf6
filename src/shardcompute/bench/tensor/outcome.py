"""What `bench tensor` found: figures of each arm, and the round trips at which one arm becomes slower than another."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardcompute.bench.report import Result
from shardcompute.models.tensor_share import GridShape

Kind = Literal["reduce", "gather", "stages"]
ALONE = "1 rank"


@dataclass(frozen=True, slots=True)
class TensorArm:
    """One process, ranks that share every layer (in a line, or as a grid), or stages of some layers each."""

    ranks: int
    kind: Kind = "reduce"
    grid: GridShape | None = None

    @property
    def name(self) -> str:
        if self.ranks == 1:
            return ALONE
        if self.grid is not None:
            return f"grid {self.grid[0]}×{self.grid[1]}"
        return f"{self.ranks} stages" if self.kind == "stages" else f"{self.ranks} ranks, {self.kind}"


@dataclass(slots=True)
class ArmTurns:
    """The turns of an arm over lines of one round trip; 0: those of the machine."""

    arm: TensorArm
    rtt_ms: float
    turns: list[Mapping[str, Any]] = field(default_factory=list)
    loaded: Sequence[Mapping[str, float]] = ()
    """What each process holds."""

    def middle(self, name: str) -> float:
        return float(statistics.median(turn[name] for turn in self.turns))


def arm_results(arm: ArmTurns, alone: ArmTurns, labels: Mapping[str, Any]) -> list[Result]:
    """Against the turns of one process that lay beside them."""
    line = f"{arm.rtt_ms:g} ms" if arm.rtt_ms else "of this machine"
    labels = {"arm": arm.arm.name, "line": line, "rtt_ms": arm.rtt_ms, "ranks": arm.arm.ranks, **labels}
    # Turns lie side by side: what else the machine does falls on both arms of a ratio.
    ratios = [one["step_s"] / each["step_s"] for one, each in zip(alone.turns, arm.turns, strict=True)]
    best_s = min(turn["least_step_s"] for turn in arm.turns)
    found = [
        Result("decode", 1 / arm.middle("step_s"), "tokens/s", labels),
        Result("decode_best_step", 1 / best_s, "tokens/s", labels),
        Result("against_one_rank", statistics.median(ratios), "×", labels),
        Result("prefill", 1e3 * arm.middle("prefill_s"), "ms", labels),
        Result("processor_time", 1e3 * arm.middle("processor_s"), "ms a token", labels),
        Result(
            "equal_tokens", _equal(arm.turns[0]["tokens"], alone.turns[0]["tokens"]), "of the answer", labels
        ),
        Result("memory", max(each["held_bytes"] for each in arm.loaded) / 1e6, "MB a rank", labels),
        Result("kv", max(each["kv_bytes"] for each in arm.loaded) / 1e3, "KB a token", labels),
    ]
    if arm.arm.ranks > 1:
        found += [
            Result("exchanges", arm.middle("exchanges"), "a token", labels),
            Result("sent", arm.middle("sent_bytes") / 1e3, "KB a token", labels),
        ]
    if arm.arm.ranks > 1 and arm.arm.kind != "stages":
        found.append(Result("exchange_time", 1e3 * arm.middle("exchange_s"), "ms a token", labels))
    return found


def crossovers(arms: Sequence[ArmTurns], labels: Mapping[str, Any]) -> list[Result]:
    """For ranks, the round trip from which one process, or as many stages, is faster. Where it lies within what was
    measured: nothing is guessed beyond."""
    found = []
    ranked = dict.fromkeys(each.arm for each in arms if each.arm.ranks > 1 and each.arm.kind != "stages")
    for arm in ranked:
        for other in (TensorArm(1), TensorArm(arm.ranks, "stages")):
            own, theirs = _steps_by_rtt(arms, arm), _steps_by_rtt(arms, other)
            rtt_ms = crossing([(rtt, own[rtt], theirs[rtt]) for rtt in sorted(own.keys() & theirs.keys())])
            if rtt_ms is not None:
                metric = f"slower_than_{'1_rank' if other.ranks == 1 else 'stages'}_from"
                found.append(Result(metric, rtt_ms, "ms", {"arm": arm.name, **labels}))
    return found


def crossing(points: Sequence[tuple[float, float, float]]) -> float | None:
    """Where the first of two curves, given with the second at the same places, comes to lie above it; straight between
    places. None where it does not, or lies above from the beginning."""
    for (near, low, high), (far, later_low, later_high) in itertools.pairwise(points):
        before, behind = low - high, later_low - later_high
        if before < 0 <= behind:
            return near + (far - near) * before / (before - behind)
    return None


def _steps_by_rtt(arms: Sequence[ArmTurns], arm: TensorArm) -> dict[float, float]:
    return {each.rtt_ms: each.middle("step_s") for each in arms if each.arm == arm and each.rtt_ms}


def _equal(tokens: Sequence[int], others: Sequence[int]) -> float:
    """The part of an answer up to where it first differs."""
    pairs = list(zip(tokens, others, strict=True))
    same = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return same / len(pairs)

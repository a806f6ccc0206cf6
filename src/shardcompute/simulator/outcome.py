"""Outcome of a simulation: figures for people and for JSON, and beside them what was measured.

`figures` follow from the scenario and its seed. `computing` is what this computer took, and differs from run to run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcompute.control import ClusterState, encode_event, memorable
from shardcompute.control.events import StateRemembered
from shardcompute.core.errors import SourceError, UsageError
from shardcompute.simulator.agenda import Agenda
from shardcompute.simulator.bookkeeping import Books, Work
from shardcompute.simulator.machines import SimulatedMachine
from shardcompute.simulator.scenario import Comparison, Scenario
from shardcompute.simulator.sessions import Ledger

_SHOWN_REASONS = 50


@dataclass(frozen=True, slots=True)
class Compared:
    """A predicted figure beside a measured one."""

    figure: str
    predicted: float | None
    measured: float
    remark: str

    @property
    def deviation(self) -> float | None:
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    scenario: str
    seed: int
    machines: int
    simulated_s: float
    figures: Mapping[str, float | int | None]
    decisions: Mapping[str, int]
    messages: Mapping[str, int]
    moves: tuple[tuple[float, str], ...]
    """When, and why: the first of them."""
    samples: Mapping[str, tuple[float, ...]]
    """For plots: quantiles of what clients waited for."""
    computing: Mapping[str, Mapping[str, float]]

    def listed(self) -> dict[str, Any]:
        return asdict(self)


def sum_up(
    scenario: Scenario,
    machines: Sequence[SimulatedMachine],
    state: ClusterState,
    books: Books,
    ledger: Ledger,
    failures: int,
    agenda: Agenda,
) -> SimulationOutcome:
    interval_s = scenario.control.health.heartbeat_interval_s
    up_s = sum(each.up_s + (scenario.duration_s - each.up_since_s) * each.is_up for each in machines)
    messages = {"heartbeat": int(up_s / interval_s), **dict(sorted(books.messages.items()))}
    return SimulationOutcome(
        scenario=scenario.name,
        seed=scenario.seed,
        machines=len(machines),
        simulated_s=scenario.duration_s,
        figures={
            **_client_figures(scenario, ledger),
            **_control_figures(scenario, state, books, messages, up_s),
            "machines_failed": failures,
        },
        decisions=dict(sorted(books.decisions.items())),
        messages=messages,
        moves=tuple(books.reasons[:_SHOWN_REASONS]),
        samples={
            "first_token_s": _quantiles(ledger.first_s),
            "token_gap_s": _quantiles(ledger.gap_s),
            "recovery_s": _quantiles(ledger.recovery_s),
        },
        computing=_computing(books, agenda),
    )


def _client_figures(scenario: Scenario, ledger: Ledger) -> dict[str, float | int | None]:
    counted_s = scenario.duration_s - scenario.warm_up_s
    begun_s = max(scenario.warm_up_s, ledger.first_asked_s or 0.0)
    busy_s = ledger.last_token_s - begun_s
    mean_gap_s = _median(ledger.gap_s)
    return {
        "tokens": ledger.tokens,
        "tokens_per_s": ledger.tokens / counted_s if counted_s > 0 else None,
        "busy_tokens_per_s": ledger.tokens / busy_s if busy_s > 0 else None,
        "stream_tokens_per_s": 1 / mean_gap_s if mean_gap_s else None,
        "first_token_s": _median(ledger.first_s),
        "first_token_mean_s": statistics.fmean(ledger.first_s) if ledger.first_s else None,
        "first_token_p90_s": _quantile(ledger.first_s, 0.9),
        "longest_gap_s": max(ledger.longest_gap_s, default=None),
        "recovery_s": _median(ledger.recovery_s),
        "recovery_p90_s": _quantile(ledger.recovery_s, 0.9),
        "recovery_longest_s": max(ledger.recovery_s, default=None),
        "interruptions_of_answers": len(ledger.recovery_s),
        "requests": ledger.asked,
        "finished": ledger.finished,
        "abandoned": ledger.abandoned,
        "tokens_lost": ledger.lost,
        "tokens_doubled": ledger.doubled,
    }


def _control_figures(
    scenario: Scenario, state: ClusterState, books: Books, messages: Mapping[str, int], up_s: float
) -> dict[str, float | int | None]:
    wanted, counted_s = scenario.model.chains, books.counted_s
    snapshot = encode_event(StateRemembered(memorable(state)))
    chains = state.live_chains()
    return {
        "served_share": books.served_s / counted_s if counted_s else None,
        "ready_chains_share": books.ready_chain_s / counted_s / wanted if counted_s else None,
        "most_ready_chains": books.most_ready,
        "stages_at_end": sum(len(chain.stages) for chain in chains),
        "chains_at_end": len(chains),
        "chains_planned": state.chains_planned,
        "moves_planned": books.decisions["MovePlanned"],
        "moves_dropped": books.decisions["MoveDropped"],
        "reshaped": books.decisions["ChainReshaped"],
        "machines_lost": books.decisions["NodeLost"],
        "shards_loaded": messages.get("ShardLoaded", 0),
        "messages_per_machine_and_s": sum(messages.values()) / up_s if up_s else None,
        "heartbeats_share": messages["heartbeat"] / max(1, sum(messages.values())),
        "journal_events": books.journal_events,
        "journal_bytes": books.journal_bytes,
        "journal_bytes_per_h": books.journal_bytes * 3600 / scenario.duration_s,
        "state_bytes": len(snapshot),
        "links_known": sum(len(row) for row in state.links.values()),
    }


def _computing(books: Books, agenda: Agenda) -> dict[str, dict[str, float]]:
    """Seconds of this computer: of turns in which something was decided and in which nothing was, and by event."""
    works = {"planning": books.planning, "idling": books.idling}
    works |= {f"apply {name}": work for name, work in sorted(books.applying.items())}
    found = {name: _work_figures(work) for name, work in works.items()}
    return {"agenda": {"count": agenda.done}, **found}


def _work_figures(work: Work) -> dict[str, float]:
    mean_s = work.seconds / max(1, work.count)
    return {"count": work.count, "seconds": work.seconds, "mean_s": mean_s, "longest_s": work.longest_s}


def compare(outcome: SimulationOutcome, comparisons: Sequence[Comparison], folder: Path) -> list[Compared]:
    """Figures beside those that were measured, in files beside the scenario."""
    found = []
    for each in comparisons:
        if each.figure not in outcome.figures:
            known = ", ".join(outcome.figures)
            raise UsageError(f"no figure is called {each.figure!r}", hint=f"use one of {known}")
        measured = each.measured if each.measured is not None else _look_up(each, folder)
        found.append(Compared(each.figure, outcome.figures[each.figure], measured, each.remark))
    return found


def _look_up(wanted: Comparison, folder: Path) -> float:
    path = folder / wanted.file
    try:
        rows = json.loads(path.read_bytes())[wanted.rows]
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(
            f"cannot read {wanted.rows} of {path}: {error}", hint="check file and rows of the comparison"
        ) from error
    fitting = [row for row in rows if all(row.get(key) == value for key, value in wanted.where.items())]
    if len(fitting) != 1 or not isinstance(fitting[0].get(wanted.field), int | float):
        raise UsageError(
            f"{len(fitting)} rows of {path} are {dict(wanted.where)} and have the number {wanted.field!r}",
            hint="name one row by `where`, and a number in it by `field`",
        )
    return float(fitting[0][wanted.field])


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _quantile(values: Sequence[float], part: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """At every twentieth part."""
    return tuple(
        value for part in range(21) if (value := _quantile(values, min(0.9999, part / 20))) is not None
    )

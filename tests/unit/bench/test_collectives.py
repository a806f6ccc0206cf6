"""The collectives' benchmark: real processes, every line, and bytes that follow from the algorithm."""

from __future__ import annotations

import pytest

from shardcompute.bench.collectives.run import CollectivesBench, run_collectives_bench
from shardcompute.core.errors import UsageError


def test_processes_of_one_machine_are_measured_over_every_line() -> None:
    bench = CollectivesBench(
        ranks=[3],
        sizes=[3 << 10],
        lines=["local"],
        rtt_ms=[0.2],
        algorithms=["auto", "ring"],
        rounds=1,
        calls=10,
    )
    said: list[str] = []

    results = run_collectives_bench(bench, said.append)

    assert said == ["3 ranks, local", "3 ranks, emulated LAN of 0.2 ms"]
    assert {each.labels["line"] for each in results} == {"local", "lan 0.2 ms"}
    assert {each.labels["size"] for each in results} == {"3 KB"}
    sent = {each.value for each in results if each.metric == "sent" and each.labels["algorithm"] == "ring"}
    assert sent == {4 / 3}
    assert all(each.value > 0 for each in results)


def test_what_is_not_known_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="no line or algorithm 'star'"):
        run_collectives_bench(CollectivesBench(algorithms=["star"]), print)

"""The bench of routing counts, and what it counts follows from the seed alone."""

from __future__ import annotations

from shardcompute.bench.prefix_routing import POLICIES, RoutingBench, routing_results, run_routing_bench

SMALL = RoutingBench(topics=6, prompt_tokens=500, requests=60, kv_tokens=8192)


def test_fewer_rows_are_computed_where_beginnings_are_kept_together() -> None:
    outcomes = {each.policy: each for each in run_routing_bench(SMALL)}
    assert tuple(outcomes) == POLICIES
    asked = {each.prompt_rows for each in outcomes.values()}
    assert asked == {60 * 540}
    assert all(len(each.first_rounds) == 60 for each in outcomes.values()), "everybody was answered"
    beginnings = {name: each.computed_rows - 60 * 40 for name, each in outcomes.items()}
    assert beginnings["prefix"] >= 6 * 499, "each once, and questions in any case"
    assert beginnings["prefix"] < 0.7 * beginnings["random"]
    again = run_routing_bench(SMALL)
    assert again == list(outcomes.values())
    assert {result.labels["policy"] for result in routing_results(again)} == set(POLICIES)

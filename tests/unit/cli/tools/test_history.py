"""The history in a terminal: events in order, usage in sums, requests of yesterday."""

from __future__ import annotations

import json
from typing import Any

from shardcompute.core.generation import Delta, GenerationRequest, TokenChoice
from shardcompute.node.telemetry.history_store import EventView

from ..cluster_lab import HERE, Lab


def _answer(lab: Lab, key: str, tokens: int = 2) -> None:
    request = GenerationRequest((0,) * 5, 9, caller=key)
    with lab.cluster.pool.requests.open("org/tiny", "org/tiny#1", request) as entry:
        for number in range(tokens):
            entry.saw(Delta("a", (TokenChoice(number),)))
        entry.saw(Delta(finish="stop"))


def test_events_come_in_the_order_in_which_they_happened(cli: Any, lab: Lab) -> None:
    for number in range(5):
        lab.admin.history.tell(EventView(kind="model", text=f"event {number}"))
    result = cli("events", "--since", "1h", *HERE)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "the coordinator started" in lines[0]
    assert [line.split("  ")[-1] for line in lines[1:]] == [f"event {number}" for number in range(5)]
    last = cli("events", "--limit", "2", "--json", *HERE).stdout.splitlines()
    assert [json.loads(line)["text"] for line in last] == ["event 3", "event 4"]
    assert cli("events", "--since", "soon", *HERE).exit_code == 2


def test_usage_is_summed_by_key(cli: Any, lab: Lab) -> None:
    for key in ("alice", "bob", "alice"):
        _answer(lab, key)
    rows = [line.split() for line in cli("usage", *HERE).stdout.splitlines()]
    assert rows == [
        ["KEY", "MODEL", "REQUESTS", "PROMPT", "ANSWER"],
        ["alice", "org/tiny", "2", "10", "4"],
        ["bob", "org/tiny", "1", "5", "2"],
    ]
    by_day = cli("usage", "--by", "day", *HERE).stdout.splitlines()
    assert by_day[0].split()[0] == "FROM"
    assert len(by_day) == 3
    assert json.loads(cli("usage", "--json", *HERE).stdout)[0]["generated_tokens"] == 4


def test_ps_looks_back_as_far_as_it_is_told(cli: Any, lab: Lab) -> None:
    _answer(lab, "alice")
    assert "org/tiny#1" in cli("ps", "--since", "1d", *HERE).stdout
    assert json.loads(cli("ps", "--since", "1d", "--json", *HERE).stdout)[0]["key"] == "alice"

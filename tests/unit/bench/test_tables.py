"""Tables of recorded results: a row for each measure, an arm in each column, no line wider than a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardcompute.bench.report import Result
from shardcompute.bench.soak.report import Sample, SoakTally, find_trends, render_requests, render_trends
from shardcompute.bench.tables import WIDTH, format_value, render_results, render_table
from shardcompute.bench.wan.report import Summary, render_summaries

RECORDED = Path(__file__).parents[3] / "bench" / "results"
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "engine": ("engine", {"labels": ("threads", "tokens", "batch")}),
    "quality": ("form", {}),
    "codecs": ("codec", {"labels": ("cuts",), "tables": ("weights",)}),
    "exactness": ("arm", {"labels": ("past", "batch")}),
    "swarm": ("arm", {"labels": ("streams", "stage")}),
    "failover": ("stage", {"tables": ("how",)}),
    "prefix": ("arm", {}),
    "wan-thin": ("wire", {}),
}
"""As the commands show them."""


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def results(name: str) -> list[Result]:
    listed = recorded(name)["results"]
    return [Result(each.pop("metric"), each.pop("value"), each.pop("unit"), each) for each in listed]


def check_width(text: str) -> None:
    assert max(map(len, text.splitlines())) <= WIDTH == 100


@pytest.mark.parametrize("name", ARMS)
def test_results_fit_a_terminal_and_none_is_left_out(name: str) -> None:
    arm, shape = ARMS[name]
    found = [each for each in results(name) if each.labels]
    text = render_results(found, arm, **shape)
    check_width(text)
    rows = [line.split() for line in text.splitlines()]
    for each in found:
        assert each.metric.replace("_", " ") in text
        assert any(format_value(each.value) in row for row in rows)


def test_swarm_has_a_row_for_each_measure_and_its_arms_side_by_side() -> None:
    lines = render_results(results("swarm"), "arm", labels=("streams", "stage")).splitlines()
    assert lines[0].split("  ")[-1] == "one process"
    start = lines.index("throughput, tok/s")
    assert [line.split()[:2] for line in lines[start + 1 : start + 4]] == [
        ["streams", "1"],
        ["streams", "8"],
        ["streams", "32"],
    ]
    assert all(len(line.split()) == 4 for line in lines[start + 1 : start + 4])


NEWER = {
    "max_tokens": 160,
    "temperature": 0.0,
    "speedup_low": 1.23,
    "speedup_high": 2.34,
    "speedup_unlooped": 1.67,
    "loop_share": 0.1,
    "acceptance_by_position": [0.75, 1.0, 0.5],
}
"""What the runs that are kept were not asked for yet."""


def test_wan_fits_a_terminal() -> None:
    for name in ("wan-80ms", "wan-20-200ms"):
        summaries = [Summary(**{**NEWER, **each}) for each in recorded(name)["summaries"]]
        text = render_summaries(summaries)
        check_width(text)
        for summary in summaries:
            assert f"{summary.tokens_per_s:.1f}" in text
            assert f"ring {summary.ring_ms:g} ms, {summary.streams} stream" in text


def test_soak_fits_a_terminal() -> None:
    kept = recorded("soak")
    trends = find_trends([Sample(**each) for each in kept["samples"]], kept["minutes"] * 60)
    text = render_trends(trends)
    check_width(text)
    processes = text.splitlines()[1].split()
    assert processes == list(dict.fromkeys(trend.process for trend in trends))
    assert sum("verdict" in line for line in text.splitlines()) == 3
    kinds = {each["kind"]: SoakTally(each["value"]) for each in kept["results"] if "kind" in each}
    check_width(render_requests(kinds))


def test_arms_that_do_not_fit_follow_below() -> None:
    arms = [f"an arm with a long name, number {number}" for number in range(7)]
    text = render_table("title", arms, [("speed", {arm: arm[-1] for arm in arms}), ("left out", {})])
    check_width(text)
    assert all(arm in text for arm in arms)
    speeds = [line.split()[1:] for line in text.splitlines() if line.startswith("speed")]
    assert len(speeds) > 1
    assert [value for line in speeds for value in line] == list("0123456")

"""What `bench soak` asks, and when it says that something grows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardcompute.bench.questions import QUESTIONS, system_prompt
from shardcompute.bench.servers import find_errors
from shardcompute.bench.soak.report import (
    Pace,
    Sample,
    SoakOutcome,
    SoakTally,
    find_trends,
    measures_of,
    paces,
    raw_of,
    results_of,
    slope,
    summary_lines,
)
from shardcompute.bench.soak.requests import ROUND, Ask, Kind, RequestMix, is_of_schema
from shardcompute.bench.soak.run import SoakBench, choose_kv_tokens, count_generated, judge
from shardcompute.cli.bench import soak as bench_soak
from shardcompute.cli.main import build_app
from shardcompute.core.errors import UsageError

MIB = 1 << 20
WHOLE_S = 300
MIX = RequestMix(QUESTIONS, "Be brief.", long_chars=400, most_tokens=64)


def watched(mib: object, *, descriptors: object = 30, process: str = "worker-1") -> list[Sample]:
    """Looks every two seconds; amounts are numbers or functions of the time."""

    def at(amount: object, at_s: float) -> float:
        return float(amount(at_s) if callable(amount) else amount)  # type: ignore[arg-type]

    return [
        Sample(at_s, process, int(at(mib, at_s) * MIB), int(at(descriptors, at_s)), 12, at_s / 2)
        for at_s in range(0, WHOLE_S + 1, 2)
    ]


def outcome(samples: list[Sample], **changes: object) -> SoakOutcome:
    values: dict[str, object] = {
        "minutes": WHOLE_S / 60,
        "stages": 3,
        "tallies": {"plain": SoakTally(done=8), "cancelled": SoakTally(done=1, cancelled=3)},
        "failures": [],
        "samples": samples,
        "generated": [(float(at_s), at_s * 50.0) for at_s in range(0, WHOLE_S + 1, 10)],
    }
    return SoakOutcome(**{**values, **changes})  # type: ignore[arg-type]


def verdicts(samples: list[Sample]) -> dict[str, str]:
    return {trend.quantity: trend.verdict for trend in find_trends(samples, WHOLE_S)}


def test_slope_is_that_of_the_fitted_line() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(0, 0), (1, 3), (2, 0)]) == pytest.approx(0)
    assert slope([(0, 0), (1, 1), (2, 0), (3, 1)]) == pytest.approx(0.2)
    assert slope([(5, 1), (5, 9)]) == slope([(5, 1)]) == slope([]) == 0


def test_the_warm_up_does_not_count() -> None:
    samples = watched(lambda at_s: 100 + min(at_s, 60) * 5)
    memory = find_trends(samples, WHOLE_S)[0]
    assert (memory.warm, memory.end, memory.verdict) == (400, 400, "flat")
    assert memory.per_minute == pytest.approx(0)


def test_steady_growth_is_found_with_its_rate() -> None:
    memory = find_trends(watched(lambda at_s: 200 + at_s / 20), WHOLE_S)[0]
    assert memory.per_minute == pytest.approx(3, rel=0.01)
    assert memory.rise == pytest.approx(12, rel=0.01)
    assert memory.later_rise == pytest.approx(6, rel=0.01)
    assert memory.allowed == pytest.approx(0.05 * memory.warm)
    assert memory.verdict == "grows"


@pytest.mark.parametrize(
    ("mib", "verdict"),
    [
        (100, "flat"),
        (lambda at_s: 100 + 20 * (int(at_s) % 4 == 0), "flat"),
        (lambda at_s: 50 + at_s / 40, "flat"),
        (lambda at_s: 1000 + at_s / 6, "flat"),
        (lambda at_s: 200 - at_s / 4, "flat"),
        (lambda at_s: 100 + min(at_s, 150) / 2, "varies"),
        (lambda at_s: 300 - 2 * min(at_s, 60) + max(0, at_s - 60) / 3, "varies"),
        (lambda at_s: 100 + min(at_s, 150) / 2 + at_s / 12, "grows"),
        (lambda at_s: 100 + at_s / 12 + 6 * (int(at_s) % 8 == 0), "grows"),
    ],
)
def test_verdicts_on_memory(mib: object, verdict: str) -> None:
    """Six MiB in four minutes are allowed to a small process, forty to one of a thousand; so is it to fill up once, and
    to take again what was given back."""
    assert verdicts(watched(mib))["memory"] == verdict


def test_longer_runs_find_slower_leaks() -> None:
    for minutes, verdict in ((5, "flat"), (30, "grows")):
        samples = [
            Sample(at_s, "w", int((100 + at_s / 60) * MIB), 1, 1) for at_s in range(0, minutes * 60, 2)
        ]
        assert find_trends(samples, minutes * 60)[0].verdict == verdict


def test_descriptors_have_an_allowance_of_their_own() -> None:
    leaking = verdicts(watched(100, descriptors=lambda at_s: 30 + at_s // 30))
    assert leaking == {"memory": "flat", "descriptors": "grows", "threads": "flat"}
    assert verdicts(watched(100, descriptors=lambda at_s: 30 + at_s % 12))["descriptors"] == "flat"


def test_processes_are_judged_apart() -> None:
    samples = [*watched(lambda at_s: 100 + at_s, process="worker-2"), *watched(100)]
    grown = {(trend.process, trend.quantity) for trend in find_trends(samples, WHOLE_S) if trend.grows}
    assert grown == {("worker-2", "memory")}


def test_pace_of_the_first_and_last_third() -> None:
    """Of the time after the warm-up, which ends after sixty seconds here: 60 to 140, and 220 to 300."""
    generated = [
        (float(at_s), float(max(0, at_s - 60) * 60 - max(0, at_s - 220) * 30)) for at_s in range(0, 301, 2)
    ]
    first, last = paces(outcome(watched(100), generated=generated))
    assert (first.tokens_per_s, last.tokens_per_s) == (pytest.approx(60), pytest.approx(30))
    assert first.cpu_s_per_token == pytest.approx(0.5 / 60)
    assert last.cpu_s_per_token == pytest.approx(0.5 / 30)


@pytest.mark.parametrize("generated", [[], [(0.0, 5.0)], [(0.0, 5.0), (300.0, 5.0)]])
def test_pace_where_nothing_was_generated(generated: list[tuple[float, float]]) -> None:
    assert paces(outcome(watched(100), generated=generated)) == (Pace(0.0, 0.0), Pace(0.0, 0.0))


def test_counters_of_all_models_are_added_up() -> None:
    lines = [
        "# HELP shardcompute_generation_tokens_total Tokens generated.",
        'shardcompute_generation_tokens_total{model_name="a"} 40',
        'shardcompute_generation_tokens_total{model_name="b c"} 2',
        'vllm:generation_tokens_total{model_name="a"} 40',
    ]
    assert count_generated(lines) == 42


@pytest.mark.parametrize(
    "changes",
    [
        {"tallies": {"plain": SoakTally(done=8, failed=1)}},
        {"tallies": {"plain": SoakTally()}},
        {"failures": ["metrics: none"]},
        {"lost": ["worker-2"]},
        {"samples": watched(lambda at_s: 100 + at_s)},
    ],
)
def test_what_is_not_well(changes: dict[str, object]) -> None:
    assert outcome(watched(100)).is_well
    assert not outcome(**{"samples": watched(100), **changes}).is_well  # type: ignore[arg-type]


def test_report_in_words() -> None:
    assert summary_lines(outcome(watched(100))) == [
        "9 requests done, 0 failed, 3 cancelled, in 5 minutes on 3 stages",
        "after the warm-up 50.0 tok/s in the first third, 50.0 in the last (1.00 of it)",
        "10.0 and 10.0 ms of processor time for a token",
        "nothing grows",
    ]
    bad = outcome(
        watched(lambda at_s: 100 + at_s), failures=["plain: status 503"], lost=["worker-2"], generated=[]
    )
    assert summary_lines(bad)[1:] == [
        "after the warm-up 0.0 tok/s in the first third, 0.0 in the last",
        "0.0 and 0.0 ms of processor time for a token",
        "worker-2 ended meanwhile",
        "worker-1 grows: memory by 60.00 MiB a minute",
        "failed: plain: status 503",
    ]
    memory, descriptors, _ = find_trends(watched(lambda at_s: 200 + at_s / 20), WHOLE_S)
    assert [*measures_of(memory).values()] == [
        "203.0", "215.0", "+3.00", "+12.0", "+6.0", "+12.0", "10.2", "grows",
    ]  # fmt: skip
    assert measures_of(descriptors)["warm"] == measures_of(descriptors)["end"] == "30"


def test_results_and_samples_are_kept() -> None:
    kept = outcome(watched(lambda at_s: 100 + at_s))
    found = {
        (each.metric, each.labels.get("process") or each.labels.get("kind") or each.labels.get("part")): each
        for each in results_of(kept)
    }
    assert found["requests_cancelled", "all"].value == 3
    assert found["throughput", "last third"].value == pytest.approx(50)
    assert found["memory_slope", "worker-1"].value == pytest.approx(60)
    assert found["memory_slope", "worker-1"].labels["verdict"] == "grows"
    raw = raw_of(kept)
    assert raw["samples"][1] == asdict(kept.samples[1])
    json.dumps(raw)


def test_errors_are_found_in_logs() -> None:
    lines = [
        "  a line that the file begins with",
        "2026-01-02T03:04:05.006Z INFO shardcompute.node: ready, no ERROR so far",
        "2026-01-02T03:04:06.006Z ERROR shardcompute.api: request 7 failed",
        "Traceback (most recent call last):",
        "ValueError: it is too wide",
        "2026-01-02T03:04:07.006Z ERROR shardcompute.node: lost",
        "2026-01-02T03:04:08.006Z INFO shardcompute.node: found",
    ]
    assert find_errors(lines) == [f"{lines[2]} … {lines[4]}", lines[5]]
    assert find_errors([]) == []


def test_the_mix_has_every_kind_and_repeats_itself() -> None:
    asked = [MIX.ask(number) for number in range(3 * len(ROUND))]
    assert asked == [MIX.ask(number) for number in range(3 * len(ROUND))]
    assert {each.kind for each in asked} == set(Kind)
    assert len({each.body["max_tokens"] for each in asked}) > 10
    for each in asked:
        assert each.body["stream"] is True
        assert each.body["max_tokens"] <= 64
        assert (each.leave_after > 0) == (each.kind is Kind.CANCELLED)
        assert each.body.get("n", 1) == each.answers
        assert ("response_format" in each.body) == (each.kind is Kind.SCHEMA)
        assert (each.body["messages"][0]["content"] == "Be brief.") == (each.kind is Kind.SHARED)
    long = [each.body["messages"][0]["content"] for each in asked if each.kind is Kind.LONG]
    assert [len(text) for text in long] == [400] * 3
    assert len(set(long)) == 3


def test_fillers_are_long_and_none_is_another() -> None:
    texts = [MIX.filler(-number).body["messages"][0]["content"] for number in range(1, 9)]
    assert len(set(texts)) == 8
    assert {len(text) for text in texts} == {400}


def test_system_prompt_is_as_long_as_asked() -> None:
    text = system_prompt(300, lambda text: len(text.split()))
    assert 300 <= len(text.split()) < 330
    lines = text.splitlines()
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize(
    ("asked", "texts", "reasons", "how"),
    [
        (Ask(Kind.PLAIN, {}), {0: "yes"}, {0: "stop"}, "done"),
        (Ask(Kind.PLAIN, {}), {0: "yes"}, {}, "failed"),
        (Ask(Kind.SEVERAL, {}, answers=2), {0: "a", 1: "b"}, {0: "stop", 1: "length"}, "done"),
        (Ask(Kind.SEVERAL, {}, answers=2), {0: "a", 1: "b"}, {1: "length"}, "failed"),
        (Ask(Kind.SCHEMA, {}), {0: '{"title": "x", "sure": true}'}, {0: "stop"}, "done"),
        (Ask(Kind.SCHEMA, {}), {0: '{"title": "x", '}, {0: "length"}, "done"),
        (Ask(Kind.SCHEMA, {}), {0: '{"title": "x", '}, {0: "stop"}, "failed"),
        (Ask(Kind.SCHEMA, {}), {}, {0: "stop"}, "failed"),
    ],
)
def test_answers_are_judged(asked: Ask, texts: dict[int, str], reasons: dict[int, str], how: str) -> None:
    assert judge(asked, texts, reasons)[0] == how


@pytest.mark.parametrize("text", ["", "[]", '{"sure": true}', '{"title": "x", "sure": "yes"}'])
def test_what_is_not_of_the_schema(text: str) -> None:
    assert not is_of_schema(text)


@pytest.mark.parametrize("changes", [{"streams": 0}, {"minutes": 0.2}, {"every_s": 30.0}, {"every_s": 0.0}])
def test_what_cannot_be_measured_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SoakBench("model", **changes)  # type: ignore[arg-type]


def test_memory_for_conversations_is_what_the_streams_need() -> None:
    assert choose_kv_tokens(SoakBench("model")) == 32 * 192
    assert choose_kv_tokens(SoakBench("model", streams=1)) == 2048
    assert choose_kv_tokens(SoakBench("model", kv_tokens=500)) == 500


@pytest.mark.parametrize(("mib", "code"), [(100, 0), (lambda at_s: 100 + at_s, bench_soak.NOT_WELL)])
def test_the_command_fails_when_something_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: object, code: int
) -> None:
    monkeypatch.setattr(
        "shardcompute.bench.soak.run.run_soak_bench", lambda bench, say: outcome(watched(mib))
    )
    monkeypatch.setattr("shardcompute.cli.bench.soak.model_path", lambda model: model)
    file = tmp_path / "out" / "soak.json"
    done = CliRunner().invoke(build_app(), ["bench", "soak", "--json", str(file)])
    assert done.exit_code == code, done.output
    assert ("nothing grows" in done.stdout) == (code == 0)
    assert ("worker-1 grows: memory" in done.stdout) == (code != 0)
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["is_well"] == (code == 0)
    assert written["settings"]["streams"] == 32
    assert len(written["samples"]) == 151

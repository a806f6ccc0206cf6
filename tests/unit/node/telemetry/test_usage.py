"""Tokens by key and model: what is added up, what is forgotten, and that it stays small."""

from __future__ import annotations

from shardcompute.core.generation import Delta, GenerationRequest, Timings, TokenChoice
from shardcompute.node.telemetry.request_log import RequestLog
from shardcompute.node.telemetry.usage import OTHERS, UsageCounter
from shardcompute.wire import StageTiming

HOUR_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000 * HOUR_S

    def __call__(self) -> float:
        return self.now_s


def test_spans_and_totals_add_up() -> None:
    clock = Clock()
    counter = UsageCounter(wall_clock=clock)
    counter.add("a", "tiny", requests=1, prompt_tokens=5, generated_tokens=1)
    clock.now_s += 61
    counter.add("a", "tiny", generated_tokens=2)
    counter.add("", "tiny", requests=1, prompt_tokens=7)
    report = counter.report()
    assert [(t.key, t.requests, t.prompt_tokens, t.generated_tokens) for t in report.totals] == [
        ("", 1, 7, 0),
        ("a", 1, 5, 3),
    ]
    first_s = 1_000 * HOUR_S
    assert [(m.start_s - first_s, m.key, m.generated_tokens) for m in report.minutes] == [
        (0, "a", 1),
        (60, "", 0),
        (60, "a", 2),
    ]
    assert [(h.start_s, h.key, h.generated_tokens) for h in report.hours] == [
        (first_s, "", 0),
        (first_s, "a", 3),
    ]


def test_old_spans_are_forgotten_and_totals_are_not() -> None:
    clock = Clock()
    counter = UsageCounter(wall_clock=clock)
    counter.add("a", "tiny", requests=1)
    clock.now_s += 59 * 60
    assert len(counter.report().minutes) == 1
    clock.now_s += 60
    assert (len(counter.report().minutes), len(counter.report().hours)) == (0, 1)
    clock.now_s += 168 * HOUR_S
    report = counter.report()
    assert (report.hours, report.totals[0].requests) == ((), 1)


def test_many_keys_become_others() -> None:
    counter = UsageCounter(most_pairs=3)
    for number in range(10):
        counter.add(f"key {number}", "tiny", requests=1)
    totals = {(each.key, each.model): each.requests for each in counter.report().totals}
    assert totals == {("key 0", "tiny"): 1, ("key 1", "tiny"): 1, ("key 2", "tiny"): 1, (OTHERS, OTHERS): 7}


def test_log_counts_for_the_caller_and_adds_up_stages() -> None:
    steps = [
        [StageTiming("n1", 0.1, 1.0, 0.01), StageTiming("n2", 0.2, 2.0, 0.02)],
        [StageTiming("n1", 0.1, 1.0, 0.01), StageTiming("n3", 0.3, 3.0, 0.03)],
    ]
    newest = [steps[0]]
    log = RequestLog(stage_times=lambda chain: newest[0])
    request = GenerationRequest((1, 2, 3, 4), 3, caller="sk-sc-12345678")
    with log.open("tiny", "tiny#1", request) as entry:
        entry.saw(Delta(tokens=(TokenChoice(1),)))
        entry.saw(Delta(tokens=(TokenChoice(2),)))  # of the same step
        newest[0] = steps[1]
        entry.saw(Delta(tokens=(TokenChoice(3),)))
        entry.saw(Delta(finish="stop", timings=Timings(traversals=2, drafted_tokens=3, accepted_tokens=1)))
    [view], ended = log.look()
    assert ended == 1
    assert view.key == "sk-sc-12345678"
    assert [(s.node, s.steps, s.compute_s) for s in view.stages] == [
        ("n2", 1, 2.0),
        ("n1", 2, 2.0),
        ("n3", 1, 3.0),
    ]
    assert (view.traversals, view.drafted_tokens, view.accepted_tokens) == (2, 3, 1)
    [total] = log.usage.report().totals
    assert (total.key, total.requests, total.prompt_tokens, total.generated_tokens) == (
        "sk-sc-12345678",
        1,
        4,
        3,
    )


def test_only_later_ends_are_told_again() -> None:
    log = RequestLog(size=3)
    for _ in range(5):
        with log.open("tiny", "tiny#1", GenerationRequest((0,) * 1, 1)):
            pass
    running = log.open("tiny", "tiny#1", GenerationRequest((0,) * 1, 1))
    views, ended = log.look()
    assert ([view.id for view in views], ended) == (["6", "5", "4", "3"], 5)
    assert [view.id for view in log.look(4)[0]] == ["6", "5"]
    assert [view.id for view in log.look(5)[0]] == ["6"]
    with running:
        pass
    assert [view.id for view in log.look(5)[0]] == ["6"]

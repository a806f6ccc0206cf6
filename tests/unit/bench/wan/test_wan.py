"""What `bench wan` makes of its answers, and that answers that differ are never lost sight of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from shardcompute.bench.wan.cluster import WanCluster, WanServing, await_drafters
from shardcompute.bench.wan.loops import is_looping, loop_share
from shardcompute.bench.wan.prompts import read_prompts, sample_prompts
from shardcompute.bench.wan.report import MEAN, mean_interval, measures_of, outcome_json, summarise
from shardcompute.bench.wan.run import Row, WanBench, WanOutcome, find_mismatches
from shardcompute.cli.bench import wan as bench_wan
from shardcompute.cli.main import build_app
from shardcompute.core.errors import BackendError, SourceError, UsageError

PARTS = {"wire_s": 0.08, "stage_queue_s": 0.001, "codec_s": 0.002, "compute_s": 0.017, "draft_s": 0.004}


def row(arm: str, prompt: int = 1, *, decode_s: float = 6.3, streams: int = 1, **changes: object) -> Row:
    values: dict[str, object] = {
        "ring_ms": 80.0,
        "arm": arm,
        "streams": streams,
        "max_tokens": 64,
        "temperature": 0.0,
        "category": "qa" if prompt < 3 else "math",
        "prompt": prompt,
        "group": 0,
        "group_s": 8.0,
        "tokens": 64,
        "prompt_tokens": 20,
        "first_s": 0.5,
        "total_s": 7.0,
        "text": "yes",
        "timings": {
            "decode_s": decode_s,
            "traversals": 21,
            "drafted_tokens": 60,
            "accepted_tokens": 42,
            "drafted_by_position": [30, 20, 10],
            "accepted_by_position": [27, 10, 5],
            "bytes_per_token": 4224,
            **PARTS,
        },
    }
    return Row(**{**values, **changes})  # type: ignore[arg-type]


def test_speed_and_speedup_by_category_and_in_the_mean() -> None:
    rows = [
        row("plain", 1),
        row("auto", 1, decode_s=3.15),
        row("auto", 3, decode_s=6.3),
        row("plain", 3, decode_s=6.3),
    ]
    summaries = {(s.category, s.arm): s for s in summarise(rows)}
    assert list(summaries) == [
        ("qa", "plain"), ("qa", "auto"), ("math", "plain"), ("math", "auto"), (MEAN, "plain"), (MEAN, "auto"),
    ]  # fmt: skip
    assert summaries["qa", "plain"].tokens_per_s == pytest.approx(10.0)
    assert summaries["qa", "auto"].speedup == pytest.approx(2.0)
    assert summaries[MEAN, "auto"].speedup == pytest.approx(1.5)
    fast = summaries["qa", "auto"]
    assert fast.tokens_per_traversal == pytest.approx(3.0)
    assert fast.acceptance == pytest.approx(0.7)
    assert fast.traversal_s == pytest.approx(0.1)
    assert fast.parts == PARTS
    assert [*measures_of(fast).values()] == [
        "20.0", "2.00", "", "2.00", "0%", "3.00", "70%", "90% 50% 50%", "100", "0.50", "4,224",
    ]  # fmt: skip


def test_streams_together_count_by_their_sum() -> None:
    rows = [row("plain", n, streams=4, group_s=8.0) for n in range(4)]
    rows += [row("auto", n, streams=4, group_s=4.0) for n in range(4)]
    plain, auto = summarise(rows)
    assert plain.category == auto.category == MEAN
    assert plain.tokens_per_s == pytest.approx(4 * 64 / 8.0)
    assert auto.speedup == pytest.approx(2.0)


def test_servers_that_say_nothing_are_summarised_all_the_same() -> None:
    summary, _ = summarise([row("plain", timings={})])
    assert summary.tokens_per_s == pytest.approx(63 / 6.5)
    assert summary.traversal_s is summary.acceptance is summary.tokens_per_traversal is None
    assert [*measures_of(summary).values()][5:9] == ["", "", "", ""]


def test_means_are_by_prompt_with_their_interval_and_without_loops() -> None:
    loop = "and so on " * 20
    rows = [row("plain", n, text=loop if n == 4 else "yes") for n in range(5)]
    rows += [
        row("auto", n, decode_s=6.3 / times, text=loop if n == 4 else "yes")
        for n, times in enumerate([1.0, 2.0, 2.0, 3.0, 7.0])
    ]
    [auto] = [each for each in summarise(rows) if each.category == MEAN and each.arm == "auto"]
    assert auto.speedup == pytest.approx(3.0)
    assert auto.speedup_unlooped == pytest.approx(2.0)
    assert auto.loop_share == pytest.approx(0.2)
    assert auto.speedup_low is not None
    assert auto.speedup_high is not None
    assert 1.0 <= auto.speedup_low < 3.0 < auto.speedup_high <= 7.0
    assert mean_interval([1.0, 2.0]) is None
    assert mean_interval([2.0] * 9) == (2.0, 2.0)


def test_lengths_and_temperatures_are_summed_up_apart() -> None:
    rows = [row("plain"), row("plain", max_tokens=128), row("plain", temperature=0.8, text="no")]
    assert [(s.max_tokens, s.temperature) for s in summarise(rows) if s.category == MEAN] == [
        (64, 0.0), (128, 0.0), (64, 0.8),
    ]  # fmt: skip
    assert find_mismatches(rows) == []


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("The sky is blue because air scatters short waves more than long ones.", 0.0),
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12", 0.0),
        ("Well...", 0.0),
        ("a" * 40, 1.0),
        ("I see. " * 10, 1.0),
        ("x" * 70 + "".join(map(chr, range(200, 270))), 0.5),
    ],
)
def test_what_repeats_itself_is_a_loop(text: str, share: float) -> None:
    assert loop_share(text) == pytest.approx(share)
    assert is_looping(text) is (share >= 0.2)


def test_answers_that_differ_are_found() -> None:
    rows = [row("plain"), row("ngram"), row("auto", text="no"), row("auto", 2, text="no")]
    [wrong] = find_mismatches(rows)
    assert (wrong.prompt, wrong.arm, wrong.text, wrong.expected) == (1, "auto", "no", "yes")


def test_the_command_fails_when_answers_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("plain"), row("auto", text="no")]
    outcome = WanOutcome("links", rows, find_mismatches(rows), ["one", "two"])
    monkeypatch.setattr("shardcompute.bench.wan.run.run_wan_bench", lambda bench, say: outcome)
    monkeypatch.setattr(bench_wan, "_serving", lambda *arguments: WanServing("model"))
    file = tmp_path / "out" / "wan.json"
    done = CliRunner().invoke(build_app(), ["bench", "wan", "--data", "x.jsonl", "--json", str(file)])
    assert done.exit_code == bench_wan.MISMATCHED
    assert "DIFFER" in done.stderr
    assert "prompt 1 (qa), auto" in done.stderr
    written = json.loads(file.read_text(encoding="utf-8"))
    assert len({each["text"] for each in written["rows"]}) == 2, "what differs can be told apart"
    assert len(written["mismatches"]) == 1
    assert written["summaries"]


def test_raw_rows_are_kept() -> None:
    written = outcome_json(WanOutcome("links", [row("plain")], [], ["one"]), {"mbit": 100})
    assert written["rows"][0]["timings"]["traversals"] == 21
    json.dumps(written)


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": ["plain", "magic"]},
        {"arms": []},
        {"ring_ms": []},
        {"streams": [0]},
        {"tokens": []},
        {"tokens": [0]},
        {"temperatures": []},
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        WanBench(WanServing("model"), Path("x"), **changes)  # type: ignore[arg-type]


def test_prompts_take_turns_by_category(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        {"id": n, "category": category, "turns": ["x" * size, "again"]}
        for n, (category, size) in enumerate([("a", 1), ("a", 2), ("a", 9000), ("b", 3), ("a", 4)])
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    prompts = read_prompts(path)
    assert [prompt.id for prompt in prompts] == [0, 1, 3, 4]
    drawn = [prompt.id for prompt in sample_prompts(prompts, 2, seed=1)]
    assert drawn == [prompt.id for prompt in sample_prompts(prompts, 2, seed=1)]
    assert [prompts[[p.id for p in prompts].index(id)].category for id in drawn] == ["a", "b", "a"]
    assert sorted(prompt.id for prompt in sample_prompts(prompts, 0, seed=1)) == [0, 1, 3, 4]
    firsts = {sample_prompts(prompts, 1, seed=seed)[0].id for seed in range(20)}
    assert firsts == {0, 1, 4}


def test_data_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        read_prompts(tmp_path / "missing")
    path = tmp_path / "data.jsonl"
    path.write_text('{"id": 1}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="line 1"):
        read_prompts(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="no prompts"):
        read_prompts(path)


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from shardcompute.bench.wan.plots import plot_wan

    rows = [row("plain", 1), row("auto", 1, decode_s=3.0), row("plain", 3), row("auto", 3)]
    paths = plot_wan(summarise(rows), tmp_path)
    assert [path.name for path in paths] == ["speedup-80ms.png", "traversal.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


class _Told:
    """A cluster that tells of its drafters what is written here, one after the other."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)

    def drafters(self) -> list[dict[str, Any]]:
        state = self.states.pop(0)
        return [{"drafter": "head", "state": state, "text": f"head: {state}: no memory is left for it"}]


def test_nothing_is_measured_before_drafters_are_at_work() -> None:
    told = _Told("loading", "at work")
    await_drafters(cast(WanCluster, told))
    assert not told.states


def test_a_drafter_that_should_be_at_work_and_is_not_ends_the_bench() -> None:
    with pytest.raises(BackendError, match="no memory is left for it"):
        await_drafters(cast(WanCluster, _Told("loading", "missing")))

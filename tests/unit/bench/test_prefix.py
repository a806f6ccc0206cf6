"""What `bench prefix` makes of its answers, and what it does not let pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardcompute.bench.prefix import PrefixBench, PrefixOutcome, PrefixReply, raw_of, results_of
from shardcompute.cli.bench import soak as bench_soak
from shardcompute.cli.main import build_app
from shardcompute.core.errors import UsageError

REPLIES = [
    PrefixReply("cold", 1, 2.0, "blue", 1040, 0),
    PrefixReply("warm", 1, 0.2, "blue", 1040, 1024),
    PrefixReply("warm", 2, 0.4, "green", 1050, 1024),
    PrefixReply("cold", 2, 2.0, "green", 1050, 0),
]


def changed(number: int, **changes: object) -> PrefixOutcome:
    replies = list(REPLIES)
    replies[number] = replace(replies[number], **changes)  # type: ignore[arg-type]
    return PrefixOutcome(3, replies)


def test_arms_are_compared_question_by_question() -> None:
    outcome = PrefixOutcome(3, REPLIES)
    assert outcome.problems == []
    found = {(each.metric, each.labels.get("arm")): each.value for each in results_of(outcome)}
    assert found["stages", None] == 3
    assert found["first_token", "cold"] == 2.0
    assert found["first_token", "warm"] == pytest.approx(0.3)
    assert found["warm_vs_cold", "warm"] == pytest.approx(0.15)
    assert (found["cached_tokens", "cold"], found["cached_tokens", "warm"]) == (0, 1024)
    assert found["same_text", "warm"] == 1.0
    json.dumps(raw_of(outcome))


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (changed(2, text="red"), "question 2: cold 'green', warm 'red'"),
        (changed(0, cached_tokens=16), "question 1: 16 tokens were known to a new salt"),
        (changed(2, cached_tokens=0), "question 2: nothing was remembered"),
    ],
)
def test_the_command_fails_for_what_must_not_be(
    outcome: PrefixOutcome, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcompute.bench.prefix.run_prefix_bench", lambda bench, say: outcome)
    monkeypatch.setattr("shardcompute.cli.bench.soak.model_path", lambda model: model)
    file = tmp_path / "prefix.json"
    done = CliRunner().invoke(build_app(), ["bench", "prefix", "--json", str(file)])
    assert done.exit_code == bench_soak.NOT_WELL, done.output
    assert said in " ".join(done.stderr.split())
    written = json.loads(file.read_text(encoding="utf-8"))
    assert [said in problem for problem in written["problems"]] == [True]


def test_the_command_succeeds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shardcompute.bench.prefix.run_prefix_bench", lambda bench, say: PrefixOutcome(3, REPLIES)
    )
    monkeypatch.setattr("shardcompute.cli.bench.soak.model_path", lambda model: model)
    done = CliRunner().invoke(build_app(), ["bench", "prefix"])
    assert done.exit_code == 0, done.output
    assert "0.15" in done.stdout


@pytest.mark.parametrize("changes", [{"rounds": 0}, {"rounds": 17}, {"prompt_tokens": 2000}])
def test_what_cannot_be_measured_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        PrefixBench("model", **changes)  # type: ignore[arg-type]

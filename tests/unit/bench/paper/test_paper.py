"""`bench paper`: intervals that hold, choices that are scored as they are likely, and tables that say what is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shardcompute.bench.paper.intervals import paired_difference, perplexity, wilson
from shardcompute.bench.paper.links import PAPER_LINKS, tokens_per_s
from shardcompute.bench.paper.published import UNKNOWN, read_published
from shardcompute.bench.paper.report import render_paper
from shardcompute.bench.paper.tasks import answer, read_task
from shardcompute.bench.report import Result
from shardcompute.bench.wan.cluster import TimedAnswer
from shardcompute.cli.bench.commands import app
from shardcompute.core.errors import UsageError
from support.models.tiny_checkpoint import save_tiny_llama


def test_wilson_is_what_tables_say() -> None:
    found = wilson(15, 50)
    assert (found.value, round(found.low, 4), round(found.high, 4)) == (0.3, 0.191, 0.4375)
    assert wilson(0, 20).low == 0
    assert 0.1 < wilson(0, 20).high < 0.2
    assert wilson(20, 20).high == 1


def test_intervals_hold_in_95_of_100() -> None:
    drawn = np.random.default_rng(3).binomial(60, 0.4, 2000)
    held = [found.low <= 0.4 <= found.high for found in (wilson(int(hits), 60) for hits in drawn)]
    assert 0.93 < np.mean(held) < 0.97


def test_a_difference_is_one_of_the_same_questions() -> None:
    base = [True, False] * 50
    worse = [False, False, *base[2:]]
    found = paired_difference(worse, base)
    assert found.value == pytest.approx(-0.01)
    assert found.low < found.value < found.high
    # Each alone is uncertain by ten points, the difference by two.
    assert found.high - found.low < 0.05 < wilson(50, 100).high - wilson(50, 100).low
    same = paired_difference(base, base)
    assert (same.value, same.low, same.high) == (0.0, -0.03, 0.03)


def test_perplexity_is_that_of_all_tokens() -> None:
    losses, tokens = [10.0, 40.0, 12.0], [5, 10, 6]
    found = perplexity(losses, tokens)
    assert found.value == pytest.approx(math.exp(62 / 21))
    assert found.low < found.value < found.high
    assert found == perplexity(losses, tokens)


class Letters:
    """Every letter is a token."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [ord(letter) for letter in text if ord(letter) < 128]


class Likes:
    """An executor that holds some letters likelier than others, whatever came before; keeps to its rows."""

    def __init__(self, liked: str) -> None:
        self.logits = np.zeros(128, dtype=np.float32)
        for rank, letter in enumerate(liked):
            self.logits[ord(letter)] = 5 - rank
        self.length = 0

    def step(self, segments: Any, ids: Any) -> Any:
        (segment,) = segments
        assert segment.start <= self.length
        self.length = segment.start + len(ids)
        return np.tile(self.logits, (segment.logit_rows, 1))

    def close_session(self, session: int) -> None:
        self.length = 0


def task(folder: Path, *rows: tuple[str, str]) -> Path:
    path = folder / "bbh_some.jsonl"
    path.write_text("".join(json.dumps({"input": text, "target": target}) + "\n" for text, target in rows))
    return path


def test_the_likeliest_choice_is_the_answer(tmp_path: Path) -> None:
    options = "Which?\nOptions:\n(A) one\n(B) two\n(C) three"
    path = task(tmp_path, (options, "(C)"), ("Is it?\nOptions:\n- Yes\n- No", "No"), ("Why?", "because"))
    questions = read_task(path, Letters(), 10)  # type: ignore[arg-type]
    assert [len(each.choices) for each in questions] == [3, 2]  # what allows no choice is left out
    assert [each.right for each in questions] == [2, 1]
    assert answer(Likes("BAC"), questions[0]) == 1  # type: ignore[arg-type]
    assert answer(Likes("CAB"), questions[0]) == 2  # type: ignore[arg-type]
    assert answer(Likes("No"), questions[1]) == 1  # type: ignore[arg-type]
    assert len(read_task(path, Letters(), 1)) == 1  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot read"):
        read_task(tmp_path / "none.jsonl", Letters(), 1)  # type: ignore[arg-type]


def test_a_batch_is_as_fast_as_all_of_it() -> None:
    answers = [
        TimedAnswer(tokens=11, first_s=1.0, last_s=3.0),
        TimedAnswer(tokens=11, first_s=2.0, last_s=6.0),
    ]
    assert tokens_per_s(answers) == pytest.approx(20 / 5)


def links() -> list[Result]:
    labels = {"link": PAPER_LINKS[0].told, "batch": 8}
    return [Result("throughput", 80.0, "tok/s", labels), Result("steps", 10.0, "steps/s", labels)]


def test_published_figures_stand_beside_ours_and_only_where_they_are_known(tmp_path: Path) -> None:
    assert UNKNOWN in render_paper(links(), [])
    file = tmp_path / "published.json"
    file.write_text(json.dumps([{"metric": "steps", "link": "1 Gbit/s, 5 ms", "batch": 8, "value": 1.25}]))
    table = render_paper(links(), read_published(file))
    assert UNKNOWN not in table
    assert table.count("published") == 1
    assert "1.25" in table
    file.write_text('{"metric": "steps"}')
    with pytest.raises(UsageError, match="no list of published figures"):
        read_published(file)


def test_forms_are_compared_from_the_command_line(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    (tmp_path / "lambada.jsonl").write_text(
        "".join(
            json.dumps({"text": f"the {number} words of this small text end"}) + "\n" for number in range(4)
        )
    )
    task(tmp_path, *((f"{number}?\nOptions:\n(A) one\n(B) two", "(A)") for number in range(4)))
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        app,
        [
            *("paper", str(model), "--data", str(tmp_path), "--parts", "forms", "--forms", "float32,int8"),
            *("--quick", "--threads", "1", "--json", str(out)),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "right answers, %" in done.output
    assert "what differs" in done.output
    found = {
        (each["metric"], each["form"], each["task"]): each["value"]
        for each in json.loads(out.read_text())["results"]
    }
    assert found["accuracy_low", "int8", "some"] <= found["accuracy", "int8", "some"]
    assert ("accuracy_change", "int8", "lambada") in found
    assert ("accuracy_change", "float32", "lambada") not in found
    refused = CliRunner().invoke(app, ["paper", str(model)])
    assert isinstance(refused.exception, UsageError)

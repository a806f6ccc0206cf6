"""Stages that `transformers` runs: however many share a model, and whoever of them is lost, the tokens are one
process's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.backends.exactness import parse_class
from shardcompute.control.explain import classes_of
from shardcompute.core.generation import Speculation
from support.models.requests import greedy, prompts, sampled
from support.swarm.lab import Alone, open_alone, swarm
from support.tiny_fallback import KINDS, save_fallback

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fallback(request.param, tmp_path_factory.mktemp("fallback") / f"tiny-{request.param}")


@pytest.fixture(scope="module")
def answers(model: Path) -> Iterator[Alone]:
    with open_alone(model) as service:
        yield Alone(service)


def test_three_stages_answer_as_one_process_does_also_after_one_is_lost(
    tmp_path: Path, model: Path, answers: Alone
) -> None:
    texts = prompts(answers.service.tokenizer)
    requests = [kind(text) for kind in (greedy, sampled) for text in texts[:3]]
    drafted = replace(greedy(texts[3], 24), speculation=Speculation("ngram", 3, 1))
    with swarm(tmp_path, model, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = [lab.start(request) for request in (*requests, drafted)]
        assert [talk.result() for talk in talks[:-1]] == [answers.answer(each) for each in requests]
        assert talks[-1].result() == answers.answer(replace(drafted, speculation=Speculation("off")))
        classes = classes_of(lab.state, lab.chain().nodes, lab.state.models[lab.chain().model].model)
        assert {parsed.backend for name in classes if (parsed := parse_class(name))} == {"transformers"}
        talks = [lab.start(greedy(text, 80)) for text in texts[:3]]
        lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(1))
        assert [talk.result() for talk in talks] == [answers.answer(talk.request) for talk in talks]
        lab.wait_quiet()

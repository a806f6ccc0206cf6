"""Stages that llama.cpp runs: however many share a model, and whoever of them is lost, the tokens are one process's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.backends.llamacpp.library import installed_version
from support.models.requests import greedy, mixture, prompts, sampled
from support.models.tiny_gguf import save_tiny_text_gguf
from support.swarm.lab import Alone, open_alone, swarm

pytestmark = pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def answers(model: Path) -> Iterator[Alone]:
    with open_alone(model, "llamacpp") as service:
        yield Alone(service)


def test_two_stages_answer_as_one_process_does(tmp_path: Path, model: Path, answers: Alone) -> None:
    texts = prompts(answers.service.tokenizer)
    requests = [kind(text) for kind in (greedy, sampled) for text in texts[:6]]
    with swarm(tmp_path, model, layers=(3, 3), stages=2, backend="llamacpp") as lab:
        talks = [lab.start(request) for request in requests]
        assert [talk.result() for talk in talks] == [answers.answer(request) for request in requests]
        lab.wait_quiet()


@pytest.mark.parametrize("stage", [0, 1], ids=["first", "last"])
def test_a_lost_stage_goes_on_at_its_standby(tmp_path: Path, model: Path, answers: Alone, stage: int) -> None:
    with swarm(tmp_path, model, layers=(3, 3, 3, 3), stages=2, standbys=2, backend="llamacpp") as lab:
        talks = [lab.start(request) for request in mixture(answers, 4, 100)]
        lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(stage))
        assert not any(talk.is_over for talk in talks)
        for talk in talks:
            assert talk.result() == answers.answer(talk.request)
        lab.wait_quiet()

"""A split GGUF of K and I quants over three stages: the tokens are one process's, also after a stage is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.gguf.blocks import save_block_gguf
from support.gguf.parts import split_gguf
from support.models.requests import greedy, mixture, prompts, sampled
from support.swarm.lab import Alone, open_alone, swarm

TYPES = ("Q2_K", "IQ2_XXS", "Q3_K", "IQ3_S", "IQ1_M", "Q6_K", "IQ4_XS", "MXFP4", "TQ2_0")
"""Two more than a layer has matrices, so that layers differ in theirs."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return split_gguf(save_block_gguf(folder / "tiny.gguf", TYPES), 3, folder / "parts")


@pytest.fixture(scope="module")
def answers(parts: list[Path]) -> Iterator[Alone]:
    with open_alone(parts[0].parent.parent / "tiny.gguf") as service:
        yield Alone(service)


def test_three_stages_answer_as_one_process_does(tmp_path: Path, parts: list[Path], answers: Alone) -> None:
    texts = prompts(answers.service.tokenizer)
    requests = [kind(text) for kind in (greedy, sampled) for text in texts[:4]]
    with swarm(tmp_path, parts[1], layers=(2, 2, 2), stages=3) as lab:
        talks = [lab.start(request) for request in requests]
        assert [talk.result() for talk in talks] == [answers.answer(request) for request in requests]
        lab.wait_quiet()


def test_a_lost_stage_changes_nothing(tmp_path: Path, parts: list[Path], answers: Alone) -> None:
    with swarm(tmp_path, parts[0].parent, layers=(2,) * 6, stages=3, standbys=3) as lab:
        talks = [lab.start(request) for request in mixture(answers, 3, 60)]
        lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(1))
        assert not any(talk.is_over for talk in talks)
        for talk in talks:
            assert talk.result() == answers.answer(talk.request)
        lab.wait_quiet()

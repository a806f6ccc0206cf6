"""Checkpoints in every quantised form in three stages: the tokens are one process's, also when a stage is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.models.requests import greedy, mixture, prompts, sampled
from support.models.tiny import save_tiny
from support.models.tiny_checkpoint import save_tiny_llama
from support.quantised.checkpoint import quantise_folder
from support.swarm.lab import Alone, open_alone, swarm

KEPT = ("gptq8", "gptq4-v2", "int8", "int8-packed", "fp8-rows", "fp8-tensor", "fp4", "modelopt-nvfp4")
# One of each way in which weights lie in a file and are held.
LOST = ("gptq4-ordered", "awq", "int4-asymmetric", "fp8-blocks", "nf4-nested", "bnb-int8", "nvfp4", "mxfp4")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("plain") / "tiny")


def quantised(form: str, plain: Path, folder: Path) -> tuple[Path, int]:
    """A model in this form, and its layers."""
    if form != "mxfp4":
        return quantise_folder(plain, folder, form)[0], 6
    source = save_tiny("gpt-oss", folder / "gpt-oss", 258)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain / name, source)
    return quantise_folder(source, folder, form)[0], 3


@pytest.mark.parametrize("form", KEPT)
def test_three_stages_answer_as_one_process_does(form: str, plain: Path, tmp_path: Path) -> None:
    model, layers = quantised(form, plain, tmp_path)
    with open_alone(model) as service:
        answers = Alone(service)
        texts = prompts(service.tokenizer)
        requests = [kind(text, 8) for kind in (greedy, sampled) for text in texts[:3]]
        with swarm(tmp_path, model, layers=(layers // 3,) * 3, stages=3) as lab:
            talks = [lab.start(request) for request in requests]
            assert [talk.result() for talk in talks] == [answers.answer(request) for request in requests]


@pytest.mark.parametrize("form", LOST)
def test_a_lost_stage_goes_on_at_its_standby(form: str, plain: Path, tmp_path: Path) -> None:
    model, layers = quantised(form, plain, tmp_path)
    with open_alone(model) as service:
        answers = Alone(service)
        room = (layers // 3,) * 6
        with swarm(tmp_path, model, layers=room, stages=3, standbys=3) as lab:
            talks = [lab.start(request) for request in mixture(answers, 3, 60)]
            lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
            lab.kill(lab.stage(1))
            assert not any(talk.is_over for talk in talks)
            for talk in talks:
                assert talk.result() == answers.answer(talk.request)
            lab.wait_quiet()

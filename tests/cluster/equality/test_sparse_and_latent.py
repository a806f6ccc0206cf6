"""Experts and latent attention in a chain of three stages: the tokens of one process, also after a stage is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models.requests import prompts, scored
from support.models.tiny import save_tiny_talker
from support.swarm.lab import SPREAD, Alone, open_alone, swarm


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral"])
def test_the_same_tokens_in_three_stages_and_after_a_loss(tmp_path: Path, tiny: Path, name: str) -> None:
    folder = save_tiny_talker(name, tmp_path / name, tiny)
    with (
        open_alone(folder) as service,
        swarm(tmp_path, folder, layers=(4, 4, 4), stages=3, placing=SPREAD) as lab,
    ):
        alone = Alone(service)
        requests = [scored(prompt, 40) for prompt in prompts(service.tokenizer)[:3]]
        expected = [alone.answer(request) for request in requests]
        assert lab.ask(requests[0]) == expected[0]
        talks = [lab.start(request) for request in requests]
        lab.wait_until(lambda: all(len(talk.tokens) > 4 for talk in talks), "some tokens")
        lab.kill(lab.stage(1))
        assert [talk.result() for talk in talks] == expected

"""A student drafts for its parent: the tokens are those of no draft at all, and some of its own are among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from shardcompute.core.generation import Speculation
from shardcompute.core.settings import Settings
from shardcompute.draft_training.student.shape import plan_student
from shardcompute.draft_training.student.student_folder import StudentFolder
from shardcompute.draft_training.student.student_net import new_student
from shardcompute.draft_training.teacher import CheckpointEnds, Teacher
from shardcompute.node.driver.draft_model import drafters_from
from support.models.requests import greedy, prompts, sampled
from support.swarm.lab import SPREAD, Alone, open_tiny, swarm

TOKENS = 24
WISHES = (Speculation("model", 3, 2), Speculation("model", 4, 1), Speculation("model"), Speculation())


@pytest.fixture
def student(tiny: Path, tmp_path: Path) -> Path:
    """Of all its layers but one, untaught: often right, and often not."""
    folder = tmp_path / "student"
    with open_tiny(tiny) as parent:
        net = new_student(plan_student(parent.spec, (0, 1, 2, 4, 5)), parent, torch.device("cpu"))
        teacher = Teacher(CheckpointEnds(parent), "cpu", context_length=64, sessions=1, threads=1)
        frozen = teacher.frozen_weights(np.arange(parent.spec.vocab_size, dtype=np.int32))
        StudentFolder(folder).write(net, frozen, parent, {})
    return folder


def test_a_student_changes_no_token_of_its_parent(
    tiny: Path, alone: Alone, student: Path, tmp_path: Path
) -> None:
    texts = prompts(alone.service.tokenizer)
    requests = [kind(prompt, TOKENS) for prompt in texts[:4] for kind in (greedy, sampled)]
    with swarm(
        tmp_path / "swarm",
        tiny,
        layers=(4, 4, 4),
        kv_tokens=8192,
        stages=3,
        placing=SPREAD,
        open_drafters=drafters_from(str(student), Settings(data_dir=tmp_path), 512),
    ) as lab:
        talks = [
            (request, lab.start(replace(request, speculation=WISHES[turn // 2])))
            for turn, request in enumerate(requests)
        ]
        for request, talk in talks:
            assert talk.result() == alone.answer(request)
        accepted = [talk.timings.accepted_tokens for _, talk in talks[:4] if talk.timings is not None]
        assert sum(accepted) > 0
        lab.wait_quiet()

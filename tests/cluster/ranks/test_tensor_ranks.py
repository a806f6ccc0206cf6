"""Machines that compute each layer together: clients get what one process would have given them, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.control.placement.parallelism import AUTO
from support.models.requests import greedy, mixture, prompts
from support.swarm.grids import Grid, reshape
from support.swarm.lab import Alone, LabSwarm, swarm

GRIDS: dict[str, Grid] = {
    "2 ranks": [[1, 1]],
    "3 ranks": [[1, 1, 1]],
    "unequal ranks": [[3, 1]],
    "2 ranks, 2 stages": [[1, 1], [1, 1]],
    "one machine, then 2 ranks": [[1], [1, 1]],
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[LabSwarm]:
    with swarm(tmp_path_factory.mktemp("swarm"), tiny, layers=(12, 12, 12, 12), parallel=AUTO) as lab:
        yield lab


@pytest.mark.parametrize("name", GRIDS)
def test_same_tokens(lab: LabSwarm, alone: Alone, name: str) -> None:
    stages = reshape(lab, GRIDS[name])
    requests = [*mixture(alone, 6, 12), *(greedy(each) for each in prompts(alone.service.tokenizer)[:4])]
    talks = [lab.start(request) for request in requests]
    for request, talk in zip(requests, talks, strict=True):
        assert talk.result() == alone.answer(request)
    assert lab.chain().stages == stages, lab.chain().last_move
    lab.wait_quiet()

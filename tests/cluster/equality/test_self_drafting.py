"""A first stage that drafts: the same answers in fewer rounds, also when machines are lost meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.control.sizes import sizes_of
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest, Speculation, Timings
from support.models.requests import mixture
from support.swarm.lab import Alone, Talk, swarm

pytestmark = pytest.mark.usefixtures("bold")
TOKENS, ARRIVED = 40, 5


def drafting(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    return [replace(request, speculation=Speculation("self", tokens=3)) for request in requests]


def timings_of(talk: Talk) -> Timings:
    found = talk._deltas[-1].timings
    assert found is not None
    return found


def test_answers_stay_and_rounds_are_saved(tmp_path: Path, tiny: Path, alone: Alone, heads: Path) -> None:
    requests = mixture(alone, 6, TOKENS)
    with swarm(tmp_path, tiny, layers=(3, 3, 3), draft_heads=heads) as lab:
        assert len(lab.chain().stages) > 1
        talks = [lab.start(request) for request in drafting(requests)]
        assert [talk.result() for talk in talks] == [alone.answer(request) for request in requests]
        assert all(timings_of(talk).drafted_tokens > 0 for talk in talks)
        assert any(timings_of(talk).accepted_tokens > 0 for talk in talks)


@pytest.mark.parametrize("stage", [0, -1], ids=["first", "last"])
def test_a_machine_dies_amid_drafts(
    tmp_path: Path, tiny: Path, alone: Alone, heads: Path, stage: int
) -> None:
    requests = mixture(alone, 4, TOKENS)
    with swarm(tmp_path, tiny, layers=(3, 3, 3, 3, 3, 3), draft_heads=heads) as lab:
        talks = [lab.start(request) for request in drafting(requests)]
        lab.wait_until(lambda: all(len(talk.tokens) >= ARRIVED for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(stage))
        assert [talk.result() for talk in talks] == [alone.answer(request) for request in requests]
        assert all(timings_of(talk).drafted_tokens > 0 for talk in talks)


def test_room_for_the_head_is_planned_and_held(tmp_path: Path, tiny: Path, heads: Path) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3, 3), draft_heads=heads) as lab:
        model = lab.state.models[lab.model].model
        first = lab.chain().stages[0]
        held = next(shard for shard in lab.state.nodes[first.node].shards if shard.start == 0)
        assert model.draft_bytes > model.head_bytes
        assert held.size_bytes == sizes_of(model).memory_bytes(first.start, first.stop)


def test_a_cut_without_a_head_of_its_own_drafts_nothing(
    tmp_path: Path, tiny: Path, alone: Alone, heads: Path
) -> None:
    requests = mixture(alone, 2, 20)
    some = tmp_path / "some"
    shutil.copytree(heads, some)
    for path in some.glob("*/*"):
        if path.stem != "5":  # no machine has room for so many layers
            path.unlink()
    with swarm(tmp_path, tiny, layers=(3, 3, 3), draft_heads=some) as lab:
        talks = [lab.start(request) for request in drafting(requests)]
        assert [talk.result() for talk in talks] == [alone.answer(request) for request in requests]
        assert all(timings_of(talk).drafted_tokens == 0 for talk in talks)


def test_without_fitted_heads_there_is_no_such_drafter(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    requests = mixture(alone, 1, 10)
    with swarm(tmp_path, tiny, layers=(3, 3, 3), draft_heads=tmp_path / "none") as lab:
        assert lab.state.models[lab.model].model.draft_bytes == 0
        assert lab.start(requests[0]).result() == alone.answer(requests[0])
        with pytest.raises(UsageError, match="no drafter 'self'"):
            lab.start(drafting(requests)[0]).result()

"""Loading a model where another is served: it is asked for, and no answer that runs is broken by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.core.errors import CapacityError, UnknownModelError, WouldReplaceError
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from support.models.requests import greedy
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import Alone, swarm
from support.swarm.streams import start_streams


def test_another_form_waits_for_the_answers_that_run(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with (
        swarm(tmp_path, tiny, layers=(8, 8), stages=1) as lab,
        ClusterAdmin(lab.cluster, Settings(data_dir=tmp_path, offline=True)) as admin,
    ):
        talks = start_streams(lab, alone, 2, 200)
        with pytest.raises(
            WouldReplaceError, match="tiny as it is served now, which is answering 2 requests"
        ):
            admin.load_model(str(tiny), "int8")
        assert lab.state.models["tiny"].model.weight_form == "native"
        admin.load_model(str(tiny), "int8", replaces=True)
        lab.wait_until(lambda: "waiting for" in str(admin.state().fetches), "the answers are waited for")
        with pytest.raises(CapacityError, match="takes no new requests"):
            lab.ask(greedy(talks[0].request.prompt, 1))
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        lab.wait_until(
            lambda: lab.state.models["tiny"].model.weight_form == "int8" and lab.is_serving(), lab.describe
        )
        lab.wait_until(lambda: not admin.state().fetches, "the swap is over")
        assert len(lab.ask(greedy(talks[0].request.prompt, 4)).tokens) == 4


def test_a_model_that_needs_the_room_of_another_says_so_and_then_takes_it(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    another = save_tiny_llama(tmp_path / "another", seed=2)
    with (
        swarm(tmp_path, tiny, layers=(7,), stages=1) as lab,
        ClusterAdmin(lab.cluster, Settings(data_dir=tmp_path, offline=True)) as admin,
    ):
        assert admin.plan(str(another)).replaces == ("tiny",)
        talks = start_streams(lab, alone, 2, 100)
        with pytest.raises(WouldReplaceError, match="would replace tiny, which is answering 2 requests"):
            admin.load_model(str(another))
        assert admin.state().fetches == ()
        admin.load_model(str(another), replaces=True)
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        lab.wait_until(lambda: lab.is_serving("another"), lab.describe)
        assert len(lab.ask(greedy(talks[0].request.prompt, 4), "another").tokens) == 4
        with pytest.raises(UnknownModelError):
            lab.ask(greedy(talks[0].request.prompt, 1), "tiny")


def test_a_model_that_fits_beside_replaces_nothing(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    another = save_tiny_llama(tmp_path / "another", seed=2)
    with (
        swarm(tmp_path, tiny, layers=(8, 8), stages=1) as lab,
        ClusterAdmin(lab.cluster, Settings(data_dir=tmp_path, offline=True)) as admin,
    ):
        assert admin.plan(str(another)).replaces == ()
        [talk] = start_streams(lab, alone, 1, 100)
        admin.load_model(str(another), replaces=True)
        lab.wait_until(lambda: lab.is_serving("another") and lab.is_serving(), lab.describe)
        assert talk.result() == alone.answer(talk.request)

"""Adapters in a swarm: every stage has those of its own layers; answers are one process's, also when one is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.errors import UnknownModelError, UsageError, WouldReplaceError
from shardcompute.core.generation import GenerationRequest
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from support.models.requests import greedy, prompts, sampled
from support.models.tiny_checkpoint import save_tiny_llama
from support.quantised.checkpoint import quantise_folder
from support.swarm.lab import SPREAD, Alone, LabSwarm, Talk, open_alone, swarm
from support.tiny_adapter import save_adapter

CHOICES = ("", "calm", "wild")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("plain") / "tiny")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "wild": save_adapter(base, folder / "wild", seed=1, size=1.0),
        "calm": save_adapter(base, folder / "calm", seed=2, rank=3, layers=(0, 3, 5)),
    }


@pytest.fixture(scope="module")
def alone(base: Path, adapters: dict[str, Path]) -> Iterator[Alone]:
    with open_alone(base, adapters=adapters) as service:
        yield Alone(service)


def start(lab: LabSwarm, request: GenerationRequest) -> Talk:
    """A request as clients make it: the adapter is part of the model's name."""
    name = f"{lab.model}:{request.adapter}" if request.adapter else lab.model
    return lab.start(replace(request, adapter=""), name)


def questions(alone: Alone, tokens: int) -> list[GenerationRequest]:
    texts = prompts(alone.service.tokenizer)
    kinds = [kind(texts[0], tokens) for kind in (greedy, sampled)]
    return [replace(request, adapter=adapter) for adapter in CHOICES for request in kinds]


def test_adapters_change_answers(alone: Alone) -> None:
    greedy_ones = questions(alone, 12)[::2]
    assert len({alone.answer(request).text for request in greedy_ones}) == len(CHOICES)


def test_three_stages_answer_as_one_process_does(
    base: Path, adapters: dict[str, Path], alone: Alone, tmp_path: Path
) -> None:
    requests = questions(alone, 12)
    with swarm(tmp_path, base, layers=(2, 2, 2), stages=3, adapters=adapters) as lab:
        assert [each.name for each in lab.cluster.pool.models()] == ["tiny", "tiny:calm", "tiny:wild"]
        # Again, when what was computed before is kept: a prefix of another adapter must not be taken for it.
        for _ in range(2):
            talks = [start(lab, request) for request in requests]
            assert [talk.result() for talk in talks] == [alone.answer(request) for request in requests]
        with pytest.raises(UnknownModelError, match="not served here"):
            lab.ask(requests[0], "tiny:other")


def test_a_lost_stage_goes_on_with_each_session_s_adapter(
    base: Path, adapters: dict[str, Path], alone: Alone, tmp_path: Path
) -> None:
    requests = questions(alone, 60)
    for lost in (0, 1, 2):
        folder = tmp_path / str(lost)
        with swarm(folder, base, layers=(2,) * 6, stages=3, standbys=3, adapters=adapters) as lab:
            talks = [start(lab, request) for request in requests]
            lab.wait_until(lambda: all(len(each.tokens) >= 5 for each in talks), "tokens of all streams")  # noqa: B023
            lab.kill(lab.stage(lost))
            for talk, request in zip(talks, requests, strict=True):
                assert talk.result() == alone.answer(request)


def test_a_prefix_of_another_adapter_is_not_reused(
    base: Path, adapters: dict[str, Path], alone: Alone
) -> None:
    text = prompts(alone.service.tokenizer)[0] * 4
    with open_alone(base, adapters=adapters) as service:
        cached = []
        for adapter in ("wild", "calm", "wild"):
            *_, last = service.stream(replace(greedy(text, 4), adapter=adapter))
            assert last.timings is not None
            cached.append(last.timings.cached_tokens)
    assert cached[0] == cached[1] == 0 < cached[2]


def test_an_adapter_that_is_not_there_is_refused(alone: Alone) -> None:
    request = replace(greedy(prompts(alone.service.tokenizer)[0], 4), adapter="other")
    with pytest.raises(UsageError, match="no adapter 'other'"):
        list(alone.service.stream(request))


def sent_bytes(lab: LabSwarm) -> int:
    """Of weights and what travels beside them, by the coordinator."""
    return sum(lab.cluster.weights_sent_bytes().values())


def test_adapters_come_and_go_while_a_cluster_runs(
    base: Path, adapters: dict[str, Path], alone: Alone, tmp_path: Path
) -> None:
    """Workers that have the weights fetch the adapters alone; what was asked for is remembered."""
    folders = {name: str(folder) for name, folder in adapters.items()}
    requests = questions(alone, 12)
    settings = Settings(data_dir=tmp_path, offline=True)

    def check(admin: ClusterAdmin, *names: str) -> None:
        lab.wait_until(lambda: not admin.state().fetches, lab.describe)
        known = ["tiny", *(f"tiny:{name}" for name in names)]
        lab.wait_until(lambda: [each.name for each in lab.cluster.pool.models()] == known, lab.describe)
        lab.wait_serving(stages=3)
        chosen = [request for request in requests if request.adapter in ("", *names)]
        talks = [start(lab, request) for request in chosen]
        assert [talk.result() for talk in talks] == [alone.answer(request) for request in chosen]

    with swarm(tmp_path, base, layers=(4, 4, 4), stages=3, placing=SPREAD) as lab:
        with ClusterAdmin(lab.cluster, settings) as admin:
            check(admin)
            before_bytes, fingerprint = sent_bytes(lab), lab.cluster._files._served["tiny"].card.fingerprint
            with pytest.raises(WouldReplaceError, match="tiny as it is served now"):
                admin.load_model(str(base), adapters={"wild": folders["wild"]})
            admin.load_model(str(base), adapters={"wild": folders["wild"]}, replaces=True)
            check(admin, "wild")
            card = lab.cluster._files._served["tiny"].card
            added = [name for layer in range(6) for name in card.layer_adapters(layer)]
            assert card.fingerprint == fingerprint
            assert sent_bytes(lab) - before_bytes == sum(card.entries[name].size_bytes for name in added)
            admin.load_model(str(base), adapters={"calm": folders["calm"]}, replaces=True)
            check(admin, "calm", "wild")
            admin.load_model(str(base))
            check(admin, "calm", "wild")
            after_bytes = sent_bytes(lab)
            admin.unload_model("tiny:wild")
            check(admin, "calm")
            assert sent_bytes(lab) == after_bytes, "all of that was there"
            with pytest.raises(UnknownModelError, match="not served here"):
                admin.unload_model("tiny:wild")
        lab.kill_cluster()
        lab.open_cluster()
        with ClusterAdmin(lab.cluster, settings) as admin:
            admin.restore()
            check(admin, "calm")


@pytest.mark.parametrize("form", ["gptq4-asymmetric", "awq", "fp8-blocks", "nf4-nested"])
def test_adapters_beside_a_quantised_base(
    base: Path, adapters: dict[str, Path], form: str, tmp_path: Path
) -> None:
    model, dequantised = quantise_folder(base, tmp_path, form)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, dequantised)
    with open_alone(model, adapters=adapters) as service, open_alone(dequantised, adapters=adapters) as plain:
        alone = Alone(service)
        requests = questions(alone, 12)
        expected = [alone.answer(request) for request in requests]
        assert len({answer.text for answer in expected[::2]}) == len(CHOICES), "adapters change answers"
        # The first token has nothing to add up differently from: what is added is what is added to the plain base.
        firsts = [answer.tokens[0].id for answer in expected[::2]]
        assert firsts == [Alone(plain).answer(request).tokens[0].id for request in requests[::2]]
        with swarm(tmp_path, model, layers=(2, 2, 2), stages=3, adapters=adapters) as lab:
            talks = [start(lab, request) for request in requests]
            assert [talk.result() for talk in talks] == expected

"""Seeing models in a swarm: three stages answer as one process does, beside text, and when one of them is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest

from shardcompute.backends.matrix import Float32
from shardcompute.backends.ort.tower import OrtTower
from shardcompute.core.generation import GenerationRequest, Grammar, Speculation
from shardcompute.core.pictures import PictureSpan
from shardcompute.node.rpc.session_ids import namespace_of
from shardcompute.weights import held
from support.models.requests import SAMPLED, greedy, prompts
from support.seeing.talker import ask_about, save_seeing_talker
from support.swarm.lab import Alone, Answer, open_alone, swarm

FAMILIES = ("gemma3", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen2_5_vl", "qwen2_vl")))
"""The last one's way through a chain is that of the one before."""


@dataclass(frozen=True)
class Seeing:
    family: str
    model: Path
    alone: Alone

    def questions(self, tokens: int) -> list[GenerationRequest]:
        """With pictures of odd sizes, one and several, and text alone."""
        service = self.alone.service
        text = prompts(service.tokenizer)[0]
        return [
            ask_about(service, "What is ", (61, 90), "?", tokens=tokens),
            ask_about(service, (120, 57), "or", (40, 200), "!", tokens=tokens, seed=3, sampling=SAMPLED),
            greedy(text, tokens),
            replace(greedy(text, tokens), sampling=SAMPLED),
        ]


@pytest.fixture(scope="module", autouse=True)
def _small_towers() -> Iterator[None]:
    """Towers are counted with memory for large pictures, beside which tiny layers are nothing: a machine with room for
    two of them and a tower would hold them all."""
    with mock.patch.object(held, "tower_scratch_bytes", return_value=0):
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    model = save_seeing_talker(request.param, tmp_path_factory.mktemp(request.param) / "eyes")
    with open_alone(model) as service:
        yield Seeing(request.param, model, Alone(service))


def test_what_is_seen_changes_the_answer(seeing: Seeing) -> None:
    service = seeing.alone.service
    asked = [ask_about(service, "What is ", (61, 90), "?", seed=seed) for seed in (0, 1)]
    assert asked[0].prompt == asked[1].prompt
    one, other = (seeing.alone.answer(each) for each in asked)
    assert one != other


def test_three_stages_answer_as_one_process_does(seeing: Seeing, tmp_path: Path) -> None:
    requests = seeing.questions(12)
    drafted = [replace(each, speculation=Speculation("ngram", tokens=3)) for each in requests[:2]]
    grammar = Grammar("regex", "[a-z ]{4,12}")
    formed = replace(requests[0], sampling=replace(SAMPLED, grammar=grammar))
    with swarm(tmp_path, seeing.model, layers=(2, 2, 2), stages=3) as lab:
        assert lab.cluster.pool.models()[0].vision is not None
        # Again, when what was computed before is kept: another picture's rows must not be taken for these.
        for seed in (0, 7, 0):
            about = ask_about(seeing.alone.service, "What is ", (61, 90), "?", tokens=12, seed=seed)
            talks = [lab.start(request) for request in (about, *requests, *drafted, formed)]
            answers = [talk.result() for talk in talks]
            assert answers == [seeing.alone.answer(talk.request) for talk in talks]
        lab.wait_quiet()


def test_other_drivers_show_pictures_too(seeing: Seeing, tmp_path: Path) -> None:
    """One on a machine of its own, and one that a worker hosts because the coordinator is far away."""
    requests = seeing.questions(12)
    with swarm(tmp_path / "near", seeing.model, layers=(2, 2, 2), stages=3) as lab:
        driver = lab.add_driver()
        lab.wait_driving(driver)
        talks = [lab.start(request, driver=driver) for request in requests]
        assert [talk.result() for talk in talks] == [seeing.alone.answer(request) for request in requests]
        assert driver.pool.models()[0].vision == lab.cluster.pool.models()[0].vision
    with swarm(tmp_path / "far", seeing.model, layers=(2, 2, 2), stages=3, home_rtt_s=0.1) as lab:
        host = lab.wait_hosted()
        talks = [lab.start(request) for request in requests]
        assert [talk.result() for talk in talks] == [seeing.alone.answer(request) for request in requests]
        sessions = [int(view.session) for view in lab.cluster.pool.requests.views()]
        assert {namespace_of(each) for each in sessions} == {host.hosted.session_namespace}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_stage_is_shown_what_it_has_to_see(seeing: Seeing, tmp_path: Path, lost: int) -> None:
    requests = seeing.questions(60)
    with swarm(tmp_path, seeing.model, layers=(2,) * 6, stages=3, standbys=3) as lab:
        talks = [lab.start(request) for request in requests]
        lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(lost))
        for talk in talks:
            assert talk.result() == seeing.alone.answer(talk.request)
        lab.wait_quiet()


def test_a_conversation_about_a_picture_is_not_computed_twice(seeing: Seeing, tmp_path: Path) -> None:
    with swarm(tmp_path, seeing.model, layers=(2, 2, 2), stages=3) as lab:
        first = ask_about(seeing.alone.service, "What is ", (61, 90), "? " + "Look closely! " * 3, tokens=8)
        answered = lab.start(first).result()
        more = (*first.prompt, *(choice.id for choice in answered.tokens), *first.prompt[:5])
        talk = lab.start(replace(first, prompt=more))
        assert talk.result() == seeing.alone.answer(talk.request)
        assert talk.timings is not None
        assert talk.timings.cached_tokens >= first.pictures[0].span.stop


def test_others_are_answered_while_a_tower_looks(seeing: Seeing, tmp_path: Path) -> None:
    """In a swarm with the first family, in one process with the others."""
    shown, *_, talking = seeing.questions(12)
    expected = [seeing.alone.answer(request) for request in (shown, talking)]
    may_look, encode = threading.Event(), OrtTower.encode
    looked_at: list[bytes] = []

    def look(tower: OrtTower, span: PictureSpan, patches: bytes) -> Float32:
        assert may_look.wait(60)
        looked_at.append(patches)
        return encode(tower, span, patches)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(OrtTower, "encode", look))
        ask: Callable[[GenerationRequest], Answer]
        if seeing.family == FAMILIES[0]:
            ask = stack.enter_context(swarm(tmp_path, seeing.model, layers=(2, 2, 2), stages=3)).ask
        else:
            ask = Alone(stack.enter_context(open_alone(seeing.model))).answer
        callers = stack.enter_context(ThreadPoolExecutor(2))
        looking = callers.submit(ask, shown)
        assert callers.submit(ask, talking).result(60) == expected[1]
        assert not looking.done()
        may_look.set()
        assert looking.result(60) == expected[0]
        again = replace(shown, prompt=(*shown.prompt, 65))
        assert callers.submit(ask, again).result(60) == seeing.alone.answer(again)
    assert looked_at == [shown.pictures[0].patches], "the same picture is looked at once"

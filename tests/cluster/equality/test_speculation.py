"""Drafts never change a token: whatever drafts, however many, however often wrong, and when machines die."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.generation import GenerationRequest, Speculation
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.admin.view_builder import view_chains
from support.models.drafters import Oracle
from support.models.requests import greedy, mixture, prompts, sampled
from support.swarm.lab import SPREAD, Alone, LabSwarm, swarm

ROOMS = {3: (4, 4, 4), 5: (4, 1, 1, 1, 1)}
DEPTHS = [(1, 1), (2, 3), (5, 1), (4, 2), (8, 4), (16, 8)]
EVERY_DEPTH = list(itertools.product(range(1, 17), range(1, 9)))
AT_ONCE = 8
TOKENS = 24


class Conformance:
    """What is right, and a drafter that mixes it with mistakes."""

    def __init__(self, alone: Alone) -> None:
        self.alone = alone
        self.requests: dict[tuple[int, ...], GenerationRequest] = {}

    def ask(self, request: GenerationRequest, wish: Speculation) -> GenerationRequest:
        self.requests[request.prompt] = request
        return replace(request, speculation=wish)

    def answer(self, prompt: tuple[int, ...]) -> list[int]:
        return [choice.id for choice in self.alone.answer(self.requests[prompt]).tokens]

    def open_drafters(self, tokenizer: Tokenizer, vocab_size: int) -> Sequence[Oracle]:
        return [Oracle(self.answer, lambda position: position % 7 in (3, 5), vocabulary=vocab_size)]


@pytest.fixture(scope="module")
def conformance(alone: Alone) -> Conformance:
    return Conformance(alone)


@pytest.fixture(scope="module", params=ROOMS, ids=lambda count: f"{count} stages")
def lab(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny: Path,
    conformance: Conformance,
    heads: Path,
    bold: None,
) -> Iterator[LabSwarm]:
    folder = tmp_path_factory.mktemp("swarm")
    with swarm(
        folder,
        tiny,
        layers=ROOMS[request.param],
        kv_tokens=8192,
        stages=request.param,
        placing=SPREAD,
        open_drafters=conformance.open_drafters,
        draft_heads=heads,
    ) as lab:
        yield lab
        lab.wait_quiet()


def assert_same(
    lab: LabSwarm,
    conformance: Conformance,
    requests: Sequence[GenerationRequest],
    wishes: Sequence[Speculation],
) -> None:
    """All requests, a few at a time, each with the next of the wishes."""
    wished = list(zip(requests, itertools.cycle(wishes), strict=False))
    for first in range(0, len(wished), AT_ONCE):
        batch = wished[first : first + AT_ONCE]
        talks = [(request, lab.start(conformance.ask(request, wish))) for request, wish in batch]
        for request, talk in talks:
            assert talk.result() == conformance.alone.answer(request)


def test_the_cluster_knows_which_drafters_are_at_work(lab: LabSwarm) -> None:
    """The last stage tells of its draft head with heartbeats; all others have none to tell of."""

    def at_work() -> dict[str, str]:
        (chain,) = view_chains(lab.state, 0.0, {}, {}, {"tiny": ""})
        return {each.drafter: each.state for each in chain.drafters}

    everyone = dict.fromkeys(("ngram", "head", "model"), "at work")
    lab.wait_until(lambda: at_work() == everyone, lambda: f"all drafters at work: {at_work()}")
    last = lab.chain().stages[-1].node
    assert [node.id for node in lab.state.nodes.values() if node.draft_heads] == [last]


@pytest.mark.parametrize("kind", [greedy, sampled])
@pytest.mark.parametrize("drafter", ["ngram", "model", "head", "auto"])
def test_every_drafter_at_several_depths(
    lab: LabSwarm,
    conformance: Conformance,
    drafter: str,
    kind: Callable[[Sequence[int], int], GenerationRequest],
) -> None:
    requests = [kind(prompt, TOKENS) for prompt in prompts(conformance.alone.service.tokenizer)]
    wishes = [Speculation(drafter, tokens, frames) for tokens, frames in DEPTHS]  # type: ignore[arg-type]
    if drafter == "auto":
        wishes = [Speculation()]
    assert_same(lab, conformance, requests, wishes)


@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.ci)]
)
@pytest.mark.parametrize("kind", [greedy, sampled])
@pytest.mark.parametrize("drafter", ["ngram", "model", "head"])
def test_every_drafter_at_every_depth(
    lab: LabSwarm,
    conformance: Conformance,
    drafter: str,
    kind: Callable[[Sequence[int], int], GenerationRequest],
    every: int,
) -> None:
    """All pairs of depths, or each seventh of them: those have every number of tokens and of frames among them."""
    texts = prompts(conformance.alone.service.tokenizer)
    depths = EVERY_DEPTH[::every]
    assert {tokens for tokens, _ in depths} == set(range(1, 17))
    assert {frames for _, frames in depths} == set(range(1, 9))
    wishes = [Speculation(drafter, tokens, frames) for tokens, frames in depths]  # type: ignore[arg-type]
    requests = [kind(texts[i % len(texts)], TOKENS) for i in range(len(wishes))]
    assert_same(lab, conformance, requests, wishes)


def test_log_probabilities_stop_strings_and_penalties(lab: LabSwarm, conformance: Conformance) -> None:
    requests = mixture(conformance.alone, 12, TOKENS)
    wishes = [Speculation("model", 4, 2), Speculation("head", 4)]
    assert_same(lab, conformance, requests, wishes)


def test_right_drafts_save_traversals(lab: LabSwarm, conformance: Conformance) -> None:
    request = greedy(prompts(conformance.alone.service.tokenizer)[0], TOKENS)
    talk = lab.start(conformance.ask(request, Speculation("model", 4, 1)))
    assert talk.result() == conformance.alone.answer(request)
    timings = talk.timings
    assert timings is not None
    assert 0 < timings.accepted_tokens < timings.drafted_tokens
    assert timings.traversals < TOKENS - 1
    assert timings.traversal.received_bytes > 0
    assert timings.traversal.codecs == ("exact",)


def test_the_last_stage_drafts(lab: LabSwarm, conformance: Conformance) -> None:
    request = greedy(prompts(conformance.alone.service.tokenizer)[0], TOKENS)

    def drafted() -> bool:
        talk = lab.start(conformance.ask(request, Speculation("head", 4)))
        assert talk.result() == conformance.alone.answer(request)
        return talk.timings is not None and talk.timings.drafted_tokens > 0

    # Its draft head comes after its layers.
    lab.wait_until(drafted, "drafts of the last stage")


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("drafter", ["model", "head", "ngram"])
def test_a_machine_dies_while_drafts_are_on_their_way(
    tmp_path: Path,
    tiny: Path,
    conformance: Conformance,
    heads: Path,
    bold: None,
    stage: int,
    drafter: str,
) -> None:
    with swarm(
        tmp_path,
        tiny,
        layers=(4, 4, 4),
        stages=3,
        placing=SPREAD,
        open_drafters=conformance.open_drafters,
        draft_heads=heads,
    ) as lab:
        requests = mixture(conformance.alone, 4, 120)
        wish = Speculation(drafter, 4, 3)  # type: ignore[arg-type]
        talks = [(request, lab.start(conformance.ask(request, wish))) for request in requests]
        lab.wait_until(lambda: all(talk.tokens for _, talk in talks), "tokens of all streams")
        lab.kill(lab.stage(stage))
        for request, talk in talks:
            assert talk.result() == conformance.alone.answer(request)
        lab.wait_quiet()

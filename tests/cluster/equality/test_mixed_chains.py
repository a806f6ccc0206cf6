"""Stages of several backends in one chain: what their exactness classes declare holds, also when one kind is lost and
another takes over in the middle of an answer."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from shardcompute.backends.exactness import chain_tolerance, parse_class
from shardcompute.backends.llamacpp.library import installed_version
from shardcompute.control.explain import classes_of
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.node.admin.view_builder import view_chains
from support.models.requests import greedy, prompts, scored
from support.models.tiny_gguf import save_tiny_text_gguf
from support.swarm.lab import Alone, LabSwarm, LabWorker, open_alone, swarm

INSTALLED = tuple(
    name for name in ("onnx", "torch", "mlx") if name == "onnx" or importlib.util.find_spec(name) is not None
)
LOGIT_NORM = 2 * math.sqrt(258)
"""Of a row of the tiny model's logits: of about 2, one for each of its tokens."""
TOKENS, ARRIVED = 100, 5

needs_two = pytest.mark.skipif(len(INSTALLED) < 2, reason="neither torch nor mlx is installed")


def backends_of(lab: LabSwarm) -> list[str]:
    return [lab.state.nodes[node].backend for node in lab.chain().nodes]


def classes(lab: LabSwarm) -> list[str]:
    return classes_of(lab.state, lab.chain().nodes, lab.state.models[lab.chain().model].model)


def assert_within_class(lab: LabSwarm, alone: Alone, request: GenerationRequest) -> None:
    """Teacher forcing: one process is given the chain's own answer and finds each of its tokens as likely."""
    answer = lab.ask(request)
    assert len(answer.tokens) == request.max_tokens
    given = request.prompt + tuple(choice.id for choice in answer.tokens)
    forced = alone.answer(GenerationRequest(given, 1, Sampling(), prompt_logprobs=1)).prompt
    # Every logit may be off by the tolerance of its row's norm, and so may the sum of all.
    limit = 2 * LOGIT_NORM * chain_tolerance([*classes(lab), alone_class(lab)], "float32")
    for ours, theirs in zip((*answer.prompt, *answer.tokens), forced, strict=True):
        assert ours.id == theirs.id
        if ours.logprob is not None and theirs.logprob is not None:
            assert abs(ours.logprob - theirs.logprob) <= limit


def alone_class(lab: LabSwarm) -> str:
    """That of the ONNX stage: one process computes like it."""
    return next(name for name in classes(lab) if name.startswith("onnx-"))


@needs_two
def test_a_chain_of_all_kinds_stays_within_its_declared_classes(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    rooms = (2, 2, 2) if len(INSTALLED) == 3 else (3, 3)
    with swarm(tmp_path, tiny, layers=rooms, backends=INSTALLED, stages=len(INSTALLED)) as lab:
        assert sorted(backends_of(lab)) == sorted(INSTALLED)
        assert len(set(classes(lab))) == len(INSTALLED)
        assert all(parse_class(name) is not None for name in classes(lab))
        (view,) = view_chains(lab.state, 0.0, {})
        assert view.is_mixed
        assert view.exactness.startswith(f"mixes {len(INSTALLED)} exactness classes")
        texts = prompts(alone.service.tokenizer)
        for prompt in texts[:6]:
            # Without penalties, which what is forced upon a model does not have.
            for sampling in (Sampling(logprobs=1), Sampling(temperature=0.9, seed=5, logprobs=1)):
                request = GenerationRequest(prompt, 24, sampling, prompt_logprobs=1)
                assert_within_class(lab, alone, request)
        talks = [lab.start(greedy(prompt, 24)) for prompt in texts]
        for talk in talks:
            assert len(talk.result().tokens) == 24
        lab.wait_quiet()


@needs_two
def test_a_chain_of_one_kind_is_of_one_class_and_answers_the_same_however_it_is_cut(
    tmp_path: Path, tiny: Path
) -> None:
    backend = INSTALLED[-1]
    answers = []
    for count, rooms in ((2, (3, 3)), (3, (2, 2, 2))):
        with swarm(
            tmp_path / str(count), tiny, layers=rooms, backends=(backend,) * count, stages=count
        ) as lab:
            assert len(set(classes(lab))) == 1
            (view,) = view_chains(lab.state, 0.0, {})
            assert not view.is_mixed
            # One at a time: this class promises equal bits for equal steps.
            texts = prompts(lab.cluster.pool.codec(lab.model))
            answers.append([lab.ask(scored(prompt, 16)) for prompt in texts[:4]])
    assert answers[0] == answers[1]


@needs_two
@pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")
def test_llama_cpp_among_the_others(tmp_path: Path) -> None:
    """All kinds that are here, over a file in 8-bit blocks, which some of them multiply with rounded activations."""
    model = save_tiny_text_gguf(tmp_path)
    kinds = (*INSTALLED, "llamacpp")
    rooms = (2, 2, 1, 1) if len(kinds) == 4 else (2, 2, 2)
    with (
        open_alone(model) as service,
        swarm(tmp_path, model, layers=rooms, backends=kinds, stages=len(kinds)) as lab,
    ):
        assert sorted(backends_of(lab)) == sorted(kinds)
        assert len(set(classes(lab))) == len(kinds)
        limit = chain_tolerance([*classes(lab), alone_class(lab)], "native")
        alone, apart = Alone(service), []
        for prompt in prompts(service.tokenizer)[:4]:
            answer = lab.ask(GenerationRequest(prompt, 24, Sampling(logprobs=1)))
            given = prompt + tuple(choice.id for choice in answer.tokens)
            forced = alone.answer(GenerationRequest(given, 1, Sampling(), prompt_logprobs=1)).prompt
            apart += [
                (ours.logprob or 0.0) - (theirs.logprob or 0.0)
                for ours, theirs in zip(answer.tokens, forced[-len(answer.tokens) :], strict=True)
            ]
        # In the mean a logit is off by the tolerance of its row's spread, and so may the sum of all be.
        spread = LOGIT_NORM / math.sqrt(258)
        assert 0.0 < math.sqrt(sum(each * each for each in apart) / len(apart)) <= 2 * limit * spread
        lab.wait_quiet()


def add_spare(lab: LabSwarm, backend: str) -> LabWorker:
    """A machine of this kind that stands by for whoever is lost."""
    spare = lab.add_worker(2, backend=backend)
    lab.wait_until(
        lambda: spare.node in lab.state.nodes and lab.state.nodes[spare.node].status == "ready",
        lambda: f"the spare machine: {lab.describe()}",
    )
    return spare


def kill_stage(lab: LabSwarm, backend: str) -> None:
    stage = next(node for node in lab.chain().nodes if lab.state.nodes[node].backend == backend)
    lab.kill(lab.worker(stage))


@pytest.mark.parametrize(("lost", "by"), [("torch", "mlx"), ("mlx", "onnx"), ("onnx", "torch")])
def test_another_kind_takes_over_in_the_middle_of_an_answer(
    lost: str, by: str, tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    for name in {lost, by} - {"onnx"}:
        pytest.importorskip(name)
    kept = next(name for name in ("onnx", "torch", "mlx") if name != lost)
    request = greedy(prompts(alone.service.tokenizer)[1], TOKENS)
    with swarm(tmp_path, tiny, layers=(2, 2, 2), backends=(lost, kept, "onnx"), stages=3) as lab:
        spare, before = add_spare(lab, by), set(classes(lab))
        talk = lab.start(request)
        lab.wait_until(lambda: len(talk.tokens) >= ARRIVED, "some tokens")
        kill_stage(lab, lost)
        given = [choice.id for choice in talk.tokens]
        assert not talk.is_over
        tokens = [choice.id for choice in talk.result().tokens]
        assert talk.error is None
        assert len(tokens) == TOKENS
        assert tokens[: len(given)] == given
        lab.wait_until(lambda: spare.node in lab.chain().nodes, lambda: f"the spare serves: {lab.describe()}")
        assert by in backends_of(lab)
        # Replayed from what the others hold, not begun anew.
        resumption = lab.activations[-1].resumption
        assert resumption is not None
        assert resumption.lengths
        assert set(classes(lab)) != before or by in (kept, "onnx")
        # What came after is what the chain as it is now says to the tokens that were given.
        for cut in (len(given), (len(given) + TOKENS) // 2):
            rest = lab.ask(greedy(request.prompt + tuple(tokens[:cut]), TOKENS - cut))
            assert [choice.id for choice in rest.tokens] == tokens[cut:]
        lab.wait_quiet()

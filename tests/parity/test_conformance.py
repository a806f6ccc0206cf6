"""The same tokens, and the same bits, however the work is arranged: on the real model, in three weight forms.

What a request answers is fixed by the request alone. Here every arrangement that the engine knows (alone, in
company, in chunks, cut into stages, verifying several tokens at once, starting again for want of memory) must
give the answer of the plain run, with its log-probabilities, to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array, Float32
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.errors import CapacityError
from shardcompute.core.generation import GenerationRequest, Sampling, TokenChoice
from shardcompute.core.settings import Settings
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.models.spec import cut
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape, DriverLimits
from shardcompute.node.local.chain import LocalChain
from shardcompute.node.local.service import LocalService
from shardcompute.node.service import ServedModel
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.stage import PendingFrame, StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.prompts import PROMPTS

FORMS = ("native", "int8", "float32")
TOKENS = 10
LAYERS = 30
PAGE_BYTES = PAGE_TOKENS * LAYERS * 2 * 3 * 64 * 4
OPTIONS = ExecutorOptions(kv_bytes=60 * PAGE_BYTES, context_length=512, max_rows=512, max_logit_rows=256)
SAMPLINGS = {
    "greedy": Sampling(logprobs=2),
    "sampled": Sampling(temperature=0.8, top_p=0.95, seed=1234, logprobs=2),
}


@dataclass(frozen=True)
class Answer:
    """All that a caller is told: tokens with log-probabilities, the prompt's own, and the text."""

    tokens: tuple[TokenChoice, ...]
    prompt: tuple[TokenChoice, ...]
    text: str


@dataclass
class Model:
    """The real model in one weight form; executors are opened as they are needed and shared by the tests."""

    form: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    requests: Mapping[str, GenerationRequest]
    _open: dict[int, list[Executor]] = field(default_factory=dict)

    def whole(self) -> Executor:
        return self.stages(1)[0]

    def stages(self, count: int) -> list[Executor]:
        if count not in self._open:
            # The shape's KV is per stage; a stage's own share is counted by its layers.
            self._open[count] = [
                open_shard(self.checkpoint, stage=stage, form=self.form, options=OPTIONS)
                for stage in cut(self.checkpoint.spec, count)
            ]
        return self._open[count]

    def close(self) -> None:
        for executor in itertools.chain.from_iterable(self._open.values()):
            executor.close()


def _requests(tokenizer: Tokenizer) -> dict[str, GenerationRequest]:
    """Short, long, and two that grow over the edge of a page while they answer, these also sampled: eight in all. One
    in two of the greedy ones scores its prompt."""
    ids = {prompt.name: prompt.encode(tokenizer) for prompt in PROMPTS}
    prompts = {
        "capital": ids["capital"],
        "japanese": ids["japanese"],
        "one-letter": ids["one-letter"],
        "long": ids["lighthouse"][:140],
        "edge-1": ids["lighthouse"][:60],
        "edge-2": ids["ledger"][:58],
    }
    return {
        f"{name} {kind}": GenerationRequest(
            prompt, TOKENS, sampling, prompt_logprobs=1 if kind == "greedy" and number % 2 else None
        )
        for number, (name, prompt) in enumerate(prompts.items())
        for kind, sampling in SAMPLINGS.items()
        if kind == "greedy" or name.startswith("edge")
    }


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[Model]:
    files = resolve(parse_reference(str(smollm2_gguf)), Settings(data_dir=smollm2_gguf.parent))
    with open_checkpoint(files) as checkpoint:
        tokenizer = checkpoint.tokenizer()
        opened = Model(request.param, checkpoint, tokenizer, _requests(tokenizer))
        yield opened
        opened.close()


class SharedStage(StageRuntime):
    """A stage whose executor outlives the chain. Remembers how often memory did not suffice."""

    refusals = 0

    def begin(
        self, work: Sequence[SessionRows], openings: Iterable[Opening], activations: Array | None
    ) -> PendingFrame:
        try:
            return super().begin(work, openings, activations)
        except CapacityError:
            self.refusals += 1
            raise

    def close(self) -> None:
        assert self.kv_usage().sessions == 0, "every session was freed"


@contextmanager
def serve(
    model: Model, executors: Sequence[Executor], *, max_rows: int = 512, max_sessions: int = 8
) -> Iterator[tuple[LocalService, SharedStage]]:
    """The model as a service over these executors, one stage behind the other."""
    last = len(executors) - 1
    stages = [SharedStage(e, is_first=i == 0, is_last=i == last) for i, e in enumerate(executors)]
    limits = DriverLimits(model.checkpoint.spec.vocab_size, OPTIONS.context_length, max_sessions)
    driver = Driver(model.tokenizer, limits)
    chain = LocalChain(stages, driver)
    capacity = min(stage.kv_usage().free_tokens for stage in stages)
    driver.connect(chain, ChainShape(capacity, max_rows=max_rows))
    with LocalService(
        ServedModel("smollm2", driver.context_length, 0, digest="", size_bytes=0),
        model.tokenizer,
        driver,
        chain,
    ) as service:
        yield service, stages[0]


def generate(service: LocalService, request: GenerationRequest) -> Answer:
    deltas = list(service.stream(request))
    return Answer(
        tuple(choice for delta in deltas for choice in delta.tokens),
        tuple(choice for delta in deltas for choice in delta.prompt),
        "".join(delta.text for delta in deltas),
    )


def generate_at_once(service: LocalService, requests: Mapping[str, GenerationRequest]) -> dict[str, Answer]:
    with ThreadPoolExecutor(8) as callers:
        answers = callers.map(lambda request: generate(service, request), requests.values())
        return dict(zip(requests, answers, strict=True))


@pytest.fixture(scope="module")
def expected(model: Model) -> Mapping[str, Answer]:
    """Every request alone, its prompt in one go."""
    with serve(model, [model.whole()]) as (service, _):
        return {name: generate(service, request) for name, request in model.requests.items()}


def test_answers_are_complete_and_differ(model: Model, expected: Mapping[str, Answer]) -> None:
    for name, answer in expected.items():
        assert len(answer.tokens) == TOKENS
        assert all(c.logprob is not None and len(c.alternatives) == 2 for c in answer.tokens)
        scored = model.requests[name].prompt_logprobs is not None
        assert len(answer.prompt) == (len(model.requests[name].prompt) if scored else 0)
    assert len({answer.text for answer in expected.values()}) == len(expected)


def test_eight_at_once(model: Model, expected: Mapping[str, Answer]) -> None:
    with serve(model, [model.whole()]) as (service, _):
        assert generate_at_once(service, model.requests) == expected


def test_prompts_in_chunks_of_seven(model: Model, expected: Mapping[str, Answer]) -> None:
    with serve(model, [model.whole()], max_rows=7) as (service, _):
        assert generate_at_once(service, model.requests) == expected


@pytest.mark.parametrize("count", [2, 3, 5])
def test_cut_into_stages(count: int, model: Model, expected: Mapping[str, Answer]) -> None:
    with serve(model, model.stages(count)) as (service, _):
        assert generate_at_once(service, model.requests) == expected


def test_starting_again_for_want_of_memory(
    model: Model, expected: Mapping[str, Answer], tmp_path: Path
) -> None:
    options = ExecutorOptions(kv_bytes=5 * PAGE_BYTES, context_length=512)
    small = open_shard(model.checkpoint, form=model.form, options=options)
    growing = {name: request for name, request in model.requests.items() if "edge" in name}
    with serve(model, [small]) as (service, stage):
        answers = generate_at_once(service, growing)
    small.close()
    assert stage.refusals > 0, "someone had to make room"
    assert answers == {name: expected[name] for name in growing}


# Logits of an executor, row by row


@pytest.fixture(scope="module")
def known(model: Model, expected: Mapping[str, Answer]) -> tuple[int, Array]:
    """A prompt's length, and its tokens with the answer's behind them."""
    request = model.requests["edge-1 greedy"]
    answer = [choice.id for choice in expected["edge-1 greedy"].tokens]
    return len(request.prompt), np.array([*request.prompt, *answer], dtype=np.int64)


@pytest.fixture(scope="module")
def plain_logits(model: Model, known: tuple[int, Array]) -> Float32:
    """Logits of every row from the prompt's last on, each computed alone."""
    executor, (start, ids) = model.whole(), known
    rows = [np.array(executor.step([Segment(1, 0, start, 1)], ids[:start]))]
    rows += [
        np.array(executor.step([Segment(1, position, 1, 1)], ids[position : position + 1]))
        for position in range(start, len(ids))
    ]
    executor.close_session(1)
    return np.concatenate(rows)


@pytest.mark.parametrize("count", range(1, 9))
def test_verifying_several_tokens_at_once(
    count: int, model: Model, known: tuple[int, Array], plain_logits: Float32
) -> None:
    executor, (start, ids) = model.whole(), known
    executor.step([Segment(2, 0, start, 0)], ids[:start])
    for first in range(start, len(ids), count):
        wrong = np.full(count, 7, dtype=np.int64)  # drafts that do not hold, rolled back by what follows
        executor.step([Segment(2, first, count, count)], wrong)
        drafts = ids[first : first + count]
        rows = executor.step([Segment(2, first, len(drafts), len(drafts))], drafts)
        assert rows.argmax(axis=-1)[:-1].tolist() == drafts[1:].tolist()
        assert np.array_equal(rows, plain_logits[first - start + 1 : first - start + 1 + len(drafts)])
    executor.close_session(2)


def test_rows_do_not_depend_on_each_other(
    model: Model, known: tuple[int, Array], plain_logits: Float32
) -> None:
    executor, (start, ids) = model.whole(), known
    whole = np.array(executor.step([Segment(1, 0, len(ids), len(ids))], ids))
    assert np.array_equal(whole[start - 1 :], plain_logits)
    for size in (7, 33):
        pieces = [
            np.array(executor.step([Segment(2, first, len(part), len(part))], part))
            for first in range(0, len(ids), size)
            for part in [ids[first : first + size]]
        ]
        assert np.array_equal(np.concatenate(pieces), whole), f"chunks of {size}"
    other = cast(Array, np.asarray(model.requests["long greedy"].prompt, dtype=np.int64))
    executor.step([Segment(3, 0, 100)], other[:100])
    executor.step([Segment(4, 0, 20)], ids[:20])
    ragged = [Segment(3, 100, 1, 1), Segment(4, 20, 30, 30), Segment(5, 0, 5, 1), Segment(2, 3, 1, 1)]
    rows = executor.step(ragged, np.concatenate([other[100:101], ids[20:50], ids[:5], ids[3:4]]))
    assert np.array_equal(rows[1:], whole[[*range(20, 50), 4, 3]]), "in the company of strangers"
    for session in range(1, 6):
        executor.close_session(session)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_stages_pass_on_the_same_bits(count: int, model: Model, known: tuple[int, Array]) -> None:
    _, ids = known
    segment = [Segment(1, 0, len(ids), len(ids))]
    whole = np.array(model.whole().step(segment, ids))
    passed = ids
    for executor in model.stages(count):
        passed = np.array(executor.step(segment, passed))
        executor.close_session(1)
    model.whole().close_session(1)
    assert np.array_equal(passed, whole)

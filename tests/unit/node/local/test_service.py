"""A model in this process as its callers see it: streams, cancellation and errors. The stage is the test's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from shardcompute.backends.executor import ComputedStep
from shardcompute.backends.matrix import Array
from shardcompute.backends.processor import default_threads
from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import (
    BackendError,
    CapacityError,
    PromptTooLongError,
    QueueFullError,
    ShardComputeError,
    UnknownModelError,
)
from shardcompute.core.generation import Delta, GenerationRequest, TokenChoice
from shardcompute.core.steps import Draft, Opening, Picked, SessionRows
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape, DriverLimits
from shardcompute.node.local.chain import LocalChain
from shardcompute.node.local.service import LocalService
from shardcompute.node.service import ServedModel
from shardcompute.runtime.stage import PendingFrame, StageRuntime
from support.swarm.fake_chain import Letters, ask, continuation, next_token


class LetterStage:
    """Picks letters as `support.swarm.fake_chain` does. A test can hold it before a step until it is released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._gate = threading.Event()
        self._free_steps: int | None = None
        self.failure: Callable[[], Exception] | None = None
        self.tokens: dict[int, list[int]] = {}
        self.is_closed = False

    def hold(self, after: int) -> None:
        """Let so many more steps pass and stop at the next one; `entered` says when it is there."""
        self._free_steps = after

    def release(self) -> None:
        self._free_steps = None
        self._gate.set()

    def remember(self, work: Sequence[SessionRows], picked: Sequence[Picked]) -> None:
        """Nothing drafts here."""

    def draft(self, work: Sequence[SessionRows]) -> list[Draft]:
        return []

    def can_begin_after(self, pending: PendingFrame) -> bool:
        return False

    def finish(self, pending: PendingFrame) -> Any:
        return pending.outcome

    def begin(
        self, work: Sequence[SessionRows], openings: Iterable[Opening], activations: Array | None
    ) -> PendingFrame:
        done = ComputedStep(np.empty(0))
        return PendingFrame(
            tuple(work), tuple(openings), done, lambda: done, outcome=self.step(work, openings, activations)
        )

    def step(
        self, work: Sequence[SessionRows], openings: Iterable[Opening], activations: Array | None
    ) -> list[Picked]:
        if self._free_steps is not None:
            self._free_steps -= 1
            if self._free_steps < 0:
                self.entered.set()
                self._gate.wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure()
        picked = []
        for part in work:
            tokens = self.tokens.setdefault(part.session, [])
            tokens[part.start :] = part.ids
            picked += [
                Picked(part.session, row, TokenChoice(next_token(tokens[: row + 1])))
                for row in range(len(tokens) - part.logit_rows, len(tokens))
            ]
        return picked

    def close_sessions(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            self.tokens.pop(session, None)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def stage() -> LetterStage:
    return LetterStage()


@pytest.fixture
def service(stage: LetterStage) -> Iterator[LocalService]:
    limits = DriverLimits(vocab_size=30, context_length=100, max_sessions=4, max_waiting=2)
    tokenizer = cast(Tokenizer, Letters())
    driver = Driver(tokenizer, limits)
    chain = LocalChain([cast(StageRuntime, stage)], driver)
    driver.connect(chain, ChainShape(capacity_tokens=100 * PAGE_TOKENS))
    with LocalService(
        ServedModel("letters", driver.context_length, 0, digest="", size_bytes=0), tokenizer, driver, chain
    ) as opened:
        yield opened
        stage.release()  # a test that failed must not hang


def ids(deltas: Iterable[Delta]) -> list[int]:
    return [choice.id for delta in deltas for choice in delta.tokens]


def expected(request: GenerationRequest) -> list[int]:
    return continuation(request.prompt, request.max_tokens)


async def collect(service: LocalService, request: GenerationRequest, model: str = "letters") -> list[Delta]:
    return [delta async for delta in service.generate(model, request)]


def wait_until_free(service: LocalService, stage: LetterStage) -> None:
    """Let the chain's thread take what is in its inbox: a whole new generation goes behind it."""
    list(service.stream(ask(1, 1)))
    assert set(stage.tokens) <= {max(stage.tokens, default=0)}, (
        "only the last session may still be on its way out"
    )


# A caller in this process


def test_a_stream_gives_deltas_until_one_has_a_finish(service: LocalService) -> None:
    deltas = list(service.stream(ask()))
    assert ids(deltas) == expected(ask())
    assert [delta.finish for delta in deltas] == [None] * 5 + ["length"]
    assert service.load().running == 0


def test_streams_from_many_threads_do_not_mix(service: LocalService) -> None:
    # No more than may wait while the first one is computed.
    requests = [ask(3 + i, 20, first=i) for i in range(3)]
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda request: ids(service.stream(request)), requests))
    assert answers == [expected(request) for request in requests]


def test_closing_a_stream_cancels_it(service: LocalService, stage: LetterStage) -> None:
    stage.hold(after=1)
    stream = service.stream(ask(max_tokens=90))
    next(stream)
    assert service.load().running == 1
    stream.close()
    assert service.load().running == 0
    stage.release()
    wait_until_free(service, stage)


def test_a_stream_that_is_never_read_costs_nothing(service: LocalService) -> None:
    service.stream(ask())
    assert (service.load().running, service.load().waiting) == (0, 0)


def test_closing_the_service_ends_streams_and_frees_the_stages(
    service: LocalService, stage: LetterStage
) -> None:
    stage.hold(after=1)
    stream = service.stream(ask(max_tokens=90))
    next(stream)
    assert stage.entered.wait(60)
    service.driver.close()  # as `service.close` does first; it would then wait for the step that is held
    stage.release()
    service.close()
    assert stage.is_closed
    with pytest.raises(CapacityError, match="shut down"):
        list(stream)
    with pytest.raises(CapacityError, match="shutting down"):
        next(service.stream(ask()))


# The API


def test_generate_gives_what_stream_gives(service: LocalService) -> None:
    async def both() -> list[list[Delta]]:
        return await asyncio.gather(
            collect(service, ask(max_tokens=20)), collect(service, ask(first=3), "default")
        )

    first, second = asyncio.run(both())
    assert ids(first) == expected(ask(max_tokens=20))
    assert ids(second) == expected(ask(first=3))
    assert second[-1].finish == "length"


def test_closing_the_iterator_cancels_the_generation(service: LocalService, stage: LetterStage) -> None:
    stage.hold(after=1)

    async def leave_early() -> int:
        deltas = service.generate("letters", ask(max_tokens=90))
        await anext(deltas)
        running = service.load().running
        await deltas.aclose()  # type: ignore[attr-defined]
        return running

    assert asyncio.run(leave_early()) == 1
    assert service.load().running == 0
    stage.release()
    wait_until_free(service, stage)


def test_cancelling_the_task_cancels_the_generation(service: LocalService, stage: LetterStage) -> None:
    stage.hold(after=0)

    async def cancelled() -> None:
        task = asyncio.create_task(collect(service, ask(max_tokens=90)))
        await asyncio.to_thread(stage.entered.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert service.load().running == 0
    stage.release()
    wait_until_free(service, stage)


def test_a_caller_whose_event_loop_is_gone_stops_nobody(service: LocalService, stage: LetterStage) -> None:
    stage.hold(after=1)
    deltas = service.generate("letters", ask(max_tokens=3))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(deltas))  # type: ignore[arg-type]
    assert stage.entered.wait(60)
    loop.close()
    stage.release()
    assert ids(service.stream(ask())) == expected(ask())


def test_models_codec_and_load(service: LocalService, stage: LetterStage) -> None:
    (model,) = service.models()
    assert (model.name, model.context_length) == ("letters", 100)
    assert service.codec("letters") is service.codec("default") is service.tokenizer
    assert service.is_ready()
    stage.hold(after=1)
    stream = service.stream(ask(60, 30))
    next(stream)
    load = service.load()
    assert (load.running, load.waiting) == (1, 0)
    assert 0 < load.kv_used_fraction <= 1
    stream.close()
    with pytest.raises(UnknownModelError, match="numbers") as raised:
        service.codec("numbers")
    assert "letters" in raised.value.hint


def first_delta(service: LocalService, request: GenerationRequest, model: str = "letters") -> Any:
    async def ask_for_one() -> Delta:
        return await anext(service.generate(model, request))

    return asyncio.run(ask_for_one())


def test_errors_come_before_the_first_delta(service: LocalService, stage: LetterStage) -> None:
    with pytest.raises(UnknownModelError):
        first_delta(service, ask(), "numbers")
    with pytest.raises(PromptTooLongError):
        first_delta(service, ask(100))
    stage.hold(after=0)
    answers: list[Delta | ShardComputeError] = []
    # One in the step that is held, two behind it.
    waiting = [service.driver.submit(ask(), answers.append) for _ in range(3)]
    with pytest.raises(QueueFullError):
        first_delta(service, ask())
    for generation in waiting:
        service.driver.cancel(generation)
    stage.release()
    assert ids(service.stream(ask())) == expected(ask())
    assert answers == []


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (lambda: BackendError("a kernel broke"), BackendError, "a kernel broke"),
        (lambda: CapacityError("no page left"), CapacityError, "no page left"),
        (lambda: ZeroDivisionError("oh"), ShardComputeError, "a step failed: ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_step_is_an_error_of_ours_and_the_service_goes_on(
    service: LocalService,
    stage: LetterStage,
    failure: Callable[[], Exception],
    error: type[ShardComputeError],
    message: str,
    is_async: bool,
) -> None:
    def generate() -> None:
        if is_async:
            asyncio.run(collect(service, ask()))
        else:
            list(service.stream(ask()))

    stage.failure = failure
    with pytest.raises(error, match=message) as raised:
        generate()
    assert isinstance(raised.value, ShardComputeError)
    assert ids(service.stream(ask())) == expected(ask())


def test_threads_are_counted_as_cores_that_may_be_used() -> None:
    assert default_threads() >= 1

"""A whole model served by this process: the driver and its stages without any network in between.

One thread computes; requests come in and deltas go out under one lock. Everything a session needs is freed when
it ends, is cancelled or fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardcompute.backends.executor import KvUsage
from shardcompute.backends.matrix import Array
from shardcompute.core.errors import (
    CapacityError,
    PromptTooLongError,
    QueueFullError,
    ShardComputeError,
    UsageError,
)
from shardcompute.core.generation import Delta, GenerationRequest, Timings, TokenChoice
from shardcompute.core.steps import Picked
from shardcompute.decoding import validate_sampling
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.answer import Answer
from shardcompute.node.scheduler import Frame, Scheduler, SchedulerLimits, Session
from shardcompute.runtime.stage import StageRuntime

Emit = Callable[[Delta | ShardComputeError], None]


@dataclass(slots=True)
class _Generation:
    """What the engine keeps beside the scheduler's session."""

    session: Session
    answer: Answer
    emit: Emit
    submitted_s: float
    started_s: float = 0.0
    first_token_s: float = 0.0
    prompt: list[TokenChoice] | None = None


class LocalEngine:
    """Serves generations from stages in this process. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        stages: Sequence[StageRuntime],
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        context_length: int,
        limits: SchedulerLimits | None = None,
        max_waiting: int = 256,
    ) -> None:
        self._stages = stages
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_waiting = max_waiting
        self.context_length = context_length
        self._scheduler = Scheduler(limits or SchedulerLimits())
        self._generations: dict[int, _Generation] = {}
        self._to_free: list[int] = []
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, emit: Emit) -> int:
        """Start a generation; `emit` is called, from the engine's thread, with each delta, or an error at last.

        Raises UsageError or PromptTooLongError for what cannot work, QueueFullError when too many wait.
        """
        self._check(request)
        with self._wake:
            if len(self._scheduler.waiting) >= self._max_waiting:
                raise QueueFullError(
                    f"{self._max_waiting} requests are already waiting", hint="try again in a few seconds"
                )
            session = self._scheduler.add(request)
            answer = Answer(request, self._tokenizer)
            self._generations[session.id] = _Generation(session, answer, emit, time.monotonic())
            self._wake.notify()
        return session.id

    def cancel(self, generation: int) -> None:
        """Stop a generation and free its memory within a step; nothing more is emitted."""
        with self._wake:
            known = self._generations.get(generation)
            if known is not None:
                self._end(known)
                self._wake.notify()

    def load(self) -> tuple[int, int, KvUsage]:
        """Running and waiting generations, and the fullest stage's KV."""
        with self._wake:
            usage = min((stage.kv_usage() for stage in self._stages), key=lambda u: u.free_tokens)
            return len(self._scheduler.running), len(self._scheduler.waiting), usage

    def close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()
        for stage in self._stages:
            stage.close()

    def _check(self, request: GenerationRequest) -> None:
        if not request.prompt:
            raise UsageError("the prompt is empty", hint="give at least one token of text")
        if request.max_tokens < 1:
            raise UsageError("max_tokens must be at least 1")
        if max(request.prompt) >= self._vocab_size or min(request.prompt) < 0:
            raise UsageError(f"a prompt token is outside the vocabulary of {self._vocab_size}")
        if len(request.prompt) >= self.context_length:
            raise PromptTooLongError(
                f"the prompt has {len(request.prompt)} tokens and the context holds {self.context_length}, "
                "with room for at least one more",
                hint="shorten the prompt or start with a larger --context",
            )
        validate_sampling(request.sampling, self._vocab_size)

    # The engine's own thread

    def _serve(self) -> None:
        while True:
            with self._wake:
                self._free()
                frame = None
                while not self._is_closing and (frame := self._next_frame()) is None:
                    self._wake.wait()
                    self._free()
                if frame is None:
                    self._fail_all(CapacityError("the engine is shutting down"))
                    self._free()
                    return
            try:
                picked = self._compute(frame)
            except CapacityError as error:
                self._make_room(frame, error)
            except Exception as error:
                self._fail(frame, error)
            else:
                self._deliver(picked)

    def _next_frame(self) -> Frame | None:
        free = min(stage.kv_usage().free_tokens for stage in self._stages)
        frame = self._scheduler.next_frame(free)
        if frame is not None:
            now = time.monotonic()
            for opening in frame.openings:
                generation = self._generations[opening.session]
                generation.started_s = generation.started_s or now
        return frame

    def _compute(self, frame: Frame) -> list[Picked]:
        passed: Array | list[Picked] | None = None
        for stage in self._stages:
            passed = stage.step(frame.work, frame.openings, passed if not isinstance(passed, list) else None)
        if not isinstance(passed, list):
            raise UsageError("the last stage of a chain must pick tokens")
        return passed

    def _deliver(self, picked: Sequence[Picked]) -> None:
        with self._wake:
            now = time.monotonic()
            for session, result in self._scheduler.take_results(picked):
                generation = self._generations[session.id]
                if result.is_scored:
                    generation.prompt = generation.prompt or [TokenChoice(session.request.prompt[0])]
                    generation.prompt.append(result.choice)
                    continue
                self._extend(generation, result.choice, now)

    def _extend(self, generation: _Generation, choice: TokenChoice, now: float) -> None:
        session, request = generation.session, generation.session.request
        delta = generation.answer.push(choice)
        if session.generated == 1:
            generation.first_token_s = now
            if request.prompt_logprobs is not None:
                scored = generation.prompt or [TokenChoice(request.prompt[0])]
                delta = replace(delta, prompt=tuple(scored))
        if delta.finish is None and len(session.known) >= self.context_length:
            delta = replace(delta, finish="length")
        if delta.finish is not None:
            timings = Timings(
                queue_s=generation.started_s - generation.submitted_s,
                prefill_s=generation.first_token_s - generation.started_s,
                decode_s=now - generation.first_token_s,
                prompt_tokens=session.prompt_length,
                generated_tokens=session.generated,
            )
            delta = replace(delta, timings=timings)
            self._end(generation)
        generation.emit(delta)

    def _make_room(self, frame: Frame, error: CapacityError) -> None:
        with self._wake:
            self._scheduler.undo(frame)
            victim = self._scheduler.preempt()
            if victim is not None:
                self._to_free.append(victim.id)
                return
            for part in frame.work:
                generation = self._generations.get(part.session)
                if generation is not None:
                    self._end(generation)
                    generation.emit(error)

    def _fail(self, frame: Frame, error: Exception) -> None:
        """A step broke: its sessions get the error, the others go on."""
        shown = (
            error if isinstance(error, ShardComputeError) else ShardComputeError(f"a step failed: {error!r}")
        )
        with self._wake:
            for part in frame.work:
                generation = self._generations.get(part.session)
                if generation is not None:
                    self._end(generation)
                    generation.emit(shown)

    def _fail_all(self, error: ShardComputeError) -> None:
        for generation in list(self._generations.values()):
            self._end(generation)
            generation.emit(error)

    def _end(self, generation: _Generation) -> None:
        self._scheduler.remove(generation.session)
        self._generations.pop(generation.session.id, None)
        self._to_free.append(generation.session.id)

    def _free(self) -> None:
        """Free KV of sessions that ended; only this thread touches the stages' sessions."""
        if self._to_free:
            for stage in self._stages:
                stage.close_sessions(self._to_free)
            self._to_free.clear()

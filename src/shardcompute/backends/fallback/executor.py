"""Executor over `transformers`: a stage of any causal model, one session of a step after the other.

Slower than a family of ours: no quantisation, no graphs, no rows of several sessions in one product. In return a row
has the same bits whatever company its step has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardcompute.backends.executor import (
    ExecutorOptions,
    KvUsage,
    SynchronousSteps,
    refuse_final_rows,
    refuse_pictures,
)
from shardcompute.backends.fallback.sessions import KEPT_STATES, CachedSession
from shardcompute.backends.fallback.stage_model import FallbackStage, StageModel
from shardcompute.backends.kv import PageBudget
from shardcompute.backends.matrix import Array
from shardcompute.backends.torch.device import choose_device, choose_dtype
from shardcompute.core.batch import PAGE_TOKENS, Segment, count_rows
from shardcompute.core.errors import CapacityError, RowGapError, UsageError
from shardcompute.core.pictures import PictureSpan


class TransformersExecutor(SynchronousSteps):
    """See Executor. `state_bytes` is kept for recurrent states, besides the KV memory that options give."""

    def __init__(self, stage: FallbackStage, options: ExecutorOptions, *, state_bytes: int = 0) -> None:
        device = choose_device(options.device)
        if device.type == "cpu":
            torch.set_num_threads(options.threads)
        self._model = StageModel(stage, device, choose_dtype(options.dtype, device))
        taken = self._model.measure()
        page_bytes = max(1, taken.token_bytes * PAGE_TOKENS)
        self._budget = PageBudget(
            page_bytes, self._count_pages(options, page_bytes, taken.token_bytes), options.context_length
        )
        self._session_bytes = KEPT_STATES * taken.state_bytes
        self._most_sessions = self._count_sessions(state_bytes or options.kv_bytes)
        self._max_rows = options.max_rows
        self._sessions: dict[int, CachedSession] = {}
        self._hidden: Array = np.empty((0, self.hidden), dtype=np.float32)

    @property
    def hidden(self) -> int:
        return self._model.hidden

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        self._check(segments, inputs)
        tensor = torch.from_numpy(np.array(inputs))
        results, hidden, row = [], [], 0
        for segment in segments:
            session = self._sessions.get(segment.session)
            if session is None:
                session = self._sessions[segment.session] = self._model.open_session()
            part = tensor[row : row + segment.count]
            results.append(self._model.run(session, part, segment.start, segment.logit_rows))
            hidden.append(self._model.hidden_rows)
            self._budget.take(segment)
            row += segment.count
        if keeps_hidden:
            self._hidden = torch.cat(hidden).float().cpu().numpy()
        joined: Array = torch.cat(results).float().cpu().numpy()
        return joined

    def hidden_rows(self) -> Array:
        return self._hidden

    def final_rows(self) -> Array:
        raise refuse_final_rows("transformers")

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        held = self._sessions.get(source)
        if held is None:
            raise CapacityError(f"session {source} is not held here")
        try:
            begun = held.fork(length)
        except RowGapError as error:
            raise CapacityError(error.message) from error
        self._budget.adopt(source, target, length, is_moved=is_moved)
        if is_moved:
            self._sessions.pop(source, None)
        self._sessions[target] = begun

    def open_pictures(
        self, session: int, spans: Sequence[PictureSpan], patches: Sequence[bytes] | None
    ) -> None:
        raise refuse_pictures("a model that runs through transformers")

    def close_session(self, session: int) -> None:
        self._budget.release(session)
        self._sessions.pop(session, None)

    def session_length(self, session: int) -> int:
        return self._budget.lengths.get(session, 0)

    def sessions(self) -> list[int]:
        return list(self._budget.lengths)

    def kv_usage(self) -> KvUsage:
        return self._budget.usage()

    def close(self) -> None:
        self._sessions.clear()

    def _check(self, segments: Sequence[Segment], inputs: Array) -> None:
        """Raise unless all of these rows can be computed; changes nothing."""
        rows, model = count_rows(segments), self._model
        expected = (rows,) if model.stage.is_first else (rows, model.hidden)
        if inputs.shape != expected or rows > self._max_rows:
            raise UsageError(
                f"a step of {rows} rows (at most {self._max_rows}) got inputs of shape {inputs.shape}"
            )
        if model.stage.is_first and not 0 <= inputs.min() <= inputs.max() < model.vocab_size:
            raise UsageError(f"token ids must lie in [0, {model.vocab_size})")
        self._budget.check(segments)
        new = 0
        for segment in segments:
            session = self._sessions.get(segment.session)
            if session is None:
                new += 1
            else:
                session.check(segment.session, segment.start)
        if len(self._sessions) + new > self._most_sessions:
            raise CapacityError(
                f"there is memory for the recurrent states of {self._most_sessions} sessions",
                hint="wait for other sessions to end, or give more with --kv-memory",
            )

    def _count_pages(self, options: ExecutorOptions, page_bytes: int, token_bytes: int) -> int:
        pages = (
            options.kv_bytes // page_bytes if token_bytes else -(-options.context_length // PAGE_TOKENS) * 64
        )
        if pages < 1:
            raise CapacityError(
                f"{options.kv_bytes} bytes of KV memory do not hold one page ({page_bytes} bytes)",
                hint="give more with --kv-memory",
            )
        return pages

    def _count_sessions(self, state_bytes: int) -> int:
        if not self._session_bytes:
            return 1 << 20
        if state_bytes < self._session_bytes:
            raise CapacityError(
                f"{state_bytes} bytes do not hold the recurrent states of one session ({self._session_bytes} bytes)",
                hint="give more with --kv-memory",
            )
        return state_bytes // self._session_bytes

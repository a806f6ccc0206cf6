"""One shard at work: sessions, KV and `step`, with the tail where the chain ends.

A last stage may have a drafter: `draft` then tells what may follow the tokens that a step has picked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shardcompute.backends.executor import Executor, KvUsage
from shardcompute.backends.matrix import Array
from shardcompute.core.steps import Draft, Opening, Picked, SessionRows, segments_of
from shardcompute.models.vocabulary import Vocabulary
from shardcompute.runtime.head_drafter import HeadDrafter
from shardcompute.runtime.tail import Tail


class StageRuntime:
    """Runs steps of one stage. One caller at a time."""

    def __init__(
        self,
        executor: Executor,
        *,
        is_first: bool,
        is_last: bool,
        drafter: HeadDrafter | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        """A last stage asks for the `vocabulary` when a session has a grammar."""
        if drafter is not None and not is_last:
            raise ValueError("only a last stage can draft")
        self._executor = executor
        self._drafter = drafter
        self._is_first = is_first
        self._tail = Tail(vocabulary) if is_last else None

    def step(
        self, work: Sequence[SessionRows], openings: Iterable[Opening], activations: Array | None
    ) -> Array | list[Picked]:
        """Activations for the next stage or, from the last one, the picked tokens."""
        if self._is_first:
            inputs: Array = np.fromiter((token for part in work for token in part.ids), dtype=np.int64)
        elif activations is None:
            raise ValueError("a stage behind the first needs activations")
        else:
            inputs = activations
        openings = tuple(openings)
        for opening in openings:
            if opening.prefix is not None:
                prefix = opening.prefix
                self._executor.adopt(prefix.source, opening.session, prefix.length, is_moved=prefix.is_moved)
        if self._tail is None:
            return self._executor.step(segments_of(work), inputs)
        keeps_hidden = self._has_to_draft(work) or self._tail.wants_hidden(work, openings)
        out = self._executor.step(segments_of(work), inputs, keeps_hidden=keeps_hidden)
        self._tail.open(openings)
        return self._tail.pick(work, out, self._executor.hidden_rows() if keeps_hidden else None)

    def draft(self, work: Sequence[SessionRows], picked: Sequence[Picked]) -> list[Draft]:
        """Head drafts behind the tokens that `step` has just picked, where they are asked for and can be made."""
        if self._drafter is None or self._tail is None or not self._has_to_draft(work):
            return []
        return self._drafter.draft(work, picked, self._executor.hidden_rows(), self._tail)

    def draft_with(self, drafter: HeadDrafter | None) -> None:
        """From now on draft with this; None: not at all."""
        if self._tail is None and drafter is not None:
            raise ValueError("only a last stage can draft")
        former, self._drafter = self._drafter, drafter
        if former is not None:
            former.close()

    def _has_to_draft(self, work: Sequence[SessionRows]) -> bool:
        return self._drafter is not None and any(part.head_draft_tokens for part in work)

    def close_sessions(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            self._executor.close_session(session)
            if self._tail is not None:
                self._tail.close(session)

    def reset(self) -> None:
        """Forget every session: the chain has a new shape and its driver replays what it needs."""
        self.close_sessions(self._executor.sessions())

    def session_length(self, session: int) -> int:
        return self._executor.session_length(session)

    def session_lengths(self) -> dict[int, int]:
        """The sessions that hold KV here, and how many tokens of each this stage can go on from."""
        lengths = {session: self._executor.session_length(session) for session in self._executor.sessions()}
        if self._tail is None:
            return lengths
        # A step that failed while picking has left the tail behind.
        return {session: min(length, self._tail.length(session)) for session, length in lengths.items()}

    def kv_usage(self) -> KvUsage:
        return self._executor.kv_usage()

    def close(self) -> None:
        self._executor.close()
        if self._drafter is not None:
            self._drafter.close()

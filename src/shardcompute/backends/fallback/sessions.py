"""Session caches of a stage: keys and values of its own layers, and the states of recurrent ones.

Attention layers keep all keys and values, also those that a sliding window hides, so that a session can be cut at any
position. Recurrent states cannot be cut: the state before the last step is kept with the step's rows, and a cut behind
it computes those rows again; a cut farther back is a gap (RowGapError), which whoever sent the rows fills.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from shardcompute.core.errors import RowGapError

_MOST_KEPT_ROWS = 64
"""Rows of a longer step are a prompt's, and not kept to be computed again."""
KEPT_STATES = 2
"""How many states of a session there are at most: the one now, and the one before the last step."""


class _AbsentLayer(DynamicLayer):  # type: ignore[misc]
    """The place of a layer that is elsewhere."""


class StageCache(DynamicCache):  # type: ignore[misc]
    """A `transformers` cache with layers `[start, stop)` in use, all of which have seen `length` tokens."""

    layers: list[Any]

    def __init__(self, config: Any, start: int, stop: int, count: int) -> None:
        super().__init__(config=config)
        self.length = 0
        self.is_recurrent = any(_is_recurrent(layer) for layer in self.layers)
        """Of the whole model, so that all of its stages compute the same rows together."""
        while len(self.layers) < count:
            self.layers.append(DynamicLayer())
        self.layers = [
            _held_layer(layer) if start <= index < stop else _AbsentLayer()
            for index, layer in enumerate(self.layers)
        ]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        layer = self.layers[layer_idx]
        if isinstance(layer, _AbsentLayer) or not isinstance(layer, CacheLayerMixin):
            return self.length
        return int(layer.get_seq_length())

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if layer_idx is None:
            return self.length > 0
        return bool(super().has_previous_state(layer_idx, state_idx))

    def kv_bytes(self) -> int:
        """Of keys and values; they grow with a session."""
        return sum(
            part.nbytes
            for layer in self.layers
            for part in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if part is not None
        )

    def state_bytes(self) -> int:
        """Of recurrent states, which have one size."""
        return sum(tensor.nbytes for layer in self._recurrent() for tensor in _tensors(_states(layer)))

    def states(self) -> list[dict[str, Any]]:
        """A copy of the recurrent states."""
        return [_cloned(_states(layer)) for layer in self._recurrent()]

    def restore(self, states: list[dict[str, Any]], length: int) -> None:
        """Go back to where `states` were taken, `length` tokens from the beginning."""
        for layer, state in zip(self._recurrent(), states, strict=True):
            vars(layer).update(_cloned(state))
        self.crop_to(length)

    def crop_to(self, length: int) -> None:
        """Forget keys and values from position `length` on."""
        for layer in self.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys = layer.keys[..., :length, :]
                layer.values = layer.values[..., :length, :]
            if getattr(layer, "indexer_keys", None) is not None:
                layer.indexer_keys = layer.indexer_keys[:, :length]
        self.length = length

    def _recurrent(self) -> Iterator[Any]:
        return (layer for layer in self.layers if _is_recurrent(layer))


@dataclass(slots=True)
class _Step:
    """The last step: from where, with which rows, and the states before it."""

    start: int
    rows: torch.Tensor
    states: list[dict[str, Any]]


class CachedSession:
    """One session: what of it must be computed so that rows at `start` can follow, and its cache."""

    def __init__(self, open_cache: Callable[[], StageCache]) -> None:
        self._open_cache = open_cache
        self.cache = open_cache()
        self._last: _Step | None = None

    def check(self, session: int, start: int) -> None:
        """RowGapError where the session cannot go on from `start`. Changes nothing."""
        cache = self.cache
        if not 0 < start < cache.length or not cache.is_recurrent:
            return
        if self._last is None or start < self._last.start:
            raise RowGapError(
                f"session {session} has recurrent states of {cache.length} tokens, which cannot be cut at {start}"
            )

    def cut(self, start: int) -> torch.Tensor | None:
        """Forget all from `start` on. Returns rows that must be computed again before those that follow."""
        cache, again = self.cache, None
        if start >= cache.length:
            return None
        if start == 0:
            self.cache = self._open_cache()
        elif cache.is_recurrent:
            assert self._last is not None
            again = self._last.rows[: start - self._last.start]
            cache.restore(self._last.states, self._last.start)
        else:
            cache.crop_to(start)
        self._last = None
        return again if again is not None and len(again) else None

    def begin(self, rows: torch.Tensor) -> None:
        """Rows are about to be computed."""
        is_kept = self.cache.is_recurrent and self.cache.length > 0 and len(rows) <= _MOST_KEPT_ROWS
        self._last = _Step(self.cache.length, rows, self.cache.states()) if is_kept else None

    def fork(self, length: int) -> CachedSession:
        """A session that begins with the first `length` tokens of this one. RowGapError: its states are elsewhere."""
        if self.cache.is_recurrent and length != self.cache.length:
            raise RowGapError(f"recurrent states of {self.cache.length} tokens cannot be cut at {length}")
        begun = CachedSession(self._open_cache)
        for theirs, ours in zip(self.cache.layers, begun.cache.layers, strict=True):
            # Keys and values are never written to, only replaced by longer ones; states are.
            ours.__dict__.update(vars(theirs))
            if _is_recurrent(theirs):
                ours.__dict__.update(_cloned(_states(theirs)))
        begun.cache.crop_to(length)
        return begun


def _held_layer(layer: Any) -> Any:
    """Layers that drop keys and values behind a window are replaced by ones that keep them."""
    if isinstance(layer, DynamicLayer) and getattr(layer, "is_sliding", False) and not _is_recurrent(layer):
        return DynamicLayer()
    return layer


def _is_recurrent(layer: Any) -> bool:
    return type(layer) is not _AbsentLayer and bool(_states(layer))


def _states(layer: Any) -> dict[str, Any]:
    """All that a layer keeps besides keys and values of every token."""
    if type(layer) in (DynamicLayer, _AbsentLayer):
        return {}
    named = vars(layer)
    has_states = any(isinstance(value, dict) for value in named.values())
    return {
        name: value
        for name, value in named.items()
        if has_states and name not in ("keys", "values", "indexer_keys", "is_initialized")
    }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _cloned(part) for name, part in value.items()}
    return copy.copy(value)

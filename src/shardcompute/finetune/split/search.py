"""Searching for tokens: what whoever has the base's weights reads from states with more effort than a probe takes.

Token by token, what a probe finds likely is sent through the first layers behind the tokens found so far, and the one
whose state comes nearest to the one that was seen is taken. Nothing but patience keeps anyone from trying all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.split.leak import choose_candidates, fit_probe, unit_rows
from shardcompute.finetune.stage import FinetuneStage


def search_tokens(
    own: Sequence[FinetuneStage],
    rows: Sequence[Float32],
    batches: Sequence[MicroBatch],
    *,
    sequences: int = 3,
    tokens: int = 12,
    tried: int = 32,
) -> float:
    """The share of tokens that are found behind the stages of their owner, of the first sequences of batches that the
    probe was not fitted on."""
    first = own[0]
    half = len(batches) // 2
    candidates = choose_candidates(batches, first.vocab_size)
    codes = unit_rows(first.embed(candidates))
    known = np.concatenate([np.searchsorted(candidates, batch.ids) for batch in batches[:half]])
    probe = fit_probe(np.concatenate([unit_rows(each) for each in rows[:half]]), codes[known])
    right = count = 0
    for seen, ids in _sequences(rows[half:], batches[half:])[:sequences]:
        likely = np.argsort(-(unit_rows(seen[:tokens]) @ probe @ codes.T), axis=1)[:, :tried]
        found = _search(own, seen[:tokens], candidates[likely])
        right += int((found == ids[:tokens]).sum())
        count += len(found)
    return right / count


def _sequences(
    rows: Sequence[Float32], batches: Sequence[MicroBatch]
) -> list[tuple[Float32, NDArray[np.int32]]]:
    found = []
    for each, batch in zip(rows, batches, strict=True):
        stops = np.cumsum(batch.lengths)
        for stop, length in zip(stops, batch.lengths, strict=True):
            found.append((each[stop - length : stop], batch.ids[stop - length : stop]))
    return found


def _search(own: Sequence[FinetuneStage], seen: Float32, likely: NDArray[np.int32]) -> NDArray[np.int32]:
    found = np.zeros(len(seen), dtype=np.int32)
    for place, tokens in enumerate(likely):
        sequences = np.tile(found[: place + 1], (len(tokens), 1))
        sequences[:, place] = tokens
        nothing = np.zeros(1, dtype=np.int32)
        batch = MicroBatch(sequences.ravel(), (place + 1,) * len(tokens), nothing, nothing, 1)
        rows = own[0].evaluate(batch)
        for stage in own[1:]:
            rows = stage.evaluate(batch, rows)
        states = rows.float().cpu().numpy()[place :: place + 1]
        found[place] = tokens[np.linalg.norm(states - seen[place], axis=1).argmin()]
    return found

"""Who holds which layers where data stays at home: the first and the last at its owner's, all between with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from shardcompute.core.errors import UsageError
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.swarm.frames import OpenStage, PeerAddress
from shardcompute.models.spec import Stage, cut_layers


def own_stages(layers: int, kept: int) -> tuple[Stage, Stage]:
    """What stays at home: embedding and the first `kept` layers, and the last `kept` with the head."""
    if not kept >= 1 or 2 * kept >= layers:
        raise UsageError(
            f"of {layers} layers, {kept} at each end cannot be kept here with some left for others",
            hint=f"use --keep-local 1 to {(layers - 1) // 2}",
        )
    return Stage(0, kept, layers), Stage(layers - kept, layers, layers)


def lent_stages(layers: int, kept: int, workers: int) -> tuple[Stage, ...]:
    """What each of so many others gets, in order; with nothing kept, everything."""
    if not kept:
        return tuple(cut_layers(layers, workers))
    own_stages(layers, kept)
    inner = cut_layers(layers - 2 * kept, workers)
    return tuple(Stage(each.start + kept, each.stop + kept, layers) for each in inner)


def lend_openings(openings: Sequence[OpenStage], owner: str) -> list[OpenStage]:
    """Orders to open stages, with those of the data's owner before the first and behind the last of them: it joins both
    by itself, so that nobody has to reach it."""
    return [
        msgspec.structs.replace(
            opening,
            place=opening.place + 1,
            stages=opening.stages + 2,
            previous=opening.previous or owner,
            next=opening.next or PeerAddress(owner, ""),
        )
        for opening in openings
    ]


def without_content(batch: MicroBatch) -> MicroBatch:
    """What others are told of a micro-batch: how long its examples are, and no token, label or number of labels."""
    nothing = np.zeros(1, dtype=np.int32)
    return replace(batch, ids=np.zeros_like(batch.ids), rows=nothing, targets=nothing, total=1, teacher=None)

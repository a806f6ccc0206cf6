"""Seeding on a worker: layers that are fetched to the disk for others, not to compute with."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from shardcompute.core.errors import SourceError
from shardcompute.models.spec import Stage
from shardcompute.node.weights.client import RemoteTensors
from shardcompute.node.weights.pieces import Supplier
from shardcompute.weights.card import Card
from shardcompute.weights.shard_cache import ShardCache
from shardcompute.weights.sources.rate import RateLimit

if TYPE_CHECKING:
    from shardcompute.weights.sources.hub import Hub

_SHARE_OF_DISK = 4


def seed_room(folder: Path) -> int:
    """What a disk may hold of weights for others: a part of what is free or has been fetched before; 0 where that
    cannot be found out."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    try:
        fetched = ShardCache(folder / "shards").size_bytes
        return 0 if there is None else (shutil.disk_usage(there).free + fetched) // _SHARE_OF_DISK
    except OSError:
        return 0


def fetch_layers(
    card: Card,
    stage: Stage,
    suppliers: Sequence[Supplier],
    cache: ShardCache,
    *,
    hubs: Sequence[Hub] = (),
    bytes_per_s: int,
) -> None:
    """Have these layers in the cache, checked as ever. SourceError where they do not come, or have no room."""
    with ExitStack() as opened:
        tensors = opened.enter_context(
            RemoteTensors(
                card,
                suppliers,
                cache,
                hubs=[opened.enter_context(hub) for hub in hubs],
                rate=RateLimit(bytes_per_s),
            )
        )
        tensors.prefetch(stage)
    held = [each for each in cache.holdings() if each.fingerprint == card.fingerprint]
    if not any(each.start <= stage.start and stage.stop <= each.stop for each in held):
        raise SourceError(
            f"layers {stage.start} to {stage.stop - 1} of {card.model} could not be kept on this disk",
            hint="free some of it, or start this worker with --no-seed",
        )

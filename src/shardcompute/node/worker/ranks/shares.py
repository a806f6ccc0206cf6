"""Shares of stages: how a worker opens a tensor rank's part of some layers, from a card and the place it was given."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.control.sizes import split_of, tensor_terms, weights_part
from shardcompute.control.state import RankPlace
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.models.spec import Stage
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.node.worker.speed_probe import ShardSpeed
from shardcompute.runtime.loaded_share import LateGroup, LateLeader, LoadedShare
from shardcompute.weights.card import Card
from shardcompute.weights.held import card_column_block


class ShareOpening:
    """A rank's share of a stage: first how it is cut, then, once its executor is `opened`, what computes it."""

    def __init__(self, card: Card, stage: Stage, place: RankPlace, options: ExecutorOptions) -> None:
        """UnsupportedModelError where ranks cannot cut the model, or not so often."""
        terms = tensor_terms(card.spec, lambda: card_column_block(card))
        if terms is None:
            raise UnsupportedModelError(
                f"the layers of {card.model} cannot be shared out among tensor ranks",
                hint="cut it into stages only: --parallel pp=N",
            )
        split = split_of(terms, place.weights, place.exchange)
        self._group = LateGroup(place.rank, split.size)
        self.rank = TensorRank(card.spec, split, self._group)
        self._stage, self._options = stage, options
        share, sparse = split.shares[place.rank], terms.sparse[stage.start : stage.stop]
        parts = [weights_part(terms.spec, share, is_sparse=each) for each in sparse]
        self.part = sum(parts) / len(parts)
        """Of the stage's work."""
        self._executor: Executor | None = None

    def opened(self, executor: Executor) -> LateLeader:
        self._executor = executor
        return self.leader

    @cached_property
    def share(self) -> LoadedShare:
        assert self._executor is not None
        return LoadedShare(self._executor, self.rank, self._group, self._stage, self._options)

    @cached_property
    def leader(self) -> LateLeader:
        return LateLeader(self.share)


def of_whole_layers(speed: ShardSpeed, part: float) -> ShardSpeed:
    """What whole layers would take here, of which a part was measured: by that, machines are compared."""
    batch_s, prefill_s = speed.batch_layer_s, speed.prefill_layer_s
    return replace(
        speed,
        layer_s=speed.layer_s / part,
        batch_layer_s=None if batch_s is None else batch_s / part,
        prefill_layer_s=None if prefill_s is None else prefill_s / part,
    )

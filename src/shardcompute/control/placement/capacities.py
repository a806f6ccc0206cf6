"""The terms of a placement: what machines offer, one by one or several as one, and what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.control.placement.parallelism import PIPELINE, Parallelism
from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.sizes import INNER, Sizes, sizes_of
from shardcompute.control.state import Assignment, MeasuredLink, Model, RankSeat
from shardcompute.models.tensor_share import Exchange

_DEFAULT_POLICY = PlacementPolicy()


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What one machine, or a group of ranks, can give to a chain."""

    node: str
    """Of a group, the one that leads."""
    memory_bytes: int
    seconds_per_byte: float
    """Time to read a byte of weights for one row."""
    overhead_s: float = 0.0
    """Time per frame whatever it holds."""
    held: tuple[tuple[int, int], ...] = ()
    """Layer ranges of this model whose bytes are already there."""
    is_standby: bool = False
    """To be used for stages only where nothing else serves."""
    holding: str = ""
    """By whose costs its memory is counted, see `Sizes.on`."""
    prefill_seconds_per_byte: float | None = None
    """As `seconds_per_byte`, for each row of a prompt; None: nobody knows."""
    rank_class: str = ""
    """Machines of one such class can compute a stage together; "": it can only compute alone."""
    is_measured: bool = False
    """Its speed was measured, with a model like this or without any, and is no guess."""
    is_served: bool = False
    """Its speed was measured while it served."""
    ranks: tuple[RankSeat, ...] = ()
    """Of a group: its machines, the leading one first."""
    exchange: Exchange = "gather"
    kept_bytes: int = 0
    """Of its memory, what is not offered: room to compute again what machines on probation compute."""

    @property
    def is_inner(self) -> bool:
        """It may hold no boundary layer."""
        return self.holding.startswith(INNER)

    @property
    def machines(self) -> int:
        return len(self.ranks) or 1

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(seat.node for seat in self.ranks) or (self.node,)

    def take(self, start: int, stop: int) -> Assignment:
        """These layers, for whoever this is."""
        return Assignment(self.node, start, stop, self.ranks, self.exchange)


@dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """What machines did together in service."""

    members: tuple[str, ...]
    exchange: Exchange
    seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class Request:
    """Everything a placement depends on; equal requests have equal placements."""

    model: Model
    offers: tuple[NodeCapacity, ...]
    links: tuple[MeasuredLink, ...] = ()
    driver: str = "driver"
    policy: PlacementPolicy = _DEFAULT_POLICY
    parallel: Parallelism = PIPELINE
    """How a person asked for the model to be cut, to be had where that can be."""
    unfit: tuple[tuple[str, str], ...] = ()
    """(node, why nothing of this model can be there)"""
    group_times: tuple[MeasuredGroup, ...] = ()

    def __hash__(self) -> int:
        """Without the links, of which a thousand machines have half a million: requests that differ only there are
        told apart when they are compared."""
        return hash((self.model, self.offers, len(self.links), self.driver, self.policy, self.parallel))

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.model)

    def suits(self, stages: Sequence[Assignment]) -> bool:
        """Whether a layout is what was asked for."""
        asked = self.parallel
        if asked.pp not in (0, len(stages)):
            return False
        return asked.tp == 0 or all(_has_ranks(stage, asked) for stage in stages)


def _has_ranks(stage: Assignment, asked: Parallelism) -> bool:
    return len(stage.members) == asked.tp and (not stage.ranks or stage.exchange == asked.exchange)

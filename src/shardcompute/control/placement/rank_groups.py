"""Rank groups: machines that compute every layer of a stage together, seen by placement as one machine.

A group reads as fast as its members together, and pays for it: every layer has work that each of them does, and
exchanges at which all of them wait for the farthest. Its memory is bounded by whichever member is full first.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from math import gcd, inf

from shardcompute.backends.footprint import RANK_BACKENDS
from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.link_tables import link_table
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.sizes import LAYER_OVERHEAD_BYTES, HeldSums, sizes_of, split_of, sums_of
from shardcompute.control.state import Assignment, MeasuredLink, Model, RankPlace, RankSeat, TensorTerms
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.models.tensor_share import Exchange

FRAME_S = 10e-6
"""What a rank takes to send or receive one frame, besides the line (as `collectives.line_speeds` has it)."""
WAIT_S = 100e-6
"""What ranks wait for each other at an exchange, besides: `bench tensor` has 93 to 152 µs for exchanges that take 26
by themselves (`bench/results/tensor-1.1b.json`, `collectives.json`)."""
_COMMON = 0.6
"""Of what a layer costs besides reading its weights, so much is each rank's and not divided (calls, norms): 2 ranks
compute for 0.50 of the time of one with 28 MB a layer, for about 0.63 with 2 MB."""
_VALUE_BYTES = 4
_STEP_EXCHANGES = 3
"""Besides those of layers: the command with its inputs, rows of the embedding, and what may be picked."""
_EXCHANGES: Mapping[Exchange, int] = {"reduce": 2, "gather": 4}
"""A layer (`bench tensor` counts them: 47 and 91 a token of 22 layers)."""
_FINEST = 8
_UNEVEN = 0.1
"""Shares are as coarse as they can be for a group to be within so much of its best."""


def choose_weights(seconds_per_byte: Sequence[float]) -> tuple[int, ...]:
    """Each rank's part of the work, in small whole numbers: the coarsest that cost next to nothing. Two measurements
    of the same machines give the same ones mostly, so that shares are not cut anew for noise."""
    speeds = [1 / each for each in seconds_per_byte]
    best_s = 1 / sum(speeds)
    for parts in range(1, _FINEST + 1):
        weights = [max(1, round(parts * speed / min(speeds))) for speed in speeds]
        slowest_s = max(weight / speed for weight, speed in zip(weights, speeds, strict=True))
        if max(weights) > 2 * _FINEST:
            break
        if slowest_s / sum(weights) <= best_s * (1 + _UNEVEN):
            return _reduced(weights)
    most = max(speeds)
    return _reduced([max(1, round(2 * _FINEST * speed / most)) for speed in speeds])


def _reduced(weights: Sequence[int]) -> tuple[int, ...]:
    common = gcd(*weights)
    return tuple(weight // common for weight in weights)


def seat_ranks(members: Iterable[NodeCapacity]) -> tuple[RankSeat, ...]:
    """Who leads (the quickest), and what each takes on."""
    ordered = sorted(members, key=lambda offer: (offer.seconds_per_byte, offer.node))
    weights = choose_weights([offer.seconds_per_byte for offer in ordered])
    return tuple(RankSeat(offer.node, weight) for offer, weight in zip(ordered, weights, strict=True))


def exchange_s(line: MeasuredLink, ranks: int, row_bytes: float, exchange: Exchange) -> float:
    """One exchange of a row of so many bytes: all send to all, what they hold of it or (to be summed) all of it."""
    size_bytes = row_bytes / ranks if exchange == "gather" else row_bytes
    return WAIT_S + line.rtt_s / 2 + (ranks - 1) * (FRAME_S + size_bytes / line.bytes_per_s)


def _exchanged_values(terms: TensorTerms, exchange: Exchange) -> int:
    """Numbers of a row, of all ranks together, that a layer's exchanges carry."""
    spec = terms.spec
    if exchange == "reduce":
        return 2 * spec.hidden
    heads = spec.heads * (spec.head_dim if spec.latent is None else spec.latent.value)
    inner = spec.intermediate
    if spec.experts is not None:
        # Whole experts answer for their rows; what they share is gathered like any block.
        inner = max(inner, spec.experts.per_token * spec.hidden + spec.experts.shared_intermediate)
    return heads + 2 * spec.hidden + inner


def can_divide(terms: TensorTerms, weights: tuple[int, ...], exchange: Exchange) -> bool:
    """Whether the model has heads and columns enough for ranks of these weights."""
    try:
        split_of(terms, weights, exchange)
    except UnsupportedModelError:
        return False
    return True


def _memory_bytes(
    model: Model, members: Sequence[NodeCapacity], weights: tuple[int, ...], exchange: Exchange
) -> int:
    """How large a stage may be, as if it were on one machine, for every rank to have memory for its share of it."""
    rooms = []
    for rank, offer in enumerate(members):
        whole = sizes_of(model).on(offer.holding)
        own = sums_of(model, offer.holding, RankPlace(rank, weights, exchange))
        rooms.append(stage_room_bytes(whole, own, offer.memory_bytes))
    return max(0, min(rooms))


def stage_room_bytes(whole: HeldSums, own: HeldSums, memory_bytes: int) -> int:
    """For how large a stage a rank has memory. What it needs whatever its share is (scratch, room for logits), and what
    it holds of the ends beyond its share of layers (a table that one machine leaves in its file), is taken off."""
    layers = zip(pairwise(own.memory_before), pairwise(whole.memory_before), strict=True)
    share = max((b - a) / max(1, d - c) for (a, b), (c, d) in layers)
    ends = (
        own.embedding_bytes - share * whole.embedding_bytes,
        (own.head_bytes - own.head_scratch_bytes) - share * (whole.head_bytes - whole.head_scratch_bytes),
        share * whole.shared_bytes - own.shared_bytes,
    )
    common_bytes = whole.overhead_bytes + whole.head_scratch_bytes
    left_bytes = memory_bytes - common_bytes - sum(max(0.0, each) for each in ends)
    return common_bytes + int(left_bytes / share)


def _held_by_all(members: Sequence[NodeCapacity]) -> tuple[tuple[int, int], ...]:
    """Layers that no member has to fetch: ranges that every one of them holds."""
    common = set(members[0].held)
    for offer in members[1:]:
        common &= set(offer.held)
    return tuple(sorted(common))


def rank_refusal(model: Model, asked: Parallelism) -> str:
    """Why a model cannot be computed by so many ranks, whatever the machines are; "" where it can."""
    if asked.tp < 2:
        return ""
    if model.runner:
        return f"{model.runner} runs it, which computes layers whole"
    if model.adapters:
        return "it has adapters beside it, which ranks do not add"
    if model.sees:
        return "it takes pictures, which ranks do not"
    if model.tensor is None:
        return "its layers cannot be divided"
    try:
        split_of(model.tensor, (1,) * asked.tp, asked.exchange)
    except UnsupportedModelError as error:
        return error.message
    return ""


def check_ranks(model: Model, asked: Parallelism | None) -> None:
    """UnsupportedModelError where a model can never be cut as a person asks."""
    why = "" if asked is None else rank_refusal(model, asked)
    if asked is not None and why:
        raise UnsupportedModelError(
            f"{model.name} cannot be computed by {asked.tp} machines together: {why}",
            hint="leave out tp=…, or take fewer; pp=3 cuts it into stages, each on a machine of its own",
        )


def rank_shortage(request: Request, offers: Sequence[NodeCapacity]) -> str:
    """Which machines are missing for the ranks that were asked for; "" where there are enough."""
    asked = request.parallel
    if asked.tp < 2:
        return ""
    why = rank_refusal(request.model, asked)
    if why:
        return why
    classes = Counter(offer.rank_class for offer in offers if offer.rank_class)
    stages = sum(count // asked.tp for count in classes.values())
    if stages >= max(1, asked.pp):
        return ""
    able = sum(classes.values())
    alike = f" of {len(classes)} exactness classes" if len(classes) > 1 else ""
    return (
        f"{asked} needs {asked.tp * max(1, asked.pp)} machines, {asked.tp} of one exactness class for each stage, and "
        f"of {len(offers)} that are here {able}{alike} can be ranks (on {', '.join(RANK_BACKENDS[:-1])}, "
        "not llama.cpp)"
    )


class OfferTable:
    """Who computes the stages of layouts: machines, or groups of them, made as they are asked for."""

    def __init__(self, request: Request) -> None:
        model, sizes, policy = request.model, request.sizes, request.policy
        self._model = model
        self._machines = {offer.node: offer for offer in request.offers if not offer.ranks}
        self._lines = link_table(request.links)
        self._unknown = MeasuredLink("", "", policy.default_rtt_s, policy.default_bytes_per_s)
        self._groups: dict[tuple[tuple[RankSeat, ...], Exchange], NodeCapacity | None] = {
            (offer.ranks, offer.exchange): offer for offer in request.offers if offer.ranks
        }
        self._layers = sizes.layer_count
        self._work = sizes.work_bytes(0, sizes.layer_count)
        self._common = _COMMON * self._layers * LAYER_OVERHEAD_BYTES if model.work_bytes else 0.0
        self._measured = {
            (frozenset(each.members), each.exchange): each.seconds_per_byte for each in request.group_times
        }
        self._factor = self._disappointment(request)

    def find(self, stage: Assignment) -> NodeCapacity | None:
        """None where one of its members is not offered, or they cannot compute this model together."""
        return self.group(stage.ranks, stage.exchange) if stage.ranks else self._machines.get(stage.node)

    def __getitem__(self, stage: Assignment) -> NodeCapacity:
        """Of a stage that is not to be had: one that never ends."""
        return self.find(stage) or NodeCapacity(
            stage.node, 0, inf, ranks=stage.ranks, exchange=stage.exchange
        )

    def line(self, a: str, b: str) -> MeasuredLink | None:
        """What was measured between two machines, if it is open."""
        link = self._lines.find(a, b)
        return link if link is not None and link.is_open else None

    def group(self, seats: tuple[RankSeat, ...], exchange: Exchange) -> NodeCapacity | None:
        """What these machines offer together; None where they cannot reach each other, or cannot divide this model."""
        key = seats, exchange
        if key not in self._groups:
            self._groups[key] = self._make(seats, exchange)
        return self._groups[key]

    def seconds_per_byte(self, seats: Sequence[RankSeat], exchange: Exchange) -> float:
        """Of a group, all layers and exchanges of the model counted: as measured in service, else as predicted and
        corrected by what others took; infinity where they cannot reach each other."""
        predicted = self._predicted(seats, exchange)
        measured = self._measured.get((frozenset(seat.node for seat in seats), exchange))
        if measured is not None and predicted < inf:
            return measured
        return predicted * self._factor

    def _disappointment(self, request: Request) -> float:
        """How much slower groups were in service than predicted. Nobody's luck is counted on elsewhere."""
        ratios = []
        for each in request.group_times:
            members = [self._machines[node] for node in each.members if node in self._machines]
            if len(members) == len(each.members):
                ratios.append(each.seconds_per_byte / self._predicted(seat_ranks(members), each.exchange))
        return max(1.0, statistics.median(ratios)) if ratios else 1.0

    def _predicted(self, seats: Sequence[RankSeat], exchange: Exchange) -> float:
        line, terms = self._slowest_line(seats), self._model.tensor
        if line is None or terms is None:
            return inf
        total = sum(seat.weight for seat in seats)
        compute_s = max(
            self._machines[seat.node].seconds_per_byte
            * (self._common + (self._work - self._common) * seat.weight / total)
            for seat in seats
        )
        count = _EXCHANGES[exchange]
        row_bytes = _VALUE_BYTES * _exchanged_values(terms, exchange) / count
        exchanges_s = self._layers * count * exchange_s(line, len(seats), row_bytes, exchange)
        return (compute_s + exchanges_s) / self._work

    def _make(self, seats: tuple[RankSeat, ...], exchange: Exchange) -> NodeCapacity | None:
        model, weights = self._model, tuple(seat.weight for seat in seats)
        members = [self._machines[seat.node] for seat in seats if seat.node in self._machines]
        line = self._slowest_line(seats)
        if len(members) < len(seats) or line is None or model.tensor is None:
            return None
        if not can_divide(model.tensor, weights, exchange):
            return None
        step_s = exchange_s(line, len(seats), _VALUE_BYTES * model.hidden, "reduce")
        prefills = [offer.prefill_seconds_per_byte for offer in members]
        known = [each for each in prefills if each is not None]
        return NodeCapacity(
            node=members[0].node,
            memory_bytes=_memory_bytes(model, members, weights, exchange),
            seconds_per_byte=self.seconds_per_byte(seats, exchange),
            overhead_s=max(offer.overhead_s for offer in members) + _STEP_EXCHANGES * step_s,
            held=_held_by_all(members),
            is_standby=any(offer.is_standby for offer in members),
            holding=members[0].holding,
            # Exchanges of a prompt are as many as those of a row, and carry its rows.
            prefill_seconds_per_byte=max(known) / len(seats) if len(known) == len(members) else None,
            rank_class=members[0].rank_class,
            is_measured=all(offer.is_measured for offer in members),
            ranks=seats,
            exchange=exchange,
        )

    def _slowest_line(self, seats: Sequence[RankSeat]) -> MeasuredLink | None:
        """Between any two: at each exchange all wait for it. None where one is closed."""
        pairs = combinations([seat.node for seat in seats], 2)
        found = [self._lines.find(*pair) or self._unknown for pair in pairs]
        if not all(link.is_open for link in found):
            return None
        return MeasuredLink(
            "", "", max(link.rtt_s for link in found), min(link.bytes_per_s for link in found)
        )


@lru_cache(maxsize=64)
def offers_of(request: Request) -> OfferTable:
    return OfferTable(request)

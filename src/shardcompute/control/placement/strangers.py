"""What placement offers to machines on probation: a few inner layers, where others can compute them again.

Nothing in the search knows of strangers. They offer memory for so few layers as the policy allows, hold the two ends
at a price that nobody can pay (`sizes.INNER`), and are offered only where machines that came with a token could hold
the whole model without them, and keep room for any such share besides: then whatever a stranger computes, one of them
can compute as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardcompute.control.placement.capacities import NodeCapacity
from shardcompute.control.placement.cuts import fill
from shardcompute.control.sizes import INNER, HeldSums, sizes_of
from shardcompute.control.state import Assignment, ClusterState, Model, Node
from shardcompute.trust.pools import may_audit

_KEEPERS = 2
"""Machines of a class that keep room to check strangers of it: one that checks, one that decides."""
_FILLED = 64
UNCHECKED = (
    "on probation, and no machine with a token that computes alike has room to compute its layers again"
)
TOO_SHORT = "on probation, and this model has no layers between the first and the last"

Offers = tuple[NodeCapacity, ...]


def offer_to_strangers(
    state: ClusterState, model: Model, offers: Offers, used: Sequence[Assignment]
) -> tuple[Offers, tuple[tuple[str, str], ...]]:
    """The offers as probation allows them, and who is left out and why. `used` are the stages of a chain that serves:
    it is not moved to make room for strangers."""
    strangers = [offer for offer in offers if state.nodes[offer.node].is_on_probation]
    if not strangers:
        return offers, ()
    if model.layer_count < 3 or model.is_whole:
        return _without(offers, strangers), tuple((each.node, TOO_SHORT) for each in strangers)
    most = state.pooling.layers_of(model.layer_count)
    trusted = tuple(offer for offer in offers if not state.nodes[offer.node].is_on_probation)
    placed = {each.node for each in used}
    checked: list[NodeCapacity] = []
    # Those that serve already come first, so that a newcomer sends nobody away.
    for each in sorted(strangers, key=lambda offer: (offer.node not in placed, offer.node)):
        keeping = _keep_room(state, model, trusted, state.nodes[each.node], most)
        if keeping is not None and _do_without(model, keeping, used):
            trusted = keeping
            checked.append(_limited(model, each, most))
    left_out = [each for each in strangers if each.node not in {known.node for known in checked}]
    found = tuple(sorted((*trusted, *checked), key=lambda offer: offer.node))
    return found, tuple((each.node, UNCHECKED) for each in left_out)


def _without(offers: Offers, left_out: Sequence[NodeCapacity]) -> Offers:
    return tuple(offer for offer in offers if offer not in left_out)


def _limited(model: Model, offer: NodeCapacity, most: int) -> NodeCapacity:
    room = most_bytes(sizes_of(model).on(offer.holding), most)
    return replace(
        offer,
        memory_bytes=offer.memory_bytes if room is None else min(offer.memory_bytes, room),
        holding=INNER + offer.holding,
        rank_class="",
        is_standby=False,
    )


def most_bytes(held: HeldSums, most: int) -> int | None:
    """So much memory that no more than so many layers in a row fit, wherever they are; None: the model has no more."""
    more = most + 1
    ranges = range(held.layer_count - more + 1)
    sizes = [held.memory_before[start + more] - held.memory_before[start] for start in ranges]
    return held.overhead_bytes + min(sizes) - 1 if sizes else None


def share_bytes(held: HeldSums, most: int) -> int:
    """What the largest share takes that a stranger may have."""
    most = min(most, held.layer_count)
    ranges = range(held.layer_count - most + 1)
    return held.overhead_bytes + max(
        held.memory_before[start + most] - held.memory_before[start] for start in ranges
    )


def _keep_room(
    state: ClusterState, model: Model, trusted: Offers, stranger: Node, most: int
) -> Offers | None:
    """The offers of machines that came with a token, of which some keep room to check this one; None: none can."""
    wanted = stranger.exactness_of(model)
    able = [
        offer
        for offer in trusted
        if state.nodes[offer.node].exactness_of(model) == wanted and may_check(state, offer.node)
    ]
    keepers = {offer.node for offer in able if offer.kept_bytes}
    for offer in sorted(able, key=lambda each: (not each.is_standby, -each.memory_bytes, each.node)):
        if len(keepers) >= _KEEPERS:
            break
        if offer.memory_bytes >= share_bytes(sizes_of(model).on(offer.holding), most):
            keepers.add(offer.node)
    if not keepers:
        return None
    return tuple(
        _keeping(model, offer, most) if offer.node in keepers and not offer.kept_bytes else offer
        for offer in trusted
    )


def may_check(state: ClusterState, node: str) -> bool:
    """Whoever came without a token checks nobody, record or not."""
    return may_audit(state.pool.get(node))


def _keeping(model: Model, offer: NodeCapacity, most: int) -> NodeCapacity:
    kept = share_bytes(sizes_of(model).on(offer.holding), most)
    return replace(offer, memory_bytes=offer.memory_bytes - kept, kept_bytes=kept)


def _do_without(model: Model, trusted: Offers, used: Sequence[Assignment]) -> bool:
    """Whether they could serve the model without strangers, and what they hold of it now fits in what they offer."""
    sizes, offers = sizes_of(model), {offer.node: offer for offer in trusted}
    for stage in used:
        offer = offers.get(stage.node)
        if offer is None or stage.ranks:
            continue
        if sizes.on(offer.holding).memory_bytes(stage.start, stage.stop) > offer.memory_bytes:
            return False
    largest = sorted(trusted, key=lambda offer: (-offer.memory_bytes, offer.node))
    orders = [largest, largest[::-1], *([each, *largest] for each in largest[:_FILLED])]
    return any(fill(_once(order), sizes)[1] == 0 for order in orders)


def _once(order: Sequence[NodeCapacity]) -> list[NodeCapacity]:
    return list(dict.fromkeys(order))

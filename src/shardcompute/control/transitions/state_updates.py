"""Small changes of the state from which the effects of events are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from shardcompute.control.sizes import memory_of, needs_of
from shardcompute.control.state import Assignment, Chain, ClusterState, Node, ShardPlace, Unrest, place_on


def with_node(state: ClusterState, node: Node) -> ClusterState:
    return replace(state, nodes={**state.nodes, node.id: node})


def with_chain(state: ClusterState, chain: Chain) -> ClusterState:
    return replace(state, chains={**state.chains, chain.id: chain})


def live_node(state: ClusterState, node_id: str, incarnation: int | None = None) -> Node | None:
    """The node if it is known, live and (where asked) in this very life."""
    node = state.nodes.get(node_id)
    if node is None or not node.is_live or incarnation not in (None, node.incarnation):
        return None
    return node


def is_on_probation(state: ClusterState, node_id: str) -> bool:
    """Whether it came without a token, and has no record yet."""
    member = state.pool.get(node_id)
    return member is not None and member.is_on_probation


def interrupt(state: ClusterState, chain: Chain, reason: str, *, lost: str = "") -> ClusterState:
    """This epoch of the chain is over, where a stage was `lost`: because of that node."""
    if not chain.is_live:
        return state
    if lost and lost not in chain.lost and chain.used_stages:
        chain = replace(chain, lost=(*chain.lost, lost))
        state = with_chain(state, chain)
    if chain.is_interrupted:
        return state
    status = "recovering" if chain.status in ("ready", "moving") else chain.status
    # What it was moving to was chosen for what it was.
    return with_chain(state, replace(chain, status=status, is_interrupted=True, reason=reason, target=None))


def retire(state: ClusterState, chain: Chain, reason: str) -> ClusterState:
    retired = replace(chain, status="retired", standbys=(), target=None, reason=reason)
    return with_chain(state, retired)


def forget_moves(state: ClusterState) -> ClusterState:
    """There are other machines, or other models, than when chains last moved: a move may promise something new."""
    for chain in state.live_chains():
        if chain.unrest.moves or chain.driver_unrest.moves or chain.search_at_s:
            unrest, driver_unrest = (
                Unrest(since_s=chain.unrest.since_s),
                Unrest(since_s=chain.driver_unrest.since_s),
            )
            calm = replace(chain, unrest=unrest, driver_unrest=driver_unrest, found=(), search_at_s=0.0)
            state = with_chain(state, calm)
    return state


def forget_left(state: ClusterState) -> ClusterState:
    """A machine or a line is not what it was: machines that were left for better ones may be the better ones now. How
    often chains have moved is not forgotten for it, so that what comes and goes moves them ever more seldom."""
    for chain in state.live_chains():
        if chain.unrest.left:
            state = with_chain(state, replace(chain, unrest=replace(chain.unrest, left=())))
    return state


def forget_retired(state: ClusterState) -> ClusterState:
    """Drop chains of which nothing is left anywhere, then unwanted models without chains."""
    is_settled = all(chain.is_live for chain in state.chains.values())
    if is_settled and all(entry.is_wanted for entry in state.models.values()):
        return state
    held = {shard.chain for node in state.nodes.values() for shard in node.shards}
    chains = {
        id: chain
        for id, chain in state.chains.items()
        if chain.is_live or not chain.is_released or id in held or chain.fenced_epoch < chain.epoch_to_fence
    }
    used = {chain.model for chain in chains.values()}
    models = {name: entry for name, entry in state.models.items() if entry.is_wanted or name in used}
    if len(chains) == len(state.chains) and len(models) == len(state.models):
        return state
    return replace(state, chains=chains, models=models)


class Claim(NamedTuple):
    """What a chain wants to hold on a node."""

    chain: str
    place: ShardPlace
    size_bytes: int
    is_standby: bool


def claimed_bytes(state: ClusterState, node_id: str, *, except_chain: str | None = None) -> int:
    """Memory of a node that stages (not standbys) of live chains lay claim to."""
    claims = claims_on(state, node_id)
    return sum(each.size_bytes for each in claims if not each.is_standby and each.chain != except_chain)


_claims: tuple[ClusterState, dict[str, list[Claim]]] | None = None
"""By node, of the state that was asked about last. States are frozen, so that the same one has the same claims: every
question about thousands of nodes would otherwise go through all chains again for each of them."""


def claims_on(state: ClusterState, node_id: str) -> Sequence[Claim]:
    """What live chains want to hold on a node."""
    global _claims
    known = _claims
    if known is None or known[0] is not state:
        known = _claims = (state, _claims_of(state))
    return known[1].get(node_id, ())


def _claims_of(state: ClusterState) -> dict[str, list[Claim]]:
    claims: dict[str, list[Claim]] = {}
    for chain in state.live_chains():
        model = state.models[chain.model].model
        for number, claim in enumerate(chain.claims):
            for node in claim.members:
                size_bytes, is_standby = memory_of(state, model, claim, node), number >= len(chain.stages)
                found = Claim(chain.id, place_on(chain, claim, node), size_bytes, is_standby)
                claims.setdefault(node, []).append(found)
    return claims


def trim_standbys(state: ClusterState) -> ClusterState:
    """Let go of standbys whose memory is needed for stages, later chains' first."""
    holders = {node for chain in state.live_chains() for each in chain.standbys for node in each.members}
    free = {id: state.nodes[id].room_bytes - claimed_bytes(state, id) for id in holders}
    for chain in state.live_chains():
        model = state.models[chain.model].model
        kept: list[Assignment] = []
        for standby in chain.standbys:
            needs = needs_of(state, model, standby)
            if all(size <= free[node] for node, size in needs.items()):
                for node, size in needs.items():
                    free[node] -= size
                kept.append(standby)
        if len(kept) < len(chain.standbys):
            state = with_chain(state, replace(chain, standbys=tuple(kept)))
    return state

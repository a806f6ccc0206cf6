"""`next_actions(state, now_s)`: what to decide and what to do, from the state and the time alone.

First the decisions, as `Record`s in order, each made in the light of those before; then the commands that
follow from the state with these applied. Without new events the answer stays the same; once the events that
answer the commands are applied it comes to rest, with every wanted model served or reported unservable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from zlib import crc32

from shardcompute.control.actions import (
    Action,
    ActivateChain,
    ConnectChain,
    CopyKv,
    FenceChain,
    LoadShard,
    Record,
    ReleaseNode,
    ReportProgress,
    ReportUnservable,
    RetireChain,
    Source,
    UnloadShard,
)
from shardcompute.control.decisions import (
    place_next_chain,
    which_chain_is_missing,
    which_chain_is_surplus,
    which_chain_needs_repair,
    which_standbys_are_wanted,
    who_is_suspected_or_lost,
)
from shardcompute.control.driver_placement import where_a_driver_belongs
from shardcompute.control.drivers import (
    all_drivers,
    driver_commands,
    kv_share,
    own_kv_tokens,
    stage_addresses,
)
from shardcompute.control.events import Event
from shardcompute.control.moves import (
    searches,
    which_move_is_judged,
    which_move_is_over,
    which_move_pays,
)
from shardcompute.control.placement.place import Unplaceable
from shardcompute.control.roles.seeding import computing_nodes, seed_commands, which_seed_is_wanted
from shardcompute.control.sizes import memory_of
from shardcompute.control.state import (
    Assignment,
    Chain,
    ClusterState,
    Node,
    ShardPlace,
    holds,
    is_loaded,
    loaded_fraction,
    place_on,
)
from shardcompute.control.transitions.apply import apply
from shardcompute.control.transitions.link_transitions import probe_commands, which_link_fails
from shardcompute.control.transitions.state_updates import claims_on
from shardcompute.control.watch.copies import which_copies_are_wanted
from shardcompute.control.watch.drift import probes_of_doubtful_links, which_stage_has_drifted
from shardcompute.control.watch.quiet import Rest, rest
from shardcompute.control.wording import loading_in_words

_MOST_SOURCES = 32

Question = Callable[[ClusterState, float], Event | None]
_WATCHING: tuple[Question, ...] = (
    which_link_fails,
    who_is_suspected_or_lost,
    which_stage_has_drifted,
    which_move_is_judged,
    which_copies_are_wanted,
)
"""Asked at every look; what they depend on comes with heartbeats and steps."""
_PLANNING: tuple[Question, ...] = (
    which_chain_is_surplus,
    which_chain_needs_repair,
    which_chain_is_missing,
    where_a_driver_belongs,
    which_move_is_over,
    which_move_pays,
    which_standbys_are_wanted,
    which_seed_is_wanted,
)


_rest: Rest | None = None
"""Of the look before, where nothing was decided (see `quiet`)."""


def next_actions(state: ClusterState, now_s: float) -> list[Action]:
    global _rest
    known = _rest
    if known is not None and _first(_WATCHING, state, now_s) is None and known.lasts(state, now_s):
        return [*known.commands, *probes_of_doubtful_links(state)]
    decided, events = decide(state, now_s)
    commands = next_commands(decided, now_s)
    _rest = None if events else rest(decided, now_s, commands)
    return [*(Record(event) for event in events), *commands, *probes_of_doubtful_links(decided)]


def decide(state: ClusterState, now_s: float) -> tuple[ClusterState, list[Event]]:
    """All decisions due now, and the state after them."""
    events: list[Event] = []
    # Far more than any cluster needs at once: a guard, so that two answers can never undo each other forever.
    limit = 8 * (
        len(state.nodes) + len(state.chains) + sum(m.wanted_chains for m in state.models.values()) + 1
    )
    while len(events) < limit:
        event = _first(_WATCHING + _PLANNING, state, now_s)
        if event is None:
            break
        changed = apply(state, event)
        if changed == state:
            break
        state = changed
        events.append(event)
    return state, events


def _first(questions: tuple[Question, ...], state: ClusterState, now_s: float) -> Event | None:
    answers = (question(state, now_s) for question in questions)
    return next((answer for answer in answers if answer is not None), None)


def next_commands(state: ClusterState, now_s: float) -> list[Action]:
    """What others must do for the state to become what was decided."""
    return [
        *_retirements(state),
        *_fences(state),
        *_unloads(state),
        *_loads(state),
        *_progress(state),
        *_connections(state),
        *_activations(state),
        *driver_commands(state),
        *_preparations(state),
        *seed_commands(state),
        *_kv_copies(state),
        *probe_commands(state, now_s),
        *searches(state, now_s),
        *_releases(state),
        *_reports(state, now_s),
    ]


def _retirements(state: ClusterState) -> Iterator[Action]:
    for id in sorted(state.chains):
        if not (state.chains[id].is_live or state.chains[id].is_released):
            yield RetireChain(id)


def _fences(state: ClusterState) -> Iterator[Action]:
    for id in sorted(state.chains):
        chain = state.chains[id]
        if chain.fenced_epoch < chain.epoch_to_fence:
            holders = {each.id for each in state.nodes.values() if any(s.chain == id for s in each.shards)}
            yield FenceChain(id, chain.epoch_to_fence, tuple(sorted(holders)))


def _is_claimed(state: ClusterState, node: Node, place: ShardPlace) -> bool:
    chain = state.chains.get(place[0])
    if chain is None:
        held = state.audits.get(place[0])
        return held is not None and (held.node, held.start, held.stop) == (node.id, *place[1:3])
    # What frames of an old epoch may still reach is kept until they are fenced.
    if chain.fenced_epoch < chain.epoch_to_fence:
        return True
    return chain.is_live and any(
        node.id in claim.members and place_on(chain, claim, node.id) == place for claim in chain.claims
    )


def _unloads(state: ClusterState) -> Iterator[Action]:
    for node in _answering(state):
        for shard in node.shards:
            if not _is_claimed(state, node, shard.place):
                yield UnloadShard(node.id, node.incarnation, *shard.place)


def _answering(state: ClusterState) -> list[Node]:
    return [state.nodes[id] for id in sorted(state.nodes) if state.nodes[id].is_answering]


def _has_room(state: ClusterState, node: Node) -> bool:
    """True when all that is claimed of this node fits beside what it has yet to unload."""
    claims = claims_on(state, node.id)
    known = {each.place for each in claims}
    stale = sum(shard.size_bytes for shard in node.shards if shard.place not in known)
    return sum(each.size_bytes for each in claims) + stale <= node.room_bytes


def _loads(state: ClusterState) -> Iterator[Action]:
    for chain in state.live_chains():
        if not chain.is_interrupted:
            for stage in chain.stages:
                yield from _load(state, chain, stage)


def _progress(state: ClusterState) -> Iterator[Action]:
    """How far chains are that drivers have used and wait for; of those that wait for something else than their
    layers, nothing."""
    for chain in state.live_chains():
        if chain.is_interrupted or not 0 < chain.connected_epoch < chain.epoch:
            continue
        missing = [stage for stage in chain.stages if any(_load(state, chain, stage))]
        if missing:
            yield ReportProgress(
                drivers=tuple(sorted({state.driver, *(each.driver for each in chain.drivers)})),
                chain=chain.id,
                epoch=chain.epoch,
                fraction=sum(loaded_fraction(state, chain, stage) for stage in chain.stages)
                / len(chain.stages),
                waits_for=loading_in_words(state, chain, missing),
            )


def _preparations(state: ClusterState) -> Iterator[Action]:
    for chain in state.live_chains():
        if chain.status == "ready":
            for standby in chain.standbys:
                yield from _load(state, chain, standby, is_standby=True)


def _kv_copies(state: ClusterState) -> Iterator[Action]:
    for chain in state.live_chains():
        target = chain.target
        if chain.status != "ready" or target is None or target.has_kv or not state.placing.moves_kv:
            continue
        if all(is_loaded(state, chain, stage) for stage in target.stages):
            now, then = stage_addresses(state, chain.stages), stage_addresses(state, target.stages)
            yield CopyKv(chain=chain.id, epoch=chain.epoch, stages=now, target=then)


def _load(
    state: ClusterState, chain: Chain, wanted: Assignment, *, is_standby: bool = False
) -> Iterator[Action]:
    for member in wanted.members:
        node = state.nodes[member]
        if not node.is_answering or holds(state, chain, wanted, member) or not _has_room(state, node):
            continue
        yield LoadShard(
            node=node.id,
            incarnation=node.incarnation,
            chain=chain.id,
            model=chain.model,
            start=wanted.start,
            stop=wanted.stop,
            size_bytes=memory_of(state, state.models[chain.model].model, wanted, member),
            sources=_sources(state, chain.model, wanted, member),
            is_standby=is_standby,
            tensor=wanted.place_of(member),
        )


def _sources(state: ClusterState, model: str, wanted: Assignment, loader: str) -> tuple[Source, ...]:
    """Peers that hold some of the wanted layers, those with most of them first. Of very many some, others for each
    who asks, so that not all fetch from the same few. Where those who compute nothing have all of it, they alone."""
    found = [
        (held.start, held.stop, node)
        for node in state.nodes.values()
        if node.is_answering and node.id != loader
        for held in node.cached
        if held.model == model and held.start < wanted.stop and wanted.start < held.stop
    ]
    computing = computing_nodes(state) if found else set()
    idle = [each for each in found if each[2].id not in computing]
    if {layer for start, stop, _ in idle for layer in range(start, stop)} >= set(
        range(wanted.start, wanted.stop)
    ):
        found = idle
    sources = [
        Source(node.id, node.address, max(start, wanted.start), min(stop, wanted.stop))
        for start, stop, node in found
    ]
    if len(sources) > _MOST_SOURCES:
        sources.sort(key=lambda each: (each.start - each.stop, crc32(f"{loader} {each.node}".encode())))
    return tuple(
        sorted(sources[:_MOST_SOURCES], key=lambda each: (each.start - each.stop, each.node, each.start))
    )


def _can_run(state: ClusterState, chain: Chain) -> bool:
    return not chain.is_interrupted and all(
        is_loaded(state, chain, stage) and all(state.nodes[node].is_answering for node in stage.members)
        for stage in chain.stages
    )


def _connections(state: ClusterState) -> Iterator[Action]:
    for chain in state.live_chains():
        if chain.connected_epoch < chain.epoch and _can_run(state, chain):
            yield ConnectChain(
                chain=chain.id,
                epoch=chain.epoch,
                model=chain.model,
                stages=stage_addresses(state, chain.stages),
                used_stages=chain.used_stages,
                kv_tokens=kv_share(state, chain, state.driver),
            )


def _activations(state: ClusterState) -> Iterator[Action]:
    for chain in state.live_chains():
        is_connected = chain.connected_epoch == chain.epoch
        if is_connected and chain.status != "ready" and _can_run(state, chain):
            yield ActivateChain(
                chain=chain.id,
                epoch=chain.epoch,
                model=chain.model,
                stages=stage_addresses(state, chain.stages),
                kv_tokens=own_kv_tokens(state, chain),
            )


def _releases(state: ClusterState) -> Iterator[Action]:
    chains = state.live_chains()
    busy = {node for chain in chains for claim in chain.claims for node in claim.members}
    busy |= {attachment.driver for chain in chains for attachment in chain.drivers}
    for node in _answering(state):
        if node.is_draining and not node.rest_reason and not node.shards and node.id not in busy:
            yield ReleaseNode(node.id, node.incarnation)


def _reports(state: ClusterState, now_s: float) -> Iterator[Action]:
    for name in sorted(state.models):
        requested, chains = state.models[name], state.live_chains(name)
        if not requested.is_wanted:
            continue
        wants: list[tuple[int, tuple[str, ...]]] = [
            (chain.missing_bytes, (chain.reason,)) for chain in chains if chain.status == "broken"
        ]
        missing = requested.chain_count - len(chains)
        if missing > 0:
            placement = place_next_chain(state, name, missing, now_s)
            if isinstance(placement, Unplaceable):
                wants.append((placement.missing_bytes, placement.reasons))
        for driver, namespace in all_drivers(state):
            for missing_bytes, reasons in wants:
                yield ReportUnservable(driver, namespace, name, missing_bytes, reasons)

"""`apply(state, event)`: how each event changes what we believe.

Total: an event that speaks of something unknown, or of a former incarnation or epoch, changes nothing, and
none raises. What always holds afterwards: the stages of a chain cover its model exactly, epochs only grow,
lost nodes hold nothing, a ready chain is connected and every one of its shards is in a live node's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.driver_placement import HOME
from shardcompute.control.drivers import kv_share, own_kv_tokens, with_attachment
from shardcompute.control.events import Event
from shardcompute.control.state import (
    Attachment,
    Chain,
    ChainStatus,
    ClusterState,
    MoveTarget,
    RequestedModel,
    Unrest,
    covers,
    hops,
    is_loaded,
)
from shardcompute.control.transitions.audit_transitions import AUDITS
from shardcompute.control.transitions.copies_transitions import COPIES
from shardcompute.control.transitions.link_transitions import LINKS, without_breaks
from shardcompute.control.transitions.move_transitions import (
    MOVING,
    lives_after,
    record_end,
    record_made,
    record_plan,
    standbys_after,
)
from shardcompute.control.transitions.node_transitions import MEMBERSHIP
from shardcompute.control.transitions.shard_transitions import SHARDS
from shardcompute.control.transitions.state_updates import (
    forget_moves,
    forget_retired,
    live_node,
    retire,
    trim_standbys,
    with_chain,
)
from shardcompute.control.transitions.timing_transitions import TIMES


def apply(state: ClusterState, event: Event) -> ClusterState:
    change = _CHANGES.get(type(event))
    return state if change is None else forget_retired(change(state, event))


def _request(state: ClusterState, event: happened.ModelRequested) -> ClusterState:
    model = event.model
    if model.layer_count == 0 or event.chain_count < 1:
        return state
    if model.work_bytes and len(model.work_bytes) != model.layer_count:
        return state
    old = state.models.get(model.name)
    if old is not None and old.model != model:
        # Its shards have the wrong sizes or the wrong form: nothing of the old chains can be kept.
        for chain in state.live_chains(model.name):
            state = retire(state, chain, "the model was requested in another form")
    requested = RequestedModel(model, event.chain_count, has_draft_model=event.has_draft_model)
    # What a person asked for once holds until they ask for something else.
    asked = event.parallel or (None if old is None else old.parallel)
    if asked is not None:
        requested = replace(requested, parallel=asked)
    if old is not None:
        requested = replace(requested, is_kept=old.is_kept, extra_chains=old.extra_chains)
    return forget_moves(replace(state, models={**state.models, model.name: requested}))


def _drop(state: ClusterState, event: happened.ModelDropped) -> ClusterState:
    old = state.models.get(event.model)
    if old is None:
        return state
    return forget_moves(replace(state, models={**state.models, event.model: replace(old, is_wanted=False)}))


def _plan(state: ClusterState, event: happened.ChainPlanned) -> ClusterState:
    requested = state.models.get(event.model)
    if event.chain in state.chains or requested is None or not requested.is_wanted:
        return state
    chain = Chain(
        id=event.chain,
        model=event.model,
        epoch=1,
        stages=event.stages,
        reason=event.reason,
        unrest=Unrest(since_s=event.now_s),
    )
    if not _is_sound(state, chain):
        return state
    state = replace(state, chains_planned=state.chains_planned + 1)
    return trim_standbys(with_chain(state, chain))


def _reshape(state: ClusterState, event: happened.ChainReshaped) -> ClusterState:
    chain = state.chains.get(event.chain)
    if chain is None or not chain.is_live or event.epoch != chain.epoch + 1:
        return state
    reshaped = replace(
        chain,
        epoch=event.epoch,
        stages=event.stages,
        standbys=standbys_after(state, chain, event.stages),
        status=_status_of_reshaped(chain),
        is_interrupted=False,
        reason=event.reason,
        last_move=event.reason,
        target=None,
        found=(),
        search_at_s=0.0,
        unrest=replace(chain.unrest, since_s=event.now_s),
        lived=chain.lived if event.stages == chain.stages else lives_after(chain, event.now_s),
        ring=None,
        # Along other machines another place may be best for it.
        driver_unrest=chain.driver_unrest if event.stages == chain.stages else Unrest(since_s=event.now_s),
        missing_bytes=0,
        avoided=(),
        host_failures=(),
    )
    if not _is_sound(state, reshaped):
        return state
    if chain.target is not None and chain.target.stages == event.stages:
        state = record_made(state, chain, event.epoch)
    return trim_standbys(with_chain(state, reshaped))


def _status_of_reshaped(chain: Chain) -> ChainStatus:
    if chain.status in ("planned", "loading"):
        return "planned"
    return "moving" if chain.status == "ready" and not chain.is_interrupted else "recovering"


def _plan_move(state: ClusterState, event: happened.MovePlanned) -> ClusterState:
    chain = _current(state, event.chain, event.epoch)
    if chain is None or event.stages == chain.stages:
        return state
    target = MoveTarget(event.stages, event.reason, event.is_urgent)
    if not _is_sound(state, replace(chain, stages=event.stages)):
        return state
    unrest = chain.unrest
    if not event.is_urgent:
        unrest = unrest.after_move(state.placing, event.now_s, chain.stages)
    state = record_plan(state, chain, event)
    return with_chain(state, replace(chain, target=target, unrest=unrest, last_move=event.reason))


def _find_layout(state: ClusterState, event: happened.LayoutFound) -> ClusterState:
    chain = _current(state, event.chain, event.epoch)
    if chain is None:
        return state
    is_sound = bool(event.stages) and _is_sound(state, replace(chain, stages=event.stages))
    search_at_s = event.now_s + state.placing.search_every_s
    return with_chain(state, replace(chain, found=event.stages if is_sound else (), search_at_s=search_at_s))


def _note_kv(state: ClusterState, event: happened.KvCopied) -> ClusterState:
    chain = _current(state, event.chain, event.epoch)
    if chain is None or chain.target is None or chain.target.stages != event.stages:
        return state
    return with_chain(state, replace(chain, target=replace(chain.target, has_kv=True)))


def _drop_move(state: ClusterState, event: happened.MoveDropped) -> ClusterState:
    chain = _current(state, event.chain, event.epoch)
    if chain is None or chain.target is None:
        return state
    unrest = replace(chain.unrest, since_s=event.now_s)
    if not chain.target.is_urgent:
        # It was no better than this: the same is not tried again.
        unrest = chain.unrest.after_move(state.placing, event.now_s, chain.target.stages)
    state = record_end(state, chain, event.reason)
    return with_chain(state, replace(chain, target=None, unrest=unrest, last_move=event.reason))


def _is_sound(state: ClusterState, chain: Chain) -> bool:
    layer_count = state.models[chain.model].model.layer_count
    return covers(chain.stages, layer_count) and all(live_node(state, node) for node in chain.members)


def _choose_standbys(state: ClusterState, event: happened.StandbysChosen) -> ClusterState:
    chain = state.chains.get(event.chain)
    if chain is None or not chain.is_live or event.epoch != chain.epoch:
        return state
    layer_count = state.models[chain.model].model.layer_count
    standbys = tuple(
        standby
        for standby in event.standbys
        if 0 <= standby.start < standby.stop <= layer_count
        and standby not in chain.stages
        and standby.is_sound
        and all(live_node(state, node) for node in standby.members)
    )
    return trim_standbys(with_chain(state, replace(chain, standbys=tuple(dict.fromkeys(standbys)))))


def _connect(state: ClusterState, event: happened.ChainConnected) -> ClusterState:
    chain = _current(state, event.chain, event.epoch)
    if chain is None or not all(is_loaded(state, chain, stage) for stage in chain.stages):
        return state
    # The coordinator's own driver is expected by the stages, and does not use this epoch yet.
    share = event.kv_tokens or kv_share(state, chain, state.driver)
    chain = with_attachment(chain, Attachment(state.driver, 0, 0, share))
    return with_chain(state, replace(chain, connected_epoch=event.epoch))


def _make_ready(state: ClusterState, event: happened.ChainReady) -> ClusterState:
    chain = _current(state, event.chain, event.epoch)
    if chain is None or chain.connected_epoch != event.epoch:
        return state
    own = Attachment(state.driver, 0, event.epoch, own_kv_tokens(state, chain))
    ready = replace(chain, status="ready", missing_bytes=0, used_stages=chain.stages, lost=())
    return without_breaks(with_chain(state, with_attachment(ready, own)), hops(state, chain))


def _attach(state: ClusterState, event: happened.DriverAttached) -> ClusterState:
    chain = state.chains.get(event.chain)
    if chain is None or not chain.is_live or event.epoch > chain.epoch:
        return state
    attachment = Attachment(event.driver, event.session_namespace, event.epoch, event.kv_tokens)
    failures = tuple(node for node in chain.host_failures if node != event.driver)
    return with_chain(state, with_attachment(replace(chain, host_failures=failures), attachment))


def _detach(state: ClusterState, event: happened.DriverDetached) -> ClusterState:
    chain = state.chains.get(event.chain)
    if chain is None:
        return state
    left = tuple(
        each
        for each in chain.drivers
        if (each.driver, each.session_namespace) != (event.driver, event.session_namespace)
    )
    return with_chain(state, replace(chain, drivers=left))


def _place_driver(state: ClusterState, event: happened.DriverPlaced) -> ClusterState:
    chain, node = state.chains.get(event.chain), live_node(state, event.node)
    if chain is None or not chain.is_live or (event.node != HOME and (node is None or not node.can_host)):
        return state
    unrest = replace(chain.driver_unrest, since_s=event.now_s)
    if event.node != HOME:
        unrest = chain.driver_unrest.after_move(state.placing, event.now_s)
    return with_chain(state, replace(chain, driver_host=event.node, driver_unrest=unrest))


def _fail_host(state: ClusterState, event: happened.DriverHostFailed) -> ClusterState:
    chain = state.chains.get(event.chain)
    if chain is None or not chain.is_live:
        return state
    failures = (*chain.host_failures, event.node)
    if failures.count(event.node) < state.health.host_failures:
        return with_chain(state, replace(chain, host_failures=failures))
    chain = replace(chain, host_failures=tuple(node for node in failures if node != event.node))
    # Some stages may have let it in.
    place = (event.node, event.session_namespace)
    if all((each.driver, each.session_namespace) != place for each in chain.drivers):
        chain = with_attachment(chain, Attachment(event.node, event.session_namespace, 0, 0))
    return with_chain(state, replace(chain, avoided=tuple(sorted({*chain.avoided, event.node}))))


def _current(state: ClusterState, chain_id: str, epoch: int) -> Chain | None:
    chain = state.chains.get(chain_id)
    if chain is None or not chain.is_live or chain.is_interrupted or chain.epoch != epoch:
        return None
    return chain


def _fence(state: ClusterState, event: happened.ChainFenced) -> ClusterState:
    chain = state.chains.get(event.chain)
    if chain is None:
        return state
    fenced_epoch = max(chain.fenced_epoch, min(event.epoch, chain.epoch_to_fence))
    return with_chain(state, replace(chain, fenced_epoch=fenced_epoch))


def _break(state: ClusterState, event: happened.ChainBroken) -> ClusterState:
    chain = state.chains.get(event.chain)
    if chain is None or not chain.is_live or not chain.is_interrupted or event.epoch != chain.epoch:
        return state
    broken = replace(chain, status="broken", missing_bytes=event.missing_bytes, reason=event.reason)
    return with_chain(state, broken)


def _retire(state: ClusterState, event: happened.ChainRetired) -> ClusterState:
    chain = state.chains.get(event.chain)
    return state if chain is None or not chain.is_live else retire(state, chain, event.reason)


def _release(state: ClusterState, event: happened.ChainReleased) -> ClusterState:
    chain = state.chains.get(event.chain)
    if chain is None or chain.is_live:
        return state
    return with_chain(state, replace(chain, is_released=True))


def _remember(state: ClusterState, event: happened.StateRemembered) -> ClusterState:
    # Who drives and what counts as good is said by whoever starts the cluster now.
    return replace(
        event.state, driver=state.driver, health=state.health, placing=state.placing, pooling=state.pooling
    )


_CHANGES: dict[type, Callable[[ClusterState, Any], ClusterState]] = {
    **MEMBERSHIP,
    **LINKS,
    **SHARDS,
    **TIMES,
    **MOVING,
    **AUDITS,
    **COPIES,
    happened.StateRemembered: _remember,
    happened.ModelRequested: _request,
    happened.ModelDropped: _drop,
    happened.ChainPlanned: _plan,
    happened.ChainReshaped: _reshape,
    happened.MovePlanned: _plan_move,
    happened.LayoutFound: _find_layout,
    happened.KvCopied: _note_kv,
    happened.MoveDropped: _drop_move,
    happened.StandbysChosen: _choose_standbys,
    happened.ChainConnected: _connect,
    happened.ChainReady: _make_ready,
    happened.DriverAttached: _attach,
    happened.DriverDetached: _detach,
    happened.DriverPlaced: _place_driver,
    happened.DriverHostFailed: _fail_host,
    happened.ChainFenced: _fence,
    happened.ChainBroken: _break,
    happened.ChainRetired: _retire,
    happened.ChainReleased: _release,
}

"""Milestones: what happened between two states of a cluster, in words for people.

From states that lie far apart something is told less, and nothing wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardcompute.control.state import Chain, ClusterState, Node, RequestedModel
from shardcompute.control.wording import layout_in_words
from shardcompute.core.units import count_of, format_bytes, name_layers
from shardcompute.node.telemetry.history_store import EventView


def milestones(before: ClusterState, after: ClusterState) -> list[EventView]:
    """Who came and went, what they fetch and hold, what is asked for, and which chains serve; nothing when all is as
    it was."""
    if after is before:
        return []
    events: list[EventView] = []
    if after.nodes is not before.nodes:
        changed = [node for id, node in after.nodes.items() if before.nodes.get(id) is not node]
        for node in sorted(changed, key=lambda node: (node.name, node.id)):
            tell = _node_events if node.can_work else _driver_events
            events += tell(before.nodes.get(node.id), node)
    if after.models is not before.models:
        for name in sorted({*before.models, *after.models}):
            events += _model_events(name, before.models.get(name), after.models.get(name))
    if after.moves is not before.moves:
        told = {move.number for move in before.moves if move.outcome}
        for move in after.moves:
            if move.made_epoch and move.outcome and move.number not in told:
                text = f"{move.model} has moved: {move.outcome}"
                events.append(EventView(kind="chain", text=text, model=move.model, chain=move.chain))
    if after.chains is not before.chains:
        for id in sorted(after.chains):
            events += _chain_events(before.chains.get(id), after.chains[id], after)
    return events


def _node_events(old: Node | None, node: Node) -> Iterator[EventView]:
    was_live = old is not None and old.is_live
    if not node.is_live:
        if was_live:
            yield _parting(node, node.name)
        return
    if old is None or not was_live or old.incarnation != node.incarnation:
        verb = "joined" if old is None else "is back"
        power = node.device_label if node.device != "cpu" else ""
        power = power or count_of(node.threads, "thread")
        text = f"{node.name} {verb}: {power}, {format_bytes(node.memory_bytes)} of memory"
        yield EventView(kind="node", tone="good", text=text, node=node.id)
        for each in node.unused_devices:
            text = f"{node.name}: {each.label} cannot be used, {each.problem}; {each.fix}"
            yield EventView(kind="node", tone="warn", text=text, node=node.id)
    elif node.status == "suspected" and old.status != "suspected":
        yield EventView(kind="node", tone="warn", text=f"{node.name} has not been heard from", node=node.id)
    elif old.status == "suspected" and node.is_answering:
        yield EventView(kind="node", tone="good", text=f"{node.name} is heard again", node=node.id)
    if old is not None and old.rest_reason != node.rest_reason:
        rests = f"rests: {node.rest_reason}; others take over what it does"
        text = f"{node.name} {rests if node.rest_reason else 'works again'}"
        yield EventView(kind="node", tone="warn" if node.rest_reason else "good", text=text, node=node.id)
    elif node.quarantine and old is not None and not old.quarantine:
        text = f"{node.name} is in quarantine: {node.quarantine}"
        yield EventView(kind="node", tone="bad", text=text, node=node.id)
    elif old is not None and old.is_on_probation and not node.is_on_probation and not node.quarantine:
        text = f"{node.name} is promoted: what it computed on probation passed all audits"
        yield EventView(kind="node", tone="good", text=text, node=node.id)
    elif old is not None and old.quarantine and not node.quarantine:
        yield EventView(kind="node", tone="good", text=f"{node.name} is pardoned", node=node.id)
    elif node.is_draining and old is not None and not old.is_draining:
        text = f"{node.name} is being relieved of its work"
        yield EventView(kind="node", tone="warn", text=text, node=node.id)
    if old is not None and old.incarnation == node.incarnation and old.memory_bytes < node.memory_bytes:
        text = f"{node.name} offers {format_bytes(node.memory_bytes)} of memory again"
        yield EventView(kind="node", tone="good", text=text, node=node.id)
    yield from _layer_events(old if was_live else None, node)


def _layer_events(old: Node | None, node: Node) -> Iterator[EventView]:
    fetched = set() if old is None else {(load.chain, load.start, load.stop) for load in old.loading}
    for load in node.loading:
        if (load.chain, load.start, load.stop) not in fetched:
            text = f"{node.name} fetches {name_layers(load.start, load.stop)}"
            yield EventView(kind="layers", text=text, node=node.id, chain=load.chain)
    held = set() if old is None else set(old.shards)
    for shard in node.shards:
        if shard not in held:
            text = f"{node.name} holds {name_layers(shard.start, shard.stop)} of {shard.model}"
            yield EventView(
                kind="layers", tone="good", text=text, node=node.id, model=shard.model, chain=shard.chain
            )
    known = set() if old is None else {refusal.reason for refusal in old.refusals}
    for refusal in node.refusals:
        if refusal.reason not in known:
            text = f"{node.name} could not hold {refusal.model}: {refusal.reason}"
            yield EventView(kind="layers", tone="bad", text=text, node=node.id, model=refusal.model)


def _driver_events(old: Node | None, node: Node) -> Iterator[EventView]:
    was_live = old is not None and old.is_live
    if not node.is_live:
        if was_live:
            yield _parting(node, f"the driver {node.name}")
    elif not was_live:
        where = f", at {node.api_url}" if node.api_url else ""
        text = f"{node.name} {'joined' if old is None else 'is back'} as a driver{where}"
        yield EventView(kind="node", tone="good", text=text, node=node.id)


def _parting(node: Node, name: str) -> EventView:
    if node.status == "gone":
        return EventView(kind="node", tone="warn", text=f"{name} left", node=node.id)
    reason = f": {node.status_reason}" if node.status_reason else ""
    return EventView(kind="node", tone="bad", text=f"{name} is {node.status}{reason}", node=node.id)


def _model_events(name: str, old: RequestedModel | None, new: RequestedModel | None) -> Iterator[EventView]:
    was_wanted, is_wanted = (each is not None and each.is_wanted for each in (old, new))
    if was_wanted and not is_wanted:
        yield EventView(kind="model", tone="warn", text=f"{name} is no longer wanted", model=name)
    elif is_wanted and new is not None and (old is None or not was_wanted or old.model != new.model):
        text = f"{name} is to be served ({new.model.weight_form}, {count_of(new.chain_count, 'chain')})"
        yield EventView(kind="model", text=text, model=name)
    if old is not None and new is not None and old.is_kept != new.is_kept:
        stays = "stays as it is, but for machines that fail" if new.is_kept else "may move again"
        yield EventView(kind="model", text=f"the layout of {name} {stays}", model=name)
    if old is not None and new is not None and new.copies_s != old.copies_s and new.copies_reason:
        yield EventView(kind="model", text=f"copies of {name}: {new.copies_reason}", model=name)


def _move_events(old: Chain | None, chain: Chain) -> Iterator[EventView]:
    """Of a chain that serves while another layout of it is loaded."""
    former = None if old is None else old.target
    if chain.target is not None and former is None:
        text = f"{chain.model} is to move: {chain.target.reason}"
        yield EventView(kind="chain", text=text, model=chain.model, chain=chain.id)
    elif former is not None and chain.target is None and chain.status == "ready":
        text = f"{chain.model} stays where it is: {chain.last_move}"
        yield EventView(kind="chain", text=text, model=chain.model, chain=chain.id)


def _chain_events(old: Chain | None, chain: Chain, state: ClusterState) -> Iterator[EventView]:
    yield from _move_events(old, chain)
    is_same = old is not None and (old.status, old.epoch) == (chain.status, chain.epoch)
    is_under_way = old is not None and old.status == chain.status == "recovering"
    if is_same or is_under_way or chain.status in ("planned", "loading", "retired"):
        return
    reason = f": {chain.reason}" if chain.reason else ""
    if chain.status == "ready":
        tone, text = "good", f"{chain.model} is served by {_way(chain, state)}{_newcomers(old, chain, state)}"
    elif chain.status == "moving":
        tone, text = "plain", f"{chain.model} moves to another layout{reason}"
    elif chain.status == "recovering" and old is not None and old.status == "broken":
        tone, text = "plain", f"{chain.model} can be served again and is being loaded{reason}"
    elif chain.status == "recovering":
        tone, text = "warn", f"{chain.model} is being repaired{reason}"
    else:
        tone, text = "bad", f"{chain.model} cannot be served{reason}"
    yield EventView(kind="chain", tone=tone, text=text, model=chain.model, chain=chain.id)  # type: ignore[arg-type]


def _way(chain: Chain, state: ClusterState) -> str:
    return layout_in_words(state, chain.stages)


def _newcomers(old: Chain | None, chain: Chain, state: ClusterState) -> str:
    """Who serves it now and did not when it was last in use."""
    former = set() if old is None else {node for stage in old.used_stages for node in stage.members}
    names = [_name(node, state) for node in chain.members if former and node not in former]
    return f"; {', '.join(names)} took over" if names else ""


def _name(node: str, state: ClusterState) -> str:
    return state.nodes[node].name if node in state.nodes else node

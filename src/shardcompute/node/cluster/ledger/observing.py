"""Observing a cluster for its ledger: who is a member and who has which layers, as far as that differs from what is on
record. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shardcompute.control.state import Assignment, Chain, ClusterState, Node
from shardcompute.core.fields import shorten
from shardcompute.trust.ledger import Entry
from shardcompute.trust.ledger.records import LaidStage, LayoutSet, MemberChanged, Standing

_MOST_LABEL = 500
Layout = tuple[int, tuple[LaidStage, ...]]


@dataclass(slots=True)
class Observed:
    """What was seen last: standings by node, and epoch and stages by chain."""

    standings: dict[str, Standing | None] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    state: ClusterState | None = None

    def look(self, state: ClusterState, revoked: Collection[str]) -> list[Entry]:
        """What is new since the last look; nothing when all is as it was."""
        before, self.state = self.state, state
        entries: list[Entry] = []
        if before is None or state.nodes is not before.nodes:
            known: Mapping[str, Node] = {} if before is None else before.nodes
            changed = [node for id, node in state.nodes.items() if known.get(id) is not node]
            entries += self._members(changed, revoked)
            entries += self._gone([node for id, node in known.items() if id not in state.nodes], revoked)
        if before is None or state.chains is not before.chains:
            entries += self._chains(state)
        return entries

    def _members(self, nodes: Collection[Node], revoked: Collection[str]) -> list[Entry]:
        found: list[Entry] = []
        for node in sorted(nodes, key=lambda each: each.id):
            standing = _standing_of(node, revoked)
            former = self.standings.get(node.id)
            if standing == former or (former is None and standing in ("left", "lost")):
                continue
            self.standings[node.id] = standing
            found.append(_member(node, standing))
        return found

    def _gone(self, nodes: Collection[Node], revoked: Collection[str]) -> list[Entry]:
        """Of whom the state says nothing any more."""
        found: list[Entry] = []
        for node in sorted(nodes, key=lambda each: each.id):
            standing: Standing = "revoked" if node.id in revoked else "left"
            if self.standings.get(node.id) not in (None, standing, "revoked"):
                self.standings[node.id] = standing
                found.append(_member(node, standing))
        return found

    def _chains(self, state: ClusterState) -> list[Entry]:
        found: list[Entry] = []
        for id, chain in sorted(state.chains.items()):
            former, layout = self.layouts.get(id), _layout_of(chain)
            if layout == former or (former is None and not layout[1]):
                continue
            if former is not None and former[1] and layout[0] < former[0]:
                # Another chain of the same name: the one before is over.
                found.append(_laid(id, chain.model, (former[0], ())))
            self.layouts[id] = layout
            found.append(_laid(id, chain.model, layout))
        for id in sorted(self.layouts.keys() - state.chains.keys()):
            epoch, stages = self.layouts.pop(id)
            if stages:
                found.append(_laid(id, "", (epoch, ())))
        return found


def _standing_of(node: Node, revoked: Collection[str]) -> Standing:
    if node.id in revoked:
        return "revoked"
    if node.quarantine and node.is_live:
        return "quarantined"
    if node.is_live:
        return "joined"
    return "lost" if node.status == "lost" else "left"


def _member(node: Node, standing: Standing) -> MemberChanged:
    reason = node.quarantine if standing == "quarantined" else node.status_reason
    return MemberChanged(
        number=0,
        at_s=0,
        node=shorten(node.id, _MOST_LABEL),
        name=shorten(node.name, _MOST_LABEL),
        standing=standing,
        role=node.role,
        reason="" if standing == "joined" else shorten(reason),
    )


def _layout_of(chain: Chain) -> Layout:
    return chain.epoch, tuple(_laid_stage(each) for each in chain.stages) if chain.is_live else ()


def _laid_stage(stage: Assignment) -> LaidStage:
    return LaidStage(tuple(shorten(node, _MOST_LABEL) for node in stage.members), stage.start, stage.stop)


def _laid(chain: str, model: str, layout: Layout) -> LayoutSet:
    epoch, stages = layout
    return LayoutSet(
        number=0,
        at_s=0,
        chain=shorten(chain, _MOST_LABEL),
        model=shorten(model, _MOST_LABEL),
        epoch=epoch,
        stages=stages,
    )

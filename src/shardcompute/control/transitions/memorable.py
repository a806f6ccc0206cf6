"""The state as it is worth remembering: without what is about now, and is found out anew after a restart.

Replaying the journal gives the state without the effects of events that are not journalled (see `events`); a state
that is remembered in place of a journal must not bring them in.
"""

from __future__ import annotations

from msgspec.structs import replace

from shardcompute.control.state import ClusterState


def memorable(state: ClusterState) -> ClusterState:
    nodes = {
        id: replace(node, loading=(), stage_times=(), seed=None, seed_problem="", seed_after_s=0.0)
        if node.loading or node.stage_times or node.seed or node.seed_problem
        else node
        for id, node in state.nodes.items()
    }
    chains = {
        id: replace(
            chain,
            target=None if chain.target is None else replace(chain.target, has_kv=False),
            drivers=tuple(each for each in chain.drivers if each.driver == state.driver),
            found=(),
            search_at_s=0.0,
            ring=None,
            avoided=(),
            host_failures=(),
        )
        for id, chain in state.chains.items()
    }
    return replace(state, nodes=nodes, chains=chains, link_breaks=(), audits={}, demand={})

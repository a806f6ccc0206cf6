"""Links that break again as soon as they are used: after a few times they count as closed, until a probe gets
through."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from shardcompute.control.events import LinkBroken, LinkMeasured
from shardcompute.control.state import ClusterState
from shardcompute.node.rpc.commands import Peer

log = logging.getLogger(__name__)
_LIMIT = 3
_PROBE_S = 30.0
Pair = tuple[str, str]
AskToProbe = Callable[[str, Peer], None]
"""Have a node measure its link to another."""


class LinkBreaker:
    """Counts how often a link broke without having been part of a working chain in between."""

    def __init__(self, driver: Peer, limit: int = _LIMIT) -> None:
        self._driver = driver
        self._limit = limit
        self._breaks: Counter[Pair] = Counter()
        self._closed: dict[Pair, Pair] = {}
        self._next_probe_s = 0.0

    def broke(self, state: ClusterState, event: LinkBroken) -> LinkMeasured | None:
        """A link interrupted a chain; once too often between two nodes that are there, it counts as closed."""
        pair = _pair(event.reporter, event.node)
        if not all(self._is_answering(state, node) for node in pair):
            return None
        self._breaks[pair] += 1
        if self._breaks[pair] < self._limit:
            return None
        del self._breaks[pair]
        self._closed[pair] = (event.reporter, event.node)
        log.warning("%s cannot reach %s: planning around that link", event.reporter, event.node)
        known, policy = state.link(*pair), state.placing
        rtt_s = policy.default_rtt_s if known is None else known.rtt_s
        bytes_per_s = policy.default_bytes_per_s if known is None else known.bytes_per_s
        return LinkMeasured(*pair, rtt_s, bytes_per_s, is_open=False)

    def worked(self, nodes: Sequence[str]) -> None:
        """A chain along these nodes is in use."""
        for a, b in pairwise((self._driver.node, *nodes, self._driver.node)):
            self._breaks.pop(_pair(a, b), None)

    def opened(self, a: str, b: str) -> None:
        self._closed.pop(_pair(a, b), None)

    def probe(self, state: ClusterState, now_s: float, ask: AskToProbe) -> None:
        """Now and then see whether a closed link is back; whoever could not reach the other tries."""
        if now_s < self._next_probe_s:
            return
        self._next_probe_s = now_s + _PROBE_S
        for reporter, node in list(self._closed.values()):
            if reporter == self._driver.node:
                ask(node, self._driver)
            elif node == self._driver.node:
                ask(reporter, self._driver)
            elif node in state.nodes:
                ask(reporter, Peer(node, state.nodes[node].address))

    def _is_answering(self, state: ClusterState, node: str) -> bool:
        known = state.nodes.get(node)
        return node == self._driver.node or (known is not None and known.is_answering)


def _pair(a: str, b: str) -> Pair:
    return (a, b) if a < b else (b, a)

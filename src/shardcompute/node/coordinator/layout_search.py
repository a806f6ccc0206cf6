"""Layout search in the background: better layouts than the coordinator's thread finds in the time that it has.

One search at a time, in a thread that gives way to all others, for as long as its deadline allows. What it finds is an
event like any other; whether it is worth a move is decided from what is measured then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from shardcompute.control.actions import SearchLayout
from shardcompute.control.events import LayoutFound
from shardcompute.control.placement.capacities import Request
from shardcompute.control.placement.place import Placement, place_thoroughly
from shardcompute.control.placement.request import placement_request
from shardcompute.node.coordinator.coordinator_port import CoordinatorPort

log = logging.getLogger(__name__)
_DEADLINE_S = 20.0
_GIVING_WAY_S = 0.002
"""Between two steps of a search, which take about as long: others need the interpreter, too."""


class LayoutSearch:
    """`start` is called in the coordinator's thread."""

    def __init__(
        self,
        coordinator: CoordinatorPort,
        *,
        deadline_s: float = _DEADLINE_S,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._deadline_s = deadline_s
        self._sleep = sleep
        self._clock = clock
        self._turn = threading.Lock()

    def start(self, action: SearchLayout) -> None:
        state = self._coordinator.state
        chain = state.chains.get(action.chain)
        if chain is None or chain.epoch != action.epoch:
            return
        model = state.models[chain.model].model
        request = placement_request(state, model, self._coordinator.now_s(), chain=chain)
        self._coordinator.background(lambda: self._search(action, request))

    def _search(self, action: SearchLayout, request: Request) -> None:
        with self._turn:
            started_s = self._clock()

            def should_stop() -> bool:
                self._sleep(_GIVING_WAY_S)
                return self._clock() - started_s >= self._deadline_s or not self._is_current(action)

            if not self._is_current(action):
                return
            found = place_thoroughly(request, should_stop)
            log.info("searched for a layout of %s for %.2f s", action.chain, self._clock() - started_s)
        stages = found.assignments if isinstance(found, Placement) else ()
        self._coordinator.post(LayoutFound(action.chain, action.epoch, stages, self._coordinator.now_s()))

    def _is_current(self, action: SearchLayout) -> bool:
        """Whether anybody still needs it: a chain of another epoch has another layout already."""
        chain = self._coordinator.state.chains.get(action.chain)
        is_same = chain is not None and chain.epoch == action.epoch and not chain.is_interrupted
        return is_same and not self._coordinator.has_stood_down

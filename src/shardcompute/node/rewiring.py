"""How a chain gets its next shape: every stage is told its place, then the driver dials the first.

Stages that are to be told what they missed must be in place before whoever tells them, so these come last.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

from shardcompute.control.actions import ConnectChain, StageAddress
from shardcompute.core.errors import LinkError
from shardcompute.node.commands import Connect, Connected, WorkerCommand, decode_connected
from shardcompute.node.driver import Resumption
from shardcompute.node.driver_side import DriverSide
from shardcompute.node.repair import Repair, plan_repair
from shardcompute.wire.control import Answer

_TIMEOUT_S = 5.0
Ask = Callable[[str, WorkerCommand], "queue.SimpleQueue[Answer]"]


def rewire(
    action: ConnectChain, before: Sequence[StageAddress], driver: DriverSide, ask: Ask
) -> Resumption | None:
    """Connect a new epoch; `before` is the last shape that was in use. Returns what is still known of its sessions,
    None for nothing. Raises LinkError. Waits for others: call it in a thread."""
    repair = plan_repair(before, action.stages)
    orders = _orders(action, driver.url, repair)
    answers: dict[int, Connected] = {}
    for replays in (False, True):
        asked = {
            index: ask(action.stages[index].node, order)
            for index, order in enumerate(orders)
            if order.replays is replays
        }
        for index, answer in asked.items():
            answers[index] = _await(action.stages[index].node, answer)
    driver.open_chain(action)
    return None if repair is None else repair.resumption([answers[i] for i in range(len(orders))])


def _orders(action: ConnectChain, driver_url: str, repair: Repair | None) -> list[Connect]:
    ring = [*((stage.node, stage.address) for stage in action.stages), (action.driver, driver_url)]
    return [
        Connect(
            chain=action.chain,
            epoch=action.epoch,
            start=stage.start,
            stop=stage.stop,
            next_node=ring[index + 1][0],
            next_url=ring[index + 1][1],
            previous_node=ring[index - 1][0],
            driver_node=action.driver,
            driver_url=driver_url,
            is_last=index == len(action.stages) - 1,
            keeps_sessions=repair is not None and index not in repair.new,
            replays=repair is not None and index + 1 in repair.new,
        )
        for index, stage in enumerate(action.stages)
    ]


def _await(node: str, answer: queue.SimpleQueue[Answer]) -> Connected:
    try:
        answered = answer.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        raise LinkError(f"{node} did not answer in time") from None
    if answered.error:
        raise LinkError(f"{node}: {answered.error}")
    return decode_connected(answered.result)

"""A rank as a process of its own, told what to do by lines of JSON: `python -m support.swarm.collective_rank NODE`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from shardcompute.collectives import FabricGroup
from shardcompute.collectives.deadlines import CallDeadlines
from shardcompute.collectives.worlds import ROLE, Membership, connect_world, hearing
from shardcompute.core.errors import CollectiveError
from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, TcpTransport


def main() -> None:
    node = sys.argv[1]
    transport = TcpTransport()
    hello = Hello(VERSION_MIN, VERSION_MAX, node, ROLE, "home")
    listener = transport.listen("tcp://127.0.0.1:0", hello)
    say(url=listener.address)
    group: FabricGroup | None = None
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        if told["do"] == "form":
            if group is not None:
                group.close()
            urls = told["urls"]
            group = connect_world(
                Membership("w", told["epoch"], told["rank"], told["nodes"]),
                lambda rank, urls=urls: transport.dial(urls[rank], hello),
                hearing(listener.accept),
            )
            group.world.deadlines = CallDeadlines(least_s=3.0, untried_s=3.0)
            say(epoch=group.epoch)
        elif group is not None:
            say(**add(group, told["times"]))
    listener.close()


def add(group: FabricGroup, times: int) -> dict[str, Any]:
    """Sums in a row, or what ended them and how long the last took."""
    started_s = time.monotonic()
    try:
        for number in range(times):
            started_s = time.monotonic()
            total = group.all_reduce(np.full(2048, 10.0**group.rank, np.float32))
            if number == 0:
                say(is_adding=True)
    except CollectiveError as error:
        return {"error": error.message, "rank": error.rank, "waited_s": time.monotonic() - started_s}
    return {"total": float(total[-1])}


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()

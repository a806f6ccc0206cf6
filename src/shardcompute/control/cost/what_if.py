"""What if: machines that are not there, put beside those that are. Pure.

Of a machine that nobody has, only its memory is said. The rest is that of the middle one of the cluster's machines, and
its lines are as the middle one of theirs; what was assumed is said along with what would come of it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from msgspec import structs

from shardcompute.control.events import LinkMeasured
from shardcompute.control.placement.capacities import Request
from shardcompute.control.placement.cuts import fill
from shardcompute.control.placement.place import usable_offers
from shardcompute.control.placement.search import filling_orders
from shardcompute.control.sizes import usual_holding
from shardcompute.control.state import ClusterState, Node
from shardcompute.control.transitions.apply import apply
from shardcompute.core.errors import UsageError
from shardcompute.core.units import count_of, format_bytes

_MOST_TOKENS = 1 << 24
_CLOSE = 0.01


@dataclass(frozen=True, slots=True)
class ImaginedMachines:
    """So many of one kind. `bytes_per_s`: how much of weights each reads; None: as the middle one of the others."""

    count: int
    memory_bytes: int
    bytes_per_s: float | None = None

    def told(self) -> str:
        return f"{count_of(self.count, 'more machine')} of {format_bytes(self.memory_bytes)}"


@dataclass(frozen=True, slots=True)
class Imagined:
    """A state with machines that are not there, and what was assumed of them."""

    state: ClusterState
    nodes: tuple[str, ...]
    assumed: str


def with_machines(state: ClusterState, machines: ImaginedMachines) -> Imagined:
    """UsageError where no machine is there to compare with."""
    others = [node for id, node in sorted(state.nodes.items()) if node.can_work and node.status == "ready"]
    if not others:
        raise UsageError(
            "no machine has joined that another could be compared with",
            hint="plan --machines 8G says how many machines of a size a model needs",
        )
    like = sorted(others, key=lambda node: (_seconds_per_byte(state, node), node.id))[len(others) // 2]
    nodes = tuple(f"what-if-{number}" for number in range(1, machines.count + 1))
    imagined = {id: _imagined(like, id, machines) for id in nodes}
    rtts = [link for ends in state.links.values() for link in ends.values() if link.is_open]
    found = structs.replace(state, nodes={**state.nodes, **imagined})
    if rtts:
        rtt_s = statistics.median(link.rtt_s for link in rtts)
        bytes_per_s = statistics.median(link.bytes_per_s for link in rtts)
        known = [state.driver, *(node.id for node in others), *nodes]
        for i, a in enumerate(known):
            for b in known[max(i + 1, len(known) - len(nodes)) :]:
                found = apply(found, LinkMeasured(a, b, rtt_s, bytes_per_s))
        near = f"{1000 * rtt_s:.3g} ms from the others, as the middle one of yours"
    else:
        near = "as near to the others as an unmeasured line is taken to be"
    speed = "as fast" if machines.bytes_per_s is None else "of the stated speed, else"
    return Imagined(found, nodes, f"{speed} as {like.name}, {near}")


def _seconds_per_byte(state: ClusterState, node: Node) -> float:
    return node.seconds_per_byte or state.placing.default_seconds_per_byte


def _imagined(like: Node, id: str, machines: ImaginedMachines) -> Node:
    """Of the same kind as a machine that is there, holding nothing."""
    speed = machines.bytes_per_s
    return structs.replace(
        like,
        id=id,
        name=f"another machine ({id})",
        memory_bytes=machines.memory_bytes,
        seconds_per_byte=like.seconds_per_byte if speed is None else 1 / speed,
        layer_times=like.layer_times if speed is None else (),
        stage_times=(),
        group_times=(),
        shards=(),
        cached=(),
        loading=(),
        refusals=(),
        draft_heads=(),
        is_standby=False,
        kv_used_bytes=0,
        session_namespace=0,
    )


def most_kv_tokens(request: Request) -> int:
    """For how many tokens of all conversations together these machines have memory, beside one copy of the model."""
    if not _has_room(request, 1):
        return 0
    least, most = 1, 2
    while most < _MOST_TOKENS and _has_room(request, most):
        least, most = most, 2 * most
    while most - least > max(1, _CLOSE * least):
        middle = (least + most) // 2
        least, most = (middle, most) if _has_room(request, middle) else (least, middle)
    return least


def _has_room(request: Request, kv_tokens: int) -> bool:
    asked = replace(request, model=structs.replace(request.model, kv_tokens=kv_tokens))
    offers = usable_offers(asked)
    usual = usual_holding(offer.holding for offer in offers or request.offers)
    return any(fill(order, asked.sizes, usual)[1] == 0 for order in filling_orders(offers))

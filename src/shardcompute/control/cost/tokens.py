"""Cost of tokens: energy and money for a million of them, from what machines draw and what a plan promises.

A million tokens take as long as they take at the plan's rate, and for so long all machines of the chain are at work or
wait for each other. Whatever is not known makes the sum unknown: it says whose part is missing, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.control.placement.place import Placement
from shardcompute.control.state import ClusterState, Node
from shardcompute.core.units import listed

MILLION = 1_000_000
_JOULES_PER_KWH = 3.6e6
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """For a million tokens, by one stream and by many at once; None: nobody knows."""

    watts: float | None = None
    """What the machines of the chain draw at work, all together."""
    kwh_one_stream: float | None = None
    kwh_many: float | None = None
    price_one_stream: float | None = None
    price_many: float | None = None
    price_per_kwh: float | None = None
    is_upper_bound: bool = False
    """Of one stream: while a machine waits for the others it draws less, and nobody knows how much less."""
    undrawn: tuple[str, ...] = ()
    """Machines of which nobody knows what they draw."""

    def told(self) -> tuple[str, ...]:
        """In lines for people."""
        if self.watts is None:
            energy = (
                f"energy: unknown, nobody has said what {listed(self.undrawn)} draw{_s(self.undrawn)} "
                "(join --watts N)"
            )
        else:
            most = "at most " if self.is_upper_bound else ""
            energy = (
                f"energy: {self.watts:.0f} W at work; a million tokens take {most}{_kwh(self.kwh_one_stream)} "
                f"by one stream, {_kwh(self.kwh_many)} by many"
            )
        return (energy, *self._told_price())

    def _told_price(self) -> tuple[str, ...]:
        if self.price_one_stream is None or self.price_many is None:
            return () if self.watts is None else ("cost: unknown, no price was given (--price-kwh)",)
        at = "" if self.price_per_kwh is None else f", at {self.price_per_kwh:g} a kWh"
        most = "at most " if self.is_upper_bound else ""
        return (
            f"cost of a million tokens: {most}{format_price(self.price_one_stream)} by one stream, "
            f"{format_price(self.price_many)} by many{at}",
        )


def format_price(price: float) -> str:
    return f"{price:.2f}" if price >= 0.1 or price == 0 else f"{price:.2g}"


def _kwh(energy: float | None) -> str:
    assert energy is not None
    return f"{energy:.3g} kWh"


def _s(names: Sequence[str]) -> str:
    return "s" if len(names) == 1 else ""


def cost_of(state: ClusterState, plan: Placement, price_per_kwh: float | None = None) -> TokenCost:
    """Of a plan over machines of this state. A machine with a price of its own costs that and no electricity."""
    one_s = 1 / plan.predicted_tokens_per_s_one_stream if plan.predicted_tokens_per_s_one_stream else None
    many_s = 1 / plan.predicted_tokens_per_s_many if plan.predicted_tokens_per_s_many else None
    members = [(state.nodes[id], stage.step_s) for stage in plan.stages for id in stage.assignment.members]
    if one_s is None or many_s is None:
        return TokenCost(undrawn=tuple(node.name for node, _ in members))
    undrawn = tuple(node.name for node, _ in members if not node.watts)
    kwh_one = [_kwh_of(_mean_watts(node, min(1.0, step_s / one_s)), one_s) for node, step_s in members]
    kwh_many = [_kwh_of(node.watts, many_s) for node, _ in members]
    nodes = [node for node, _ in members]
    return TokenCost(
        watts=None if undrawn else sum(node.watts for node in nodes),
        kwh_one_stream=None if undrawn else sum(kwh_one),
        kwh_many=None if undrawn else sum(kwh_many),
        price_one_stream=_price(nodes, kwh_one, one_s, price_per_kwh),
        price_many=_price(nodes, kwh_many, many_s, price_per_kwh),
        price_per_kwh=price_per_kwh,
        is_upper_bound=any(not node.idle_watts for node in nodes) and len(nodes) > 1,
        undrawn=undrawn,
    )


def _mean_watts(node: Node, busy_share: float) -> float:
    """Of a machine that computes for a part of the time. What it draws besides is said by nobody: as much, then."""
    idle = node.idle_watts or node.watts
    return node.watts if idle > node.watts else idle + (node.watts - idle) * busy_share


def _kwh_of(watts: float, token_s: float) -> float:
    return watts * token_s * MILLION / _JOULES_PER_KWH


def _price(
    nodes: Sequence[Node], energies: Sequence[float], token_s: float, price_per_kwh: float | None
) -> float | None:
    """None where a machine has neither a price of its own nor energy that has one."""
    total = 0.0
    for node, kwh in zip(nodes, energies, strict=True):
        if node.price_per_hour is not None:
            total += node.price_per_hour * token_s * MILLION / _SECONDS_PER_HOUR
        elif node.watts and price_per_kwh is not None:
            total += kwh * price_per_kwh
        else:
            return None
    return total

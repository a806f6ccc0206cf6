"""The simulator: discrete events around the real control code, to ask what a cluster that nobody has would do.

    outcomes = [simulate(scenario) for scenario in load_scenarios(path)]

Machines, lines, clients and time are simulated; `control` decides, as it does in a coordinator. `docs/scale.md` says
what is modelled, what is not, and how far predictions are from measurements.
"""

from __future__ import annotations

from shardcompute.simulator.outcome import Compared, SimulationOutcome, compare
from shardcompute.simulator.run import simulate
from shardcompute.simulator.scenario import Scenario, load_scenarios, parse_scenarios

__all__ = [
    "Compared",
    "Scenario",
    "SimulationOutcome",
    "compare",
    "load_scenarios",
    "parse_scenarios",
    "simulate",
]

"""`simulate(scenario)`: put a simulation together, run it, and say what came of it."""

from __future__ import annotations

import random

from shardcompute.control import Model
from shardcompute.control.events import ModelRequested
from shardcompute.control.sizes import sizes_of
from shardcompute.control.state import Holding
from shardcompute.simulator.agenda import Agenda
from shardcompute.simulator.bookkeeping import Books
from shardcompute.simulator.churn import Churn
from shardcompute.simulator.coordinator import SimulatedCoordinator
from shardcompute.simulator.effects import CommandEffects
from shardcompute.simulator.machines import Lines, draw_machines
from shardcompute.simulator.outcome import SimulationOutcome, sum_up
from shardcompute.simulator.pipeline import Pipeline
from shardcompute.simulator.pool import LoadGenerator, PipelinePool
from shardcompute.simulator.scenario import ModelTerms, Scenario
from shardcompute.simulator.sessions import Ledger

_MB = 1_000_000


def model_of(terms: ModelTerms) -> Model:
    return Model(
        name=terms.name,
        layer_bytes=(int(terms.layer_mb * _MB),) * terms.layers,
        embedding_bytes=int(terms.embedding_mb * _MB),
        head_bytes=int(terms.head_mb * _MB),
        kv_bytes_per_token_and_layer=terms.kv_bytes_per_token_and_layer,
        kv_tokens=terms.kv_tokens,
        hidden=terms.hidden,
        context_length=terms.context_length,
        weight_form="native",
    )


def simulate(scenario: Scenario) -> SimulationOutcome:
    """The same outcome for the same scenario, but for how long this computer took."""
    rng = random.Random(scenario.seed)
    agenda, model, books = Agenda(), model_of(scenario.model), Books()
    machines = {
        machine.id: machine for machine in draw_machines(scenario, random.Random(rng.getrandbits(64)))
    }
    if scenario.control.has_weights:
        for machine in machines.values():
            machine.cached = (Holding(model.name, 0, model.layer_count),)
    lines = Lines(scenario.network, list(machines.values()))
    ledger = Ledger(since_s=scenario.warm_up_s)

    def open_pipeline() -> Pipeline:
        kv_tokens, stride = model.kv_tokens, scenario.stride
        return Pipeline(
            agenda, lines, sizes_of(model), model.hidden, kv_tokens, scenario.driver, stride, ledger
        )

    pool = PipelinePool(agenda, ledger, open_pipeline)
    coordinator = SimulatedCoordinator(agenda, scenario.control, machines, books, scenario.warm_up_s)
    churn = Churn(scenario, agenda, machines, coordinator, pool, random.Random(rng.getrandbits(64)))
    effects = CommandEffects(
        scenario,
        model,
        agenda,
        machines,
        lines,
        coordinator,
        pool,
        random.Random(rng.getrandbits(64)),
        churn.released,
    )
    coordinator.effects = churn.effects = effects
    coordinator.start()
    coordinator.post(ModelRequested(model, scenario.model.chains), is_message=False)
    churn.start()
    day_s = next((kind.day.length_s for kind in scenario.machines if kind.day is not None), 86_400.0)
    for number, load in enumerate(scenario.load):
        own = random.Random(rng.getrandbits(64))
        answer_s = scenario.driver.answer_ms / 1000
        LoadGenerator(number, load, answer_s, agenda, pool, own, day_s).start()
    agenda.run(scenario.duration_s)
    coordinator.count_time()
    return sum_up(scenario, list(machines.values()), coordinator.state, books, ledger, churn.failures, agenda)

"""The token model: times that can be worked out by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shardcompute.simulator import SimulationOutcome, simulate
from support.small_scenario import small

# A token reads 12 layers of 10 MB and a head of 20 MB at 10 GB/s: 14 ms, and 1 ms more on each of three machines.
STEP_S = 0.014 + 3 * 0.001
# From the driver to the first, twice on, and back: half a round trip each, and 0.3 ms of ours.
RING_S = 2 * (0.0011 + 0.0003) + 2 * (0.002 + 0.0003) + 0.0
LOAD = "[[load]]\nbegins_s = 20\nrounds = 1\n"


def run(load: str, **changes: str) -> SimulationOutcome:
    return simulate(small(count=3, more=f"{LOAD}{load}\n{changes.get('more', '')}"))


def figure(outcome: SimulationOutcome, name: str) -> float:
    value = outcome.figures[name]
    assert value is not None
    return value


def test_one_stream_takes_all_steps_and_hops() -> None:
    outcome = run("streams = 1\nprompt_tokens = 1\nanswer_tokens = 50")
    assert figure(outcome, "tokens") == 50
    assert 1 / figure(outcome, "stream_tokens_per_s") == pytest.approx(STEP_S + RING_S, rel=0.02)
    assert figure(outcome, "first_token_s") == pytest.approx(STEP_S + RING_S, rel=0.02)


def test_prompts_take_their_rows() -> None:
    short = run("streams = 1\nprompt_tokens = 1\nanswer_tokens = 2")
    long = run("streams = 1\nprompt_tokens = 201\nanswer_tokens = 2")
    # 201 rows at a tenth of a layer's time each, less the one row that the short prompt has; and their way.
    compute_s = 0.1 * 201 * 0.012 - 0.012
    wire_s = 2 * 200 * 256 * 4 / 125e6
    grown_s = figure(long, "first_token_s") - figure(short, "first_token_s")
    assert grown_s == pytest.approx(compute_s + wire_s, rel=0.02)


def test_streams_fill_the_pipe() -> None:
    one = run("streams = 1\nprompt_tokens = 1\nanswer_tokens = 50")
    three = run("streams = 3\nprompt_tokens = 1\nanswer_tokens = 50")
    many = run("streams = 24\nprompt_tokens = 1\nanswer_tokens = 50")
    assert figure(three, "busy_tokens_per_s") > 2 * figure(one, "busy_tokens_per_s")
    assert figure(many, "busy_tokens_per_s") > figure(three, "busy_tokens_per_s")
    assert figure(many, "stream_tokens_per_s") < figure(one, "stream_tokens_per_s")


def test_a_thin_line_is_what_frames_wait_for() -> None:
    load = "streams = 8\nprompt_tokens = 1\nanswer_tokens = 20"
    wide = simulate(small(count=3, more=LOAD + load))
    thin = simulate(small(count=3, machines="uplink_mbit = 1", more=LOAD + load))
    # A row is 1 KiB: 8.2 ms on a megabit a second, so that eight of them leave no more than every 66 ms.
    assert figure(thin, "busy_tokens_per_s") < 130 < figure(wide, "busy_tokens_per_s")


def test_strides_bring_the_same_tokens_in_the_same_time() -> None:
    load = "streams = 1\nprompt_tokens = 1\nanswer_tokens = 64"
    fine, coarse = run(load), simulate(replace(small(count=3, more=LOAD + load), stride=8))
    assert figure(coarse, "tokens") == figure(fine, "tokens") == 64
    assert figure(coarse, "stream_tokens_per_s") == pytest.approx(
        figure(fine, "stream_tokens_per_s"), rel=0.02
    )


def test_one_computer_slows_all_of_its_machines() -> None:
    load = "streams = 12\nprompt_tokens = 1\nanswer_tokens = 30"
    own = run(load)
    shared = run(load, more="[driver]\nshared_cores = 1")
    assert figure(shared, "busy_tokens_per_s") < 0.7 * figure(own, "busy_tokens_per_s")
    alone = run("streams = 1\nprompt_tokens = 1\nanswer_tokens = 30", more="[driver]\nshared_cores = 1")
    assert 1 / figure(alone, "stream_tokens_per_s") == pytest.approx(STEP_S + RING_S, rel=0.02)

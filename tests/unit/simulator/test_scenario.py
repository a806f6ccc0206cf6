"""Scenario files: what they say, and what they are told when they say it wrongly."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardcompute.core.errors import SourceError, UsageError
from shardcompute.simulator import load_scenarios, parse_scenarios
from shardcompute.simulator.distributions import Drawn, draw_from
from support.small_scenario import SMALL, small

SHIPPED = sorted((Path(__file__).parents[3] / "bench" / "scenarios").glob("*.toml"))


def rewritten(old: str, new: str) -> str:
    text = SMALL.format(count=4, model="", machines="", more="")
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_scenarios_can_be_read(path: Path) -> None:
    scenarios = load_scenarios(path)
    assert len({each.name for each in scenarios}) == len(scenarios) >= 1


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("layers = 12", "layerz = 12", "layerz"),
        ("layers = 12", "layers = 0", "$.model.layers"),
        ("read_gb_per_s = 10", "read_gb_per_s = 0", "machines.0.read_gb_per_s is 0"),
        ("read_gb_per_s = 10", "read_gb_per_s = { uniform = [9, 3] }", "uniform from 9 down to 3"),
        ("read_gb_per_s = 10", "read_gb_per_s = { uniform = [1, 3], choice = [1] }", "uniform, choice"),
        ("access_ms = 1", 'region = "mars"', "'mars'"),
        ("noise = 0.0", 'regions = ["a", "b"]', "2 rows of 2 numbers"),
        ("noise = 0.0", 'regions = ["a"]\nrtt_ms = [[1]]', "must be in one"),
        ("[network]", '[[faults]]\nat_s = 1\nkind = "kill"\n[network]', "either a machine or a stage"),
        ("[network]", '[[faults]]\nat_s = 1\nkind = "kill"\nmachine = 4\n[network]', "no machine 4"),
        ("[network]", "[[load]]\nbegins_s = 1\n[network]", "either streams or per_s"),
        ("[network]", '[[compare]]\nfigure = "tokens"\n[network]', "either a file or `measured`"),
        ("duration_s = 60", "duration_s = ", "no TOML"),
        ("duration_s = 60", "duration_s = 60\nvariants = 3", "are no tables"),
    ],
)
def test_what_is_wrong_is_said(old: str, new: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_scenarios("wrong.toml", rewritten(old, new))
    assert told in caught.value.message
    assert caught.value.hint


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere\.toml"):
        load_scenarios(tmp_path / "nowhere.toml")


def test_variants_change_what_they_name() -> None:
    text = SMALL.format(count=4, model="", machines="", more="")
    text += '\n[[variants]]\nname = "a"\n\n[[variants]]\nname = "b"\nmodel = { chains = 2 }\n'
    first, second = parse_scenarios("variants.toml", text)
    assert (first.name, first.model.chains) == ("a", 1)
    assert (second.name, second.model.chains, second.model.layers) == ("b", 2, 12)
    assert first.machines == second.machines


def test_distributions_draw_what_they_say() -> None:
    rng = random.Random(1)
    uniform = draw_from("x", Drawn(uniform=(2.0, 3.0)))
    assert all(2.0 <= uniform(rng) <= 3.0 for _ in range(100))
    cycle = draw_from("x", Drawn(cycle=(1.0, 5.0)))
    assert [cycle(rng) for _ in range(3)] == [1.0, 5.0, 1.0]
    lognormal = draw_from("x", Drawn(lognormal=(10.0, 0.3)))
    values = sorted(lognormal(rng) for _ in range(2000))
    assert 9.0 < values[1000] < 11.0
    exponential = draw_from("x", Drawn(exponential=4.0))
    assert 3.5 < sum(exponential(rng) for _ in range(4000)) / 4000 < 4.5
    assert draw_from("x", 7.0)(rng) == 7.0


def test_the_number_of_machines_is_that_of_all_kinds() -> None:
    assert small(count=7).machine_count == 7
    assert replace(small(count=7), scale=3).machine_count == 21

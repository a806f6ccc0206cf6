"""Outcomes: figures beside measurements, as a file and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardcompute.cli.main import build_app
from shardcompute.core.errors import ShardComputeError
from shardcompute.simulator import compare, simulate
from shardcompute.simulator.scenario import Comparison
from support.small_scenario import SMALL, small

LOAD = "[[load]]\nstreams = 1\nrounds = 1\nbegins_s = 20\nanswer_tokens = 10\n"
MEASURED = {
    "results": [
        {"metric": "speed", "streams": 1, "value": 12.5},
        {"metric": "speed", "streams": 8, "value": 1},
    ]
}


def test_predictions_stand_beside_measurements(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text(json.dumps(MEASURED))
    outcome = simulate(small(more=LOAD))
    wanted = [
        Comparison(figure="tokens", measured=8.0, remark="by hand"),
        Comparison(figure="tokens", file="measured.json", where={"metric": "speed", "streams": 1}),
    ]
    stated, found = compare(outcome, wanted, tmp_path)
    assert (stated.predicted, stated.measured, stated.deviation) == (10, 8.0, 0.25)
    assert (found.measured, found.deviation) == (12.5, pytest.approx(-0.2))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Comparison(figure="speed", measured=1.0), "no figure is called 'speed'"),
        (Comparison(figure="tokens", file="nowhere.json"), "cannot read"),
        (Comparison(figure="tokens", file="measured.json", where={"metric": "speed"}), "2 rows"),
        (Comparison(figure="tokens", file="measured.json", where={"streams": 8}, field="metric"), "1 rows"),
    ],
)
def test_what_cannot_be_compared_is_said(wanted: Comparison, told: str, tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text(json.dumps(MEASURED))
    outcome = simulate(small())
    with pytest.raises(ShardComputeError, match=told):
        compare(outcome, [wanted], tmp_path)


def test_sim_tells_and_writes_what_came_of_it(tmp_path: Path) -> None:
    scenario, written = tmp_path / "small.toml", tmp_path / "out.json"
    compared = '[[compare]]\nfigure = "tokens"\nmeasured = 10\nremark = "tokens in all"\n'
    scenario.write_text(SMALL.format(count=3, model="", machines="", more=LOAD + compared))
    done = CliRunner().invoke(build_app(["sim", "show"]), ["sim", str(scenario), "--json", str(written)])
    assert done.exit_code == 0, done.output
    assert "tokens in all" in done.output
    assert "+0.0%" in done.output
    (result,) = json.loads(written.read_text())["results"]
    assert result["figures"]["tokens"] == 10
    assert result["compared"][0]["deviation"] == 0


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from shardcompute.simulator.plots import plot_outcomes

    outcomes = [simulate(small(count=count, more=LOAD)) for count in (3, 4)]
    rows = compare(outcomes[0], [Comparison(figure="tokens", measured=9.0)], tmp_path)
    paths = plot_outcomes(outcomes, {"small": rows}, tmp_path / "plots")
    assert [path.name for path in paths] == ["validation.png", "growth.png", "waits.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)

"""The tensor ranks' benchmark: real processes that meet, follow, and say the same as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.bench.report import Result
from shardcompute.bench.tensor.outcome import crossing
from shardcompute.bench.tensor.plots import plot_crossover
from shardcompute.bench.tensor.run import TensorBench, parse_exchanges, parse_grids, run_tensor_bench
from shardcompute.core.errors import UsageError
from support.models.tiny import save_tiny


def test_ranks_and_stages_as_processes_take_turns_with_one(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny")
    bench = TensorBench(str(model), ranks=[2], stages=[2], rtt_ms=[0.2, 4.0], prompt=8, steps=4, rounds=1)
    said: list[str] = []

    results = run_tensor_bench(bench, said.append)

    arms = ["1 rank", "2 ranks, reduce", "2 ranks, gather", "2 stages"]
    assert said[: len(arms)] == [f"loading {arm}" for arm in arms]
    found = {(each.metric, each.labels["arm"], each.labels.get("rtt_ms")): each.value for each in results}
    shared = [(arm, rtt_ms) for arm in arms[1:] for rtt_ms in (0.0, 0.2, 4.0)]
    assert [found["equal_tokens", *each] for each in shared] == [1.0] * len(shared)
    # A command, the embedding, the layers' own, the candidates: 3 layers. A stage sends once and hears once.
    assert found["exchanges", "2 ranks, reduce", 0.0] == 3 + 3 * 2
    assert found["exchanges", "2 ranks, gather", 0.2] == 3 + 3 * 4
    assert found["exchanges", "2 stages", 4.0] == 2
    assert found["against_one_rank", "1 rank", 0.0] == 1
    assert all(each.value > 0 for each in results)
    # Each exchange takes half a round trip, whatever the machine does besides, and so does each hop between stages.
    for arm, halves in (("2 ranks, reduce", 8), ("2 ranks, gather", 14), ("2 stages", 2)):
        assert found["decode_best_step", arm, 4.0] < 1 / (halves * 2e-3)


def test_where_one_curve_crosses_another() -> None:
    assert crossing([(0.1, 1.0, 2.0), (0.5, 2.0, 2.0), (1.0, 3.0, 2.0)]) == 0.5
    assert crossing([(1.0, 1.0, 2.0), (2.0, 4.0, 3.0)]) == 1.5
    assert crossing([(1.0, 1.0, 2.0), (2.0, 1.0, 2.0)]) is None
    assert crossing([(1.0, 3.0, 2.0), (2.0, 4.0, 2.0)]) is None


def test_a_curve_is_drawn_of_every_arm(tmp_path: Path) -> None:
    speeds = {
        "1 rank": {0.1: 10.0, 5.0: 10.5},
        "2 ranks, reduce": {0.0: 18.0, 0.1: 15.0, 5.0: 2.0},
        "2 stages": {5.0: 9.0},
    }
    results = [
        Result("decode", speed, "tokens/s", {"arm": arm, "rtt_ms": rtt_ms})
        for arm, by_rtt in speeds.items()
        for rtt_ms, speed in by_rtt.items()
    ]

    drawn = plot_crossover(results, tmp_path).read_text()

    assert drawn.count("<svg") == 1
    assert all(f">{arm}<" in drawn for arm in speeds)


def test_quadrants_take_turns_with_a_line_of_ranks(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny")
    bench = TensorBench(
        str(model), ranks=[4], exchanges=["reduce"], grids=[(2, 2)], stages=[], prompt=8, steps=2, rounds=1
    )

    found = {
        (each.metric, each.labels["arm"]): each.value for each in run_tensor_bench(bench, lambda _: None)
    }

    assert found["equal_tokens", "grid 2×2"] == 1.0
    # Three in each half of a layer, instead of one.
    assert found["exchanges", "grid 2×2"] == 3 + 3 * 6
    # 2 key heads: a rank in a line of four has one of them, as each rank of a row has.
    assert found["kv", "grid 2×2"] == found["kv", "4 ranks, reduce"] == found["kv", "1 rank"] / 2


def test_grids_are_rows_by_columns() -> None:
    assert parse_grids("2x2,1x3") == [(2, 2), (1, 3)]
    assert parse_grids("") == []
    for wrong in ("2", "x2", "1x1", "2x2x2", "ax2"):
        with pytest.raises(UsageError, match="no block grid"):
            parse_grids(wrong)


def test_ways_to_exchange() -> None:
    assert parse_exchanges("gather,reduce") == ["reduce", "gather"]
    with pytest.raises(UsageError, match="guess"):
        parse_exchanges("guess")

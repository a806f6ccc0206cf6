"""The tensor ranks' benchmark: real processes that meet, follow, and say the same as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.bench.tensor.run import TensorBench, parse_exchanges, run_tensor_bench
from shardcompute.core.errors import UsageError
from support.models.tiny import save_tiny


def test_ranks_as_processes_take_turns_with_one(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny")
    bench = TensorBench(
        str(model), ranks=[2], exchanges=["reduce", "gather"], rtt_ms=[0.2], prompt=8, steps=4, rounds=1
    )
    said: list[str] = []

    results = run_tensor_bench(bench, said.append)

    arms = ["1 rank"] + [
        f"2 ranks, {each}{line}" for line in ("", ", 0.2 ms") for each in ("reduce", "gather")
    ]
    assert said[: len(arms)] == [f"loading {arm}" for arm in arms]
    found = {(each.metric, each.labels["arm"]): each.value for each in results}
    assert [found["equal_tokens", arm] for arm in arms] == [1.0] * len(arms)
    # A command, the embedding, the layers' own, the candidates: 3 layers.
    assert found["exchanges", "2 ranks, reduce"] == 3 + 3 * 2
    assert found["exchanges", "2 ranks, gather"] == 3 + 3 * 4
    assert found["against_one_rank", "1 rank"] == 1
    assert all(each.value > 0 for each in results)


def test_ways_to_exchange() -> None:
    assert parse_exchanges("gather,reduce") == ["reduce", "gather"]
    with pytest.raises(UsageError, match="guess"):
        parse_exchanges("guess")

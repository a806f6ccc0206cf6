"""The choice between ONNX Runtime and llama.cpp on a CPU, by made-up measurements."""

from __future__ import annotations

import pytest

from shardcompute.backends.cpu_choice import CpuSpeed, choose_measured

ONNX = CpuSpeed(row_s=0.020, batch_s=0.080, prompt_row_s=0.003)


def test_what_is_faster_in_everything_is_chosen() -> None:
    choice = choose_measured(ONNX, CpuSpeed(0.010, 0.060, 0.002))
    assert choice.backend == "llamacpp"
    assert "one stream 2.00, eight sessions 1.33, prompts 1.50" in choice.reason


def test_a_small_gain_changes_nothing() -> None:
    choice = choose_measured(ONNX, CpuSpeed(0.019, 0.078, 0.0029))
    assert choice.backend == "onnx"
    assert "not chosen below 1.10" in choice.reason


@pytest.mark.parametrize(
    ("llamacpp", "chosen"),
    [
        # A stream alone gains more than prompts lose, and the other way round.
        (CpuSpeed(0.008, 0.080, 0.004), "llamacpp"),
        (CpuSpeed(0.012, 0.080, 0.008), "onnx"),
        # Many sessions count as much as one.
        (CpuSpeed(0.016, 0.160, 0.003), "onnx"),
    ],
)
def test_gains_and_losses_count_by_a_usual_turn(llamacpp: CpuSpeed, chosen: str) -> None:
    assert choose_measured(ONNX, llamacpp).backend == chosen

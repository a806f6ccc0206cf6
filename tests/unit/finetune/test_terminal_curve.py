"""Curves in the terminal: as wide as they may be, falling where values fall."""

from __future__ import annotations

from shardcompute.cli.models.finetune_curve import TerminalCurve, draw_blocks
from shardcompute.finetune.training import CurvePoint


def test_blocks_fall_with_values_and_are_never_wider_than_asked() -> None:
    assert draw_blocks([3.0, 2.0, 1.0], 8) == "█▅▁"
    wide = draw_blocks([float(each) for each in range(1000, 0, -1)], 10)
    assert len(wide) == 10
    assert list(wide) == sorted(wide, reverse=True)
    assert draw_blocks([], 8) == ""
    assert draw_blocks([1.0, 1.0], 8) == "▁▁"


def test_a_step_is_said_with_the_curve_so_far() -> None:
    curve = TerminalCurve(3)
    said = [curve.line(CurvePoint(step, 3.0 - step, 0.5, 1e-3, 100), 2.0) for step in (1, 2, 3)]
    assert said[0].startswith("step 1/3: loss 2.0000, 50")
    assert said[-1].endswith("▁")
    assert [line.split()[0] for line in curve.lines()] == ["loss", "speed", "norm"]

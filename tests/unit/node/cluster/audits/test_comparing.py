"""Comparing rows between classes: cheats in few rows, or in the last ones, are far off as well."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.node.cluster.audits.comparing import SentPiece, compare_rows

CLASSES = ("onnx-1/float32/avx2", "torch-2/float32/avx2")
COMPUTED = np.random.default_rng(5).standard_normal((84, 64)).astype(np.float32)


def compare(changed: slice, factor: float) -> str:
    sent = COMPUTED * np.float32(1.001)
    sent[changed] *= np.float32(factor)
    return compare_rows([SentPiece("exact", sent)], COMPUTED, CLASSES, 10)


@pytest.mark.parametrize("changed", [slice(0, 84, 3), slice(40, 41), slice(64, 84), slice(83, 84)])
def test_a_few_rows_that_are_far_off_are_held_against_a_stage(changed: slice) -> None:
    assert compare(changed, 1.2) == "far"
    assert compare(changed, 1.001) == "near"


def test_fewer_rows_than_a_window_say_nothing() -> None:
    few = COMPUTED[:31]
    assert compare_rows([SentPiece("exact", few * np.float32(1.5))], few, CLASSES, 10) == "unknown"

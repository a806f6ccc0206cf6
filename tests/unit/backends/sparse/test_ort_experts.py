"""Experts in one kernel: the answers of experts one by one, for every form that the kernel takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.matrix import BlockMatrix, MixedMatrix
from shardcompute.backends.ops import ExpertBlock, Gate
from shardcompute.backends.ort import experts as experts_module
from shardcompute.backends.ort.experts import GroupedExperts, SingleExperts, can_group, open_experts
from shardcompute.backends.ort.graph import use_threads
from shardcompute.backends.ort.linear import Linear
from shardcompute.backends.ort.program import Run, Value
from shardcompute.core.batch import Segment

HIDDEN, WIDTH, COUNT, PER_TOKEN, ROWS = 64, 96, 6, 3, 9


def _block(
    bits: int, gate: Gate, *, down_bits: int = 0, has_bias: bool = False, shifts: bool = False
) -> ExpertBlock:
    noise = np.random.default_rng(3)

    def linear(rows: int, columns: int, bits: int) -> Linear:
        blocks = (rows, columns // 32)
        codes = noise.integers(0, 256, (*blocks, 4 * bits), dtype=np.uint8)
        scales = (noise.random(blocks) / 2**bits).astype(np.float32)
        shift = noise.random(blocks).astype(np.float32) if shifts else None
        bias = noise.standard_normal(rows).astype(np.float32) if has_bias else None
        return Linear((BlockMatrix(bits, 32, codes, scales, shift),), bias)

    return ExpertBlock(
        router=None,
        gate_up=[linear(2 * WIDTH, HIDDEN, bits) for _ in range(COUNT)],
        down=[linear(HIDDEN, WIDTH, down_bits or bits) for _ in range(COUNT)],
        per_token=PER_TOKEN,
        gate=gate,
    )


def _run(step: Any) -> Any:
    noise = np.random.default_rng(4)
    step.x.buffer = noise.standard_normal((ROWS, HIDDEN)).astype(np.float32)
    step.scores.buffer = noise.standard_normal((ROWS, COUNT)).astype(np.float32)
    step.out.buffer = np.empty((ROWS, HIDDEN), dtype=np.float32)
    step.run(Run((), ROWS, None))  # type: ignore[arg-type]  # experts do not look at KV
    return step.out.buffer.copy()


def _open(block: ExpertBlock) -> Any:
    use_threads(1)
    values = (Value(name, width, None) for name, width in (("x", HIDDEN), ("s", COUNT), ("o", HIDDEN)))
    return open_experts(block, *values)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _block(4, Gate("silu")),
        lambda: _block(8, Gate("silu")),
        lambda: _block(8, Gate("silu", 1.5), has_bias=True),
        lambda: _block(4, Gate("silu", 0.5), has_bias=True),
    ],
    ids=["int4", "int8", "clamped", "clamped int4"],
)
def test_one_kernel_answers_as_experts_one_by_one(
    make: Callable[[], ExpertBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = _open(make())
    assert isinstance(grouped.experts, GroupedExperts)
    monkeypatch.setattr(experts_module, "can_group", lambda block: False)
    single = _open(make())
    assert isinstance(single.experts, SingleExperts)
    expected = _run(single)
    np.testing.assert_allclose(_run(grouped), expected, atol=2e-5 * np.abs(expected).max())


def _with_outliers() -> ExpertBlock:
    block = _block(8, Gate("silu"))
    noise = np.random.default_rng(6)

    def mixed(linear: Any) -> Linear:
        (blocks,) = linear.parts
        values = noise.standard_normal((blocks.shape[0], 2)).astype(np.float16)
        return Linear((MixedMatrix(blocks, np.array([3, 40]), values),), None)

    return replace(
        block, gate_up=[mixed(each) for each in block.gate_up], down=[mixed(each) for each in block.down]
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: _block(4, Gate("silu")),
        lambda: _block(8, Gate("silu")),
        lambda: _block(4, Gate("silu"), shifts=True),
        lambda: _block(8, Gate("silu"), shifts=True),
        lambda: _block(4, Gate("silu"), down_bits=8),
        lambda: _block(8, Gate("gelu")),
        _with_outliers,
    ],
    ids=["int4", "int8", "int4 with shifts", "int8 with shifts", "int4 and int8", "gelu", "mixed"],
)
def test_a_pair_has_the_same_bits_in_any_company(make: Callable[[], ExpertBlock]) -> None:
    experts = _open(make()).experts
    noise = np.random.default_rng(5)
    x = noise.standard_normal((40, HIDDEN)).astype(np.float32)
    chosen = noise.integers(0, COUNT, 40)
    whole = experts.run(x, chosen)
    for rows in (1, 2, 3, 7, 17):
        for first in range(0, 40 - rows, 5):
            part = slice(first, first + rows)
            assert np.array_equal(experts.run(x[part], chosen[part]), whole[part])


def test_what_the_kernel_cannot_take_is_computed_one_by_one() -> None:
    plain = _block(4, Gate("silu"))
    assert can_group(plain)
    assert not can_group(_block(4, Gate("silu"), shifts=True))
    assert not can_group(_block(4, Gate("silu"), down_bits=8))
    assert not can_group(replace(plain, gate=Gate("gelu")))
    assert not can_group(replace(plain, down=[*_block(8, Gate("silu")).down[:1], *plain.down[1:]]))


@pytest.mark.parametrize("shifts", [False, True])
def test_matrices_are_let_go_once_the_kernel_has_them(shifts: bool) -> None:
    block = _block(8, Gate("silu"), shifts=shifts)
    step = _open(block)
    assert not any(block.gate_up)
    assert not any(block.down)
    assert (step.block.gate_up, step.block.down) == ((), ())


def test_rows_that_only_fill_a_step_go_to_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    step = _open(_block(4, Gate("silu")))
    whole = _run(step)
    asked = []
    run = GroupedExperts.run
    monkeypatch.setattr(
        GroupedExperts, "run", lambda self, x, chosen: asked.append(len(x)) or run(self, x, chosen)
    )
    step.run(Run([Segment(0, 0, ROWS - 2, 0)], ROWS, None))  # type: ignore[arg-type]
    assert asked == [(ROWS - 2) * PER_TOKEN]
    assert np.array_equal(step.out.buffer[:-2], whole[:-2])
    assert not step.out.buffer[-2:].any()


def test_experts_one_by_one_get_a_row_twice_only_where_one_alone_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    run = SingleExperts._run_expert
    monkeypatch.setattr(
        SingleExperts,
        "_run_expert",
        lambda self, expert, x, y: asked.append(len(x)) or run(self, expert, x, y),
    )
    experts = _open(_block(8, Gate("silu"), shifts=True)).experts
    row = np.random.default_rng(5).standard_normal((1, HIDDEN)).astype(np.float32)
    answers = []
    for doubles in (False, True):
        asked.clear()
        answers.append(replace(experts, doubles=doubles).run(row, np.array([2])))
        assert asked == [1 + doubles]
    assert experts.doubles or np.array_equal(*answers)

"""A stage whose device is full computes a step again once something was freed, and tells when that did not help."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.errors import DeviceMemoryError
from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.models.spec import whole
from shardcompute.runtime.shard import build_executor
from shardcompute.runtime.stage import StageRuntime
from support.models.full_device import FullDevice
from support.models.networks import RandomTensors, plain_spec

PROMPT = (3, 1, 4, 1, 5)
OPENING = Opening(1, Sampling(temperature=0.0), len(PROMPT))


def open_stage(device: FullDevice) -> StageRuntime:
    spec = plain_spec()
    executor = build_executor(
        spec, whole(spec), RandomTensors(spec), backend="numpy", options=ExecutorOptions(kv_bytes=1 << 22)
    )
    return StageRuntime(device.wrap(executor), is_first=True, is_last=True)


def answer(device: FullDevice, tokens: int = 6) -> list[int]:
    stage, told = open_stage(device), list(PROMPT)
    for _ in range(tokens):
        known = 0 if len(told) == len(PROMPT) else len(told) - 1
        work = [SessionRows(1, known, tuple(told[known:]), logit_rows=1)]
        out = stage.step(work, [OPENING] if known == 0 else [], None)
        assert isinstance(out, list)
        told.append(out[0].choice.id)
    stage.close()
    return told[len(PROMPT) :]


@pytest.mark.parametrize("is_full", [lambda step: step == 1, lambda step: step == 4, lambda step: step % 2])
def test_a_step_is_computed_again_and_gives_the_same(is_full: Callable[[int], bool]) -> None:
    assert answer(FullDevice(is_full)) == answer(FullDevice())


def test_a_device_that_stays_full_is_told_and_keeps_what_it_had() -> None:
    device = FullDevice(lambda step: step in (2, 3))
    stage = open_stage(device)
    [first] = stage.step([SessionRows(1, 0, PROMPT, logit_rows=1)], [OPENING], None)
    row = [SessionRows(1, len(PROMPT), (first.choice.id,), logit_rows=1)]
    with pytest.raises(DeviceMemoryError, match="while a step was computed"):
        stage.step(row, [], None)
    assert device.steps == 3, "once more, and no oftener"
    [second] = stage.step(row, [], None)
    assert [first.choice.id, second.choice.id] == answer(FullDevice(), 2)

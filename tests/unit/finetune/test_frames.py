"""What a run in a swarm says: packed and unpacked, and the order in which a stage works."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcompute.core.errors import LinkError
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.plan import FinetunePlan, LoraShape, check_finetune_plan
from shardcompute.finetune.swarm.frames import (
    TensorNames,
    one_forward_one_backward,
    pack_batch,
    pack_rows,
    pack_state,
    unpack_batch,
    unpack_rows,
    unpack_state,
)

BATCH = MicroBatch(
    ids=np.arange(7, dtype=np.int32),
    lengths=(3, 4),
    rows=np.asarray([1, 5], dtype=np.int32),
    targets=np.asarray([2, 6], dtype=np.int32),
    total=5,
    key=(3, 1),
)


@given(place=st.integers(0, 6), behind=st.integers(0, 6), count=st.integers(1, 12))
def test_a_stage_goes_each_way_once_and_holds_few_micro_batches(place: int, behind: int, count: int) -> None:
    stages = place + behind + 1
    order = one_forward_one_backward(place, stages, count)
    for way in ("forward", "backward"):
        assert [number for what, number in order if what == way] == list(range(count))
    held, most = 0, 0
    for what, number in order:
        held += 1 if what == "forward" else -1
        most = max(most, held)
        assert what == "forward" or order.index(("forward", number)) < order.index((what, number))
    assert most == min(count, behind + 1)


def test_micro_batches_come_as_they_went_and_contradictions_are_refused() -> None:
    found = unpack_batch(pack_batch(BATCH), 7)
    np.testing.assert_array_equal(found.ids, BATCH.ids)
    np.testing.assert_array_equal(found.targets, BATCH.targets)
    assert (found.lengths, found.total, found.key) == (BATCH.lengths, BATCH.total, BATCH.key)
    facts = pack_batch(BATCH)
    wrong = (
        msgspec.structs.replace(facts, lengths=[3, 5]),
        msgspec.structs.replace(facts, rows=facts.rows[:4]),
        msgspec.structs.replace(facts, ids=facts.ids[:-1]),
        pack_batch(replace(BATCH, rows=np.asarray([1, 7], dtype=np.int32))),
        pack_batch(replace(BATCH, total=0)),
    )
    for each in wrong:
        with pytest.raises(LinkError):
            unpack_batch(each, 7)
    with pytest.raises(LinkError):
        unpack_batch(facts, 6)


def test_rows_and_states_come_as_they_went() -> None:
    values = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    facts, body = pack_rows(values, "exact")
    np.testing.assert_array_equal(unpack_rows(facts, memoryview(b"".join(map(bytes, body)))), values)
    state = {"a": values, "b": values[0, :3]}
    found = {}
    for names, parts in pack_state(state):
        found |= unpack_state(names, memoryview(b"".join(map(bytes, parts))))
    assert found.keys() == state.keys()
    assert all(np.array_equal(found[name], state[name]) for name in state)
    with pytest.raises(LinkError, match="cut short"):
        unpack_state(TensorNames([("a", [4])], is_last=True), memoryview(bytes(12)))
    with pytest.raises(LinkError, match="cut short"):  # a product that is 0 in 64 bits
        unpack_state(TensorNames([("a", [1 << 32, 1 << 32])], is_last=True), memoryview(bytes(12)))


def test_rates_rise_and_fall_as_planned() -> None:
    plan = FinetunePlan(steps=10, rate=0.5, warmup=2)
    assert [plan.rate_at(step) for step in (0, 1, 2, 6)] == [0.25, 0.5, 0.5, 0.25]
    assert replace(plan, schedule="cosine").rate_at(6) == pytest.approx(0.25)
    assert replace(plan, schedule="constant").rate_at(9) == 0.5
    assert LoraShape(16, 8.0).scale == 0.5
    assert LoraShape(16, 8.0, is_rank_stabilised=True).scale == 2.0
    assert check_finetune_plan(plan) is plan

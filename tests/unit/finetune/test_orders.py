"""Orders that a stage refuses before they cost anything, and rows that wait until there is room for them."""

from __future__ import annotations

import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shardcompute.core.errors import LinkError, ShardComputeError, UsageError
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.swarm.frames import (
    ApplyStep,
    LearnStep,
    OpenStage,
    PeerAddress,
    RowFacts,
    TensorNames,
    make_frame,
    pack_batch,
    read_facts,
)
from shardcompute.finetune.swarm.stage_runner import Mailbox
from shardcompute.finetune.swarm.validation import (
    check_apply,
    check_opening,
    check_rows,
    check_taken,
    unpack_step,
)
from support.network.training_words import TAUGHT, training_words

VOCABULARY = 256


def opening() -> OpenStage:
    frame = next(message for message, _ in training_words(8) if getattr(message, "kind", "") == "open")
    return read_facts(frame, OpenStage)  # type: ignore[arg-type]


def batch(lengths: tuple[int, ...], number: int = 0) -> MicroBatch:
    ids = np.arange(sum(lengths), dtype=np.int32)
    return MicroBatch(ids, lengths, ids[:2], ids[1:3], 4, (0, number))


@pytest.mark.parametrize(
    "changes",
    [
        {"place": 2},
        {"start": 2},
        {"next": None},
        {"previous": "somebody"},
        {"codec": "magic"},
        {"copy": 1},
        {"copies": [PeerAddress("a", "u"), PeerAddress("a", "u")]},
        {"plan": replace(TAUGHT, betas=(1.0, 0.999))},
        {"plan": replace(TAUGHT, micro_batches=0)},
    ],
)
def test_openings_that_contradict_themselves_are_refused(changes: dict[str, object]) -> None:
    assert check_opening(opening()) == opening()
    with pytest.raises(ShardComputeError):
        check_opening(msgspec.structs.replace(opening(), **changes))


@pytest.mark.parametrize(
    "batches",
    [
        [batch((3, 4), number) for number in range(3)],
        [batch((3, 17))],
        [batch((3, 3, 3, 3, 3))],
        [batch((3, 4), 1), batch((3, 4), 0)],
        [batch((3, 4), 1), batch((3, 4), 1)],
    ],
)
def test_more_than_was_planned_for_is_not_learned(batches: list[MicroBatch]) -> None:
    with pytest.raises(LinkError):
        unpack_step(LearnStep([pack_batch(each) for each in batches]), TAUGHT, VOCABULARY, is_learned=True)


def test_steps_rows_and_states_are_bounded() -> None:
    assert check_apply(ApplyStep(7, 1.0), TAUGHT).step == 7
    for wrong in (ApplyStep(8, 1.0), ApplyStep(0, 1.5), ApplyStep(0, float("nan"))):
        with pytest.raises(LinkError):
            check_apply(wrong, TAUGHT)
    check_rows(RowFacts(64, 8, "exact"), "rows", "rows", 8, TAUGHT)
    for facts, kind in (
        (RowFacts(65, 8, "exact"), "rows"),
        (RowFacts(64, 9, "exact"), "rows"),
        (RowFacts(64, 8, "exact"), "gradient"),
    ):
        with pytest.raises(LinkError):
            check_rows(facts, kind, "rows", 8, TAUGHT)
    state = {name: np.zeros(8, dtype=np.float32) for name in "abc"}
    check_taken(state, 8)
    with pytest.raises(LinkError):
        check_taken(state, 7)


def test_shapes_without_end_are_refused_before_they_are_multiplied() -> None:
    endless = msgspec.json.encode({"tensors": [["a", [2] * 100_000]], "is_last": True})
    frame, _ = make_frame("run", "load", TensorNames([], True))
    with pytest.raises(LinkError):
        read_facts(msgspec.structs.replace(frame, facts=endless), TensorNames)


def test_rows_wait_until_there_is_room_and_no_longer_than_the_run() -> None:
    mailbox, rows = Mailbox(most=2), np.zeros((1, 8), dtype=np.float32)
    for number in range(2):
        mailbox.put("rows", 1, number, rows)
    mailbox.put("gradient", 1, 0, rows)
    has_put = threading.Event()

    def put() -> None:
        mailbox.put("rows", 1, 2, rows)
        has_put.set()

    threading.Thread(target=put, daemon=True).start()
    assert not has_put.wait(0.05)
    mailbox.take("rows", 1, 0)
    assert has_put.wait(30)
    mailbox.fail("over")
    with pytest.raises(LinkError, match="over"):
        mailbox.put("rows", 1, 3, rows)


def test_a_stage_that_is_no_stage_is_said_so() -> None:
    with pytest.raises(UsageError, match="there is no stage 2 of 2"):
        check_opening(msgspec.structs.replace(opening(), place=2))

"""Readers of frames: what the parts of a node make of the bytes that a peer sends, before they act on it."""

from __future__ import annotations

import contextlib

from shardcompute.control.events import NodeJoined, decode_event
from shardcompute.core.errors import ShardComputeError, rebuild_error
from shardcompute.decoding import validate_sampling
from shardcompute.finetune.swarm.frames import (
    ApplyStep,
    Failure,
    LearnStep,
    OpenStage,
    RowFacts,
    StepSums,
    TensorNames,
    read_facts,
    unpack_rows,
    unpack_state,
)
from shardcompute.finetune.swarm.validation import (
    check_apply,
    check_opening,
    check_rows,
    check_taken,
    unpack_step,
)
from shardcompute.node.coordinator.validation import validate_join, validate_report
from shardcompute.node.rpc.commands import decode_command, decode_connected
from shardcompute.node.rpc.frames import error_of, head_drafts_of, openings_of, picked_of, work_of
from shardcompute.weights.card import decode_card
from shardcompute.wire import Message, StepFailed, StepFrame, StepResult, TrainingFrame
from shardcompute.wire.codecs import find_codec
from shardcompute.wire.control import CardReply, Command, CommandReply, NodeEvent, Register
from shardcompute.wire.framing import FrameReader
from shardcompute.wire.generations import Generate, unpack_request
from support.network.mutations import LIMITS, WIDTH
from support.network.training_words import TAUGHT

VOCABULARY = 256


def read(content: bytes) -> int:
    """The messages of a stream, each taken for what its receiver takes it; how many there were."""
    reader, place, count = FrameReader(LIMITS), 0, 0
    while place < len(content):
        space = reader.space()
        taken = min(len(space), len(content) - place)
        assert taken > 0
        space[:taken] = content[place : place + taken]
        reader.advance(taken)
        place += taken
        while (found := reader.next_frame()) is not None:
            interpret(*found)
            count += 1
    return count


def interpret(message: Message, body: memoryview) -> None:
    """What the parts of a node make of a message before they act on it."""
    if isinstance(message, StepFrame):
        for segment in message.segments:
            work_of(segment)
        for opening in openings_of(message, body):
            validate_sampling(opening.sampling, VOCABULARY)
        if message.width:
            find_codec(message.codec).decode(body, message.rows, message.width)
    elif isinstance(message, StepResult):
        picked_of(message)
        head_drafts_of(message)
    elif isinstance(message, StepFailed):
        error_of(message)
    elif isinstance(message, Register | NodeEvent):
        # Links end for these two.
        with contextlib.suppress(ValueError, RecursionError):
            event = decode_event(message.event)
            if isinstance(event, NodeJoined):
                validate_join(event)
            else:
                validate_report(event, "node", "driver", {"node"})
    elif isinstance(message, Command):
        decode_command(message.action)
    elif isinstance(message, CommandReply):
        decode_connected(message.result)
    elif isinstance(message, CardReply):
        decode_card(message.card)
    elif isinstance(message, Generate):
        unpack_request(message, body)
    elif isinstance(message, TrainingFrame):
        read_training(message, body)


def read_training(message: TrainingFrame, body: memoryview) -> None:
    """What a stage that learns, its neighbours and its driver make of a word of their run."""
    kind = message.kind
    if kind == "open":
        check_opening(read_facts(message, OpenStage))
    elif kind in ("learn", "evaluate"):
        unpack_step(read_facts(message, LearnStep), TAUGHT, VOCABULARY, is_learned=kind == "learn")
    elif kind == "apply":
        check_apply(read_facts(message, ApplyStep), TAUGHT)
    elif kind in ("rows", "gradient"):
        facts = read_facts(message, RowFacts)
        check_rows(facts, kind, kind, WIDTH, TAUGHT)
        unpack_rows(facts, body)
    elif kind in ("load", "state"):
        check_taken(unpack_state(read_facts(message, TensorNames), body), 64)
    elif kind == "sums":
        read_facts(message, StepSums)
    elif kind == "failed":
        failure = read_facts(message, Failure)
        rebuild_error(failure.code, failure.message, failure.hint)


def is_whole(content: bytes) -> bool:
    """Whether a link goes on behind it."""
    try:
        return read(content) > 0
    except ShardComputeError:
        return False

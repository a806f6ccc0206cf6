"""Every word of a fine-tuning run, as a valid frame."""

from __future__ import annotations

import msgspec
import numpy as np

from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.modules import AdaptedMap
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from shardcompute.finetune.swarm.frames import (
    ApplyStep,
    Failure,
    LearnStep,
    NoFacts,
    OpenStage,
    PeerAddress,
    StepSums,
    make_frame,
    pack_batch,
    pack_rows,
    pack_state,
)
from shardcompute.models.layout import TensorPlace
from shardcompute.weights.adapters import BaseModule
from shardcompute.wire import Message

TAUGHT = FinetunePlan(steps=8, batch=4, micro_batches=2, longest=16, lora=LoraShape(rank=2))
_RUN = "run-1"


def training_words(width: int) -> list[tuple[Message, bytes]]:
    """With rows of this width."""
    ids = np.arange(7, dtype=np.int32)
    batches = [
        pack_batch(MicroBatch(ids, (3, 4), ids[1:3], ids[2:4], 4, key=(3, number))) for number in range(2)
    ]
    place = TensorPlace("model.layers.0.mlp.down_proj.weight", (width, width))
    module = AdaptedMap(
        0,
        "mlp.down_proj",
        "base_model.model.model.layers.0.mlp.down_proj",
        BaseModule(place.stored, (("mlp.down", place),), width, width, True),
    )
    peer = PeerAddress("node", "tcp://127.0.0.1:1")
    opening = OpenStage(
        model="m", origin=peer, start=0, stop=2, stages=2, place=0, plan=TAUGHT, modules=[module],
        mean_tokens=5.0, recomputes=False, next=peer,
    )  # fmt: skip
    words: list[tuple[str, msgspec.Struct]] = [
        ("open", opening),
        ("join", NoFacts()),
        ("connect", NoFacts()),
        ("learn", LearnStep(batches)),
        ("evaluate", LearnStep(batches)),
        ("apply", ApplyStep(3, 0.5)),
        ("sums", StepSums(0.5, [0.25, 1.0], 0.5, 100)),
        ("failed", Failure("CapacityError", "no room", "use less")),
    ]
    rows = np.zeros((5, width), dtype=np.float32)
    found = [_word(kind, facts) for kind, facts in words]
    found += [
        _word(kind, *pack_rows(rows, codec)) for kind in ("rows", "gradient") for codec in ("exact", "int8")
    ]
    found += [_word("load", *piece) for piece in pack_state({"a": rows, "b": rows[0]})]
    return found


def _word(kind: str, facts: msgspec.Struct, body: object = ()) -> tuple[Message, bytes]:
    parts = [bytes(part) for part in body]  # type: ignore[attr-defined]
    frame, _ = make_frame(_RUN, kind, facts, parts, call=1, number=1)
    return frame, b"".join(parts)

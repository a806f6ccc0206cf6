"""What a run in a swarm says: the driver to its stages, and stages to each other. All of it travels in `TrainingFrame`.

The driver opens a stage on each worker, has it connect to the next, and then gives one order after the other: learn a
step, apply its gradients, look at held-out batches, tell or take its state. Activations go forward and gradients back
on the link between two stages, in the form that a codec of `wire` makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import LinkError
from shardcompute.core.fields import Name, Number, Text
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.modules import AdaptedMap
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.wire import Body, TrainingFrame, find_codec

PIECE_BYTES = 32 << 20
JOINS_BEHIND = 1
"""The number of a "join" that comes from behind a stage, not from before it."""
_MOST_NAMES = 1 << 16
_MOST_ROWS, _MOST_WIDTH = 1 << 24, 1 << 20
_MOST_BATCHES = 1 << 16
_MOST_COPIES = 256
Dimension = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Place = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
"""Of a layer or a stage."""
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Facts = TypeVar("Facts", bound=msgspec.Struct)


class PeerAddress(msgspec.Struct, frozen=True):
    """A node, and where it is reached."""

    node: Name
    url: Name


class OpenStage(msgspec.Struct, frozen=True, kw_only=True):
    """Have layers `[start, stop)` of a served model ready to learn. `previous` sends activations, `next` gets them."""

    model: Name
    origin: PeerAddress
    start: Place
    stop: Place
    stages: Place
    place: Place
    plan: FinetunePlan
    modules: Annotated[list[AdaptedMap], msgspec.Meta(max_length=_MOST_NAMES)]
    mean_tokens: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    recomputes: bool
    codec: Annotated[str, msgspec.Meta(max_length=64)] = "exact"
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Of the time that it may compute; serving has the rest to itself."""
    previous: Name = ""
    next: PeerAddress | None = None
    ahead: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """How many micro-batches more than there are stages behind it go forward before the first comes back."""
    copy: Place = 0
    copies: Annotated[list[PeerAddress], msgspec.Meta(max_length=_MOST_COPIES)] = []
    """Workers that have the same layers, this one at `copy`; each learns from its own micro-batches of a step."""


class BatchFacts(msgspec.Struct, frozen=True):
    """A `MicroBatch`."""

    ids: bytes
    lengths: list[Dimension]
    rows: bytes
    targets: bytes
    total: Number
    key: tuple[Number, Number]


class LearnStep(msgspec.Struct, frozen=True):
    batches: Annotated[list[BatchFacts], msgspec.Meta(max_length=_MOST_BATCHES)]


class StepSums(msgspec.Struct, frozen=True):
    """What a stage found: its part of the loss (the last stage alone), and by layer the squared sum of gradients."""

    loss: float
    squares: Annotated[list[Annotated[float, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=_MOST_NAMES)]
    busy_s: Seconds
    sent_bytes: Number


class ApplyStep(msgspec.Struct, frozen=True):
    step: Number
    scale: float


class RowFacts(msgspec.Struct, frozen=True):
    rows: Annotated[int, msgspec.Meta(ge=1, le=_MOST_ROWS)]
    width: Annotated[int, msgspec.Meta(ge=1, le=_MOST_WIDTH)]
    codec: Annotated[str, msgspec.Meta(max_length=64)]


class TensorNames(msgspec.Struct, frozen=True):
    """Of a piece of state; `is_last`: there are no more pieces."""

    tensors: Annotated[
        list[tuple[Name, Annotated[list[Dimension], msgspec.Meta(min_length=1, max_length=4)]]],
        msgspec.Meta(max_length=_MOST_NAMES),
    ]
    is_last: bool


class Failure(msgspec.Struct, frozen=True):
    """`code` is the name of a class in `core.errors`."""

    code: Name
    message: Text
    hint: Text


class StageOpened(msgspec.Struct, frozen=True):
    """What the optimiser of a stage holds; of copies each has its share."""

    optimizer_bytes: Number = 0


class NoFacts(msgspec.Struct, frozen=True):
    pass


def make_frame(
    run: str, kind: str, facts: msgspec.Struct, body: Body = (), *, call: int = 0, number: int = 0
) -> tuple[TrainingFrame, Body]:
    size = sum(memoryview(part).nbytes for part in body)
    return TrainingFrame(run, kind, call, number, msgspec.json.encode(facts), size), body


def read_facts(frame: TrainingFrame, kind: type[Facts]) -> Facts:
    try:
        return msgspec.json.decode(frame.facts, type=kind)
    except (ValueError, RecursionError) as error:
        raise LinkError(
            f"what came with {frame.kind!r} cannot be understood: {error}",
            hint="run one release on all nodes",
        ) from error


def pack_batch(batch: MicroBatch) -> BatchFacts:
    return BatchFacts(
        batch.ids.astype("<i4").tobytes(),
        list(batch.lengths),
        batch.rows.astype("<i4").tobytes(),
        batch.targets.astype("<i4").tobytes(),
        batch.total,
        batch.key,
    )


def unpack_batch(facts: BatchFacts, vocab_size: int) -> MicroBatch:
    """LinkError where its numbers contradict each other."""
    ids, rows, targets = (_ids(each) for each in (facts.ids, facts.rows, facts.targets))
    is_good = (
        len(ids) == sum(facts.lengths) > 0
        and min(facts.lengths, default=0) > 0
        and len(rows) == len(targets) > 0
        and int(rows.min()) >= 0
        and int(rows.max()) < len(ids)
        and min(int(ids.min()), int(targets.min())) >= 0
        and max(int(ids.max()), int(targets.max())) < vocab_size
        and facts.total > 0
    )
    if not is_good:
        raise LinkError("a micro-batch contradicts itself", hint="run one release on all nodes")
    return MicroBatch(ids, tuple(facts.lengths), rows, targets, facts.total, facts.key)


def _ids(content: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if len(content) % 4:
        raise LinkError("token ids were cut short")
    return np.frombuffer(content, dtype="<i4").astype(np.int32)


def pack_rows(values: Float32, codec: str) -> tuple[RowFacts, Body]:
    """Activations or gradients `[rows, width]`."""
    rows, width = values.shape
    return RowFacts(rows, width, codec), find_codec(codec).encode(np.ascontiguousarray(values))


def unpack_rows(facts: RowFacts, body: memoryview) -> Float32:
    decoded = find_codec(facts.codec).decode(body, facts.rows, facts.width)
    return np.array(decoded, dtype=np.float32)


def pack_state(state: Mapping[str, Float32]) -> Iterator[tuple[TensorNames, Body]]:
    """A state in pieces that are no larger than a frame may be."""
    pieces: list[list[str]] = [[]]
    size = 0
    for name, values in state.items():
        if size and size + values.nbytes > PIECE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(name)
        size += values.nbytes
    for place, names in enumerate(pieces):
        tensors = [(name, list(state[name].shape)) for name in names]
        body = [np.ascontiguousarray(state[name], dtype="<f4").data.cast("B") for name in names]
        yield TensorNames(tensors, place == len(pieces) - 1), body


def unpack_state(names: TensorNames, body: memoryview) -> dict[str, Float32]:
    found: dict[str, Float32] = {}
    start = 0
    for name, shape in names.tensors:
        stop = start + 4 * math.prod(shape)
        if not all(each > 0 for each in shape) or stop > len(body):
            raise LinkError(f"{name[:80]} of a state was cut short", hint="run one release on all nodes")
        found[name] = np.frombuffer(body[start:stop], dtype="<f4").reshape(shape).astype(np.float32)
        start = stop
    return found


def in_flight(place: int, stages: int, count: int, more: int = 0) -> int:
    """How many micro-batches a stage keeps at most. The last one has nobody to wait for."""
    behind = stages - place - 1
    return min(count, behind + (more if behind else 0) + 1)


def one_forward_one_backward(place: int, stages: int, count: int, more: int = 0) -> Sequence[tuple[str, int]]:
    """What a stage does in a step of `count` micro-batches, in order: as many forward as there are stages behind it,
    and `more`, then one forward, one backward, so that none of them waits for a whole step and few activations are
    kept. With some more under way a stage has work while rows are on the line."""
    ahead = min(count, in_flight(place, stages, count, more) - 1) if count else 0
    order = [("forward", number) for number in range(ahead)]
    for number in range(ahead, count):
        order += [("forward", number), ("backward", number - ahead)]
    return [*order, *(("backward", number) for number in range(count - ahead, count))]

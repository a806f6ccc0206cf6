"""Tensor ranks as one executor: the first rank leads, the others do as it does.

A `TensorLeader` is an `Executor` like any other. It sends what it is asked to do to the other ranks, in one broadcast
each, where `follow_leader` runs, and all compute it together. What could be refused is refused before anything is sent:
the leader counts KV for all ranks by the one that holds least. A step that fails further on ends the group.

Tokens are picked once, by whoever drives the leader. Of logits, a rank sends only what may be picked: the best of a
row, or the tokens near enough to it to be drawn; whole rows only where somebody wants to see them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from shardcompute.backends.executor import (
    Executor,
    ExecutorOptions,
    KvUsage,
    PickRule,
    SynchronousSteps,
    refuse_pictures,
)
from shardcompute.backends.kv import PageBudget, count_pages
from shardcompute.backends.matrix import Array, Float32
from shardcompute.collectives import Group
from shardcompute.core.batch import PAGE_TOKENS, Segment, count_rows
from shardcompute.core.errors import LinkError, UsageError
from shardcompute.core.pictures import PictureSpan
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.models.tensor_share import TensorSplit

_HEAD_BYTES = 4
_INPUTS: dict[str, Any] = {"int64": np.int64, "float32": np.float32}
IDLE_S = 600.0
"""How long a rank waits for its leader's next command before it takes it for lost."""
_REPORT_STEPS = 64
"""So often ranks tell how long they compute."""


class RankStep(msgspec.Struct, frozen=True, tag=True):
    """A step whose inputs come with it. `kinds` say, for each logit row, what is wanted of it."""

    segments: list[Segment]
    shape: list[int]
    dtype: str
    kinds: list[RowKind] | None
    keeps_hidden: bool


class RowKind(msgspec.Struct, frozen=True, array_like=True):
    """What ranks send of a row of logits: all (`reach` is None), or at most `top` (0: any number) that are no more than
    `reach` below their best."""

    reach: float | None = None
    top: int = 0


class RankAdopt(msgspec.Struct, frozen=True, tag=True):
    source: int
    target: int
    length: int
    is_moved: bool


class RankClose(msgspec.Struct, frozen=True, tag=True):
    """Close a session; None: close the executor, and follow no more."""

    session: int | None


class RankBegin(msgspec.Struct, frozen=True, tag=True):
    """The group is new: agree upon how much KV all ranks can hold, and which sessions all of them still do."""


class RankReport(msgspec.Struct, frozen=True, tag=True):
    """Say how long you have computed since you said so last."""


class RankWait(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do yet."""


Command = RankStep | RankAdopt | RankClose | RankBegin | RankReport | RankWait
_WHOLE_ROW = RowKind()
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class TensorLeader(SynchronousSteps):
    """See `Executor`, and `PickingExecutor` where the stage is the last one."""

    def __init__(
        self,
        executor: Executor,
        rank: TensorRank,
        group: Group,
        stage: Stage,
        options: ExecutorOptions,
        held: Mapping[int, int] | None = None,
    ) -> None:
        """The executor of this rank of a stage; the others come to `follow_leader`. Of the sessions `held` (which, and
        how many tokens of each), those go on that the others still hold, too; None: it begins with none."""
        self._ranked = _RankedExecutor(executor, rank, group, stage.is_last)
        self._ranked.held = held or {}
        self._group = group
        self._steps = 0
        self.exchange_s = 0.0
        """How long the last step was in exchanges."""
        self.slowest: int | None = None
        """The rank for which the others have waited most of late."""
        self._is_first = stage.is_first
        self._options = options
        self._hidden, self._vocabulary = rank.spec.hidden, rank.spec.vocab_size
        self._command(RankBegin())
        agreed = self._ranked.agreed
        self._budget = PageBudget(agreed.page_bytes, agreed.pages, options.context_length)
        for session, length in agreed.lengths.items():
            self._budget.take(Segment(session, 0, length))

    @property
    def can_pick(self) -> bool:
        return self._ranked.is_last

    def can_continue(self, session: int, position: int) -> bool:
        return False

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        return self._run(segments, inputs, None, keeps_hidden=keeps_hidden).array

    def launch_picks(
        self,
        segments: Sequence[Segment],
        inputs: Array,
        rules: Sequence[PickRule | None],
        *,
        keeps_hidden: bool = False,
    ) -> PickedStep:
        kinds = [_kind_of(rule) for rule in rules]
        return PickedStep(self._run(segments, inputs, kinds, keeps_hidden=keeps_hidden))

    def hidden_rows(self) -> Array:
        return self._ranked.executor.hidden_rows()

    def final_rows(self) -> Array:
        return self._ranked.executor.final_rows()

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        self._budget.adopt(source, target, length, is_moved=is_moved)
        self._command(RankAdopt(source, target, length, is_moved))

    def open_pictures(
        self, session: int, spans: Sequence[PictureSpan], patches: Sequence[bytes] | None
    ) -> None:
        raise refuse_pictures("a stage of tensor ranks")

    def close_session(self, session: int) -> None:
        if session in self._budget.lengths:
            self._budget.release(session)
            self._command(RankClose(session))

    def session_length(self, session: int) -> int:
        return self._budget.lengths.get(session, 0)

    def sessions(self) -> list[int]:
        return list(self._budget.lengths)

    def kv_usage(self) -> KvUsage:
        """Of all ranks together."""
        return self._budget.usage()

    def keep_waiting(self) -> None:
        """Tell the other ranks that there is nothing to do: they do not wait longer than `IDLE_S` without a word."""
        self._command(RankWait())

    def close(self) -> None:
        self._command(RankClose(None))

    def _run(
        self,
        segments: Sequence[Segment],
        inputs: Array,
        kinds: list[RowKind] | None,
        *,
        keeps_hidden: bool,
    ) -> RowParts:
        self._check(segments, inputs)
        inputs = np.ascontiguousarray(inputs, dtype=np.int64 if self._is_first else np.float32)
        step = RankStep(list(segments), list(inputs.shape), str(inputs.dtype), kinds, keeps_hidden)
        busy_s = self._group.stats.busy_s
        parts = self._command(step, inputs)
        self.exchange_s = self._group.stats.busy_s - busy_s
        for segment in segments:
            self._budget.take(segment)
        self._steps += 1
        if self._steps % _REPORT_STEPS == 0:
            self._command(RankReport())
            self.slowest = self._ranked.slowest
        assert parts is not None
        return parts

    def _check(self, segments: Sequence[Segment], inputs: Array) -> None:
        rows, logit_rows = count_rows(segments), sum(segment.logit_rows for segment in segments)
        most, most_logits = self._options.max_rows, self._options.max_logit_rows
        if rows > most or logit_rows > most_logits:
            raise UsageError(
                f"a step takes at most {most} rows and gives logits of {most_logits}, not {rows} and {logit_rows}"
            )
        expected = (rows,) if self._is_first else (rows, self._hidden)
        if inputs.shape != expected:
            raise UsageError(f"this step's input must have the shape {expected}, not {inputs.shape}")
        if self._is_first and rows and not 0 <= inputs.min() <= inputs.max() < self._vocabulary:
            raise UsageError(f"a token id is outside the vocabulary of {self._vocabulary}")
        self._budget.check(segments)

    def _command(self, command: Command, body: Array | None = None) -> RowParts | None:
        try:
            self._group.broadcast(_pack(command, body))
            return self._ranked.do(command, body)
        except LinkError:
            raise
        except Exception as error:
            self._group.abort(f"rank {self._group.rank} failed: {error}")
            raise


def join_ranks(spec: ModelSpec, split: TensorSplit, group: Group) -> TensorRank:
    """This rank of a split, with the groups of its row and column where ranks are a block grid."""
    if split.grid is None:
        return TensorRank(spec, split, group)
    row, column = split.row_mates(group.rank), split.column_mates(group.rank)
    return TensorRank(spec, split, group, group.split(row), group.split(column))


def follow_leader(executor: Executor, rank: TensorRank, group: Group, stage: Stage) -> None:
    """Do what the leader does until it closes. Raises what ended the group otherwise."""
    ranked = _RankedExecutor(executor, rank, group, stage.is_last)
    ranked.held = {session: executor.session_length(session) for session in executor.sessions()}
    is_open = True
    while is_open:
        command, body = _unpack(group.broadcast(None, 0, IDLE_S))
        try:
            ranked.do(command, body)
        except LinkError:
            raise
        except Exception as error:
            group.abort(f"rank {group.rank} failed: {error}")
            raise
        is_open = command != RankClose(None)


@dataclass(frozen=True, slots=True)
class RowParts:
    """What a step brings: hidden states, all logits, or of each logit row what ranks have sent of it."""

    array: Array
    kinds: Sequence[RowKind] = ()
    whole: Mapping[int, Float32] = field(default_factory=dict)
    """Rows of which all logits were wanted."""
    candidates: Mapping[int, tuple[Array, Float32]] = field(default_factory=dict)
    """Of the others the ids and logits of tokens that may be picked."""
    vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class PickedStep:
    """A step with tokens to be picked, computed (see `PendingPicks` and `PickedRows`)."""

    parts: RowParts

    def is_ready(self) -> bool:
        return True

    def wait(self) -> PickedStep:
        return self

    def token(self, row: int) -> int | None:
        """The best token, where that is what is wanted and logits are numbers. The lowest of several."""
        if self.parts.kinds[row] != _GREEDY:
            return None
        ids, logits = self.parts.candidates[row]
        best = int(np.argmax(logits))
        return int(ids[best]) if math.isfinite(logits[best]) else None

    def guess(self, row: int) -> int:
        return self.token(row) or 0

    def logits(self, row: int) -> Array:
        """Tokens that were not sent cannot be picked: they are left out as forbidden ones are."""
        if row in self.parts.whole:
            return self.parts.whole[row]
        ids, logits = self.parts.candidates[row]
        sparse: Float32 = np.full(self.parts.vocabulary, -np.inf, dtype=np.float32)
        sparse[ids] = logits
        return sparse


_GREEDY = RowKind(0.0, 1)


def _kind_of(rule: PickRule | None) -> RowKind:
    if rule is None:
        return _WHOLE_ROW
    return RowKind(rule.reach, rule.top_k) if rule.temperature else _GREEDY


class _RankedExecutor:
    """One rank's executor, and what it gives of its part of the logits."""

    def __init__(self, executor: Executor, rank: TensorRank, group: Group, is_last: bool) -> None:
        self.executor = executor
        self.is_last = is_last
        self.held: Mapping[int, int] = {}
        self.agreed = AgreedKv(0, 0, {})
        self.slowest: int | None = None
        self._group = group
        self._computed_s = 0.0
        self._vocabulary = rank.spec.vocab_size
        self._first_id = rank.share.vocabulary[0]

    def do(self, command: Command, body: Array | None) -> RowParts | None:
        if isinstance(command, RankStep):
            assert body is not None
            return self._step(command, body)
        if isinstance(command, RankBegin):
            self.agreed = _agree(self.executor, self._group, self.held)
        elif isinstance(command, RankReport):
            told = self._group.all_gather(np.array([self._computed_s]))
            self.slowest, self._computed_s = int(np.argmax(np.concatenate(told))), 0.0
        elif isinstance(command, RankAdopt):
            self.executor.adopt(command.source, command.target, command.length, is_moved=command.is_moved)
        elif isinstance(command, RankClose):
            if command.session is None:
                self.executor.close()
            else:
                self.executor.close_session(command.session)
        return None

    def _step(self, command: RankStep, inputs: Array) -> RowParts:
        started_s, waited_s = time.monotonic(), self._group.stats.busy_s
        out = self.executor.step(command.segments, inputs, keeps_hidden=command.keeps_hidden)
        self._computed_s += time.monotonic() - started_s - (self._group.stats.busy_s - waited_s)
        if not self.is_last:
            return RowParts(out)
        if command.kinds is None:
            return RowParts(np.concatenate(self._group.all_gather(np.ascontiguousarray(out)), axis=-1))
        whole = [row for row, kind in enumerate(command.kinds) if kind.reach is None]
        others = [row for row, kind in enumerate(command.kinds) if kind.reach is not None]
        logits = np.concatenate(self._group.all_gather(out[whole]), axis=-1) if whole else ()
        found = self._gather([self._candidates(out[row], command.kinds[row]) for row in others])
        return RowParts(
            out,
            command.kinds,
            dict(zip(whole, logits, strict=True)),
            dict(zip(others, found, strict=True)),
            self._vocabulary,
        )

    def _candidates(self, logits: Float32, kind: RowKind) -> tuple[Array, Float32]:
        """Ascending ids, and logits, of what may be picked of this rank's part of a row."""
        if kind == _GREEDY:
            ids = np.array([np.argmax(logits)])
        else:
            assert kind.reach is not None
            # A little further than the sampler looks, whose best may be another rank's.
            floor = np.float32(logits.max() - kind.reach * (1 + 1e-5) - 1e-5)
            near = logits if not np.isfinite(floor) else np.where(logits >= floor, logits, -np.inf)
            ids = np.flatnonzero(~(near == -np.inf))
            if 0 < kind.top < len(ids):
                order = np.argsort(-logits[ids], kind="stable")[: kind.top]
                ids = np.sort(ids[order])
        return ids + self._first_id, logits[ids]

    def _gather(self, own: Sequence[tuple[Array, Float32]]) -> list[tuple[Array, Float32]]:
        """Candidates of all ranks by row, ids ascending: ranks hold the vocabulary in their order."""
        if not own:
            return []
        counts = np.array([len(ids) for ids, _ in own], dtype=np.int32)
        ids = np.concatenate([ids for ids, _ in own]).astype(np.int32)
        values = np.concatenate([values for _, values in own]).astype(np.float32)
        packed = np.concatenate([counts, ids, values.view(np.int32)])
        rows: list[list[tuple[Array, Float32]]] = [[] for _ in own]
        for part in self._group.all_gather(packed):
            for row, each in zip(rows, _unpack_rows(part, len(own)), strict=True):
                row.append(each)
        return [
            (np.concatenate([ids for ids, _ in row]), np.concatenate([values for _, values in row]))
            for row in rows
        ]


def _unpack_rows(packed: Array, rows: int) -> list[tuple[Array, Float32]]:
    counts = packed[:rows]
    total = int(counts.sum())
    if counts.min() < 0 or len(packed) != rows + 2 * total:
        raise UsageError("a rank sent candidates that do not add up")
    edges = np.cumsum(counts)[:-1]
    ids = np.split(packed[rows : rows + total], edges)
    values = np.split(packed[rows + total :].view(np.float32), edges)
    return list(zip(ids, values, strict=True))


@dataclass(frozen=True, slots=True)
class AgreedKv:
    """How many pages of KV every rank can hold, what a page takes on all of them together, and the sessions that all
    of them hold, as far as all of them do."""

    pages: int
    page_bytes: int
    lengths: Mapping[int, int]


def _agree(executor: Executor, group: Group, held: Mapping[int, int]) -> AgreedKv:
    usage = executor.kv_usage()
    kept = {session: executor.session_length(session) for session in executor.sessions()}
    pages = usage.free_tokens // PAGE_TOKENS + sum(map(count_pages, kept.values()))
    own = [pages, usage.total_bytes // max(1, pages)]
    own += [number for session in kept for number in (session, min(kept[session], held.get(session, 0)))]
    told = group.all_gather(np.array(own, dtype=np.int64))
    lengths = [dict(each[2:].reshape(-1, 2).tolist()) for each in told]
    common = {session: min(each.get(session, 0) for each in lengths) for session in kept}
    for session in kept:
        if not common[session]:
            executor.close_session(session)
    known = {session: length for session, length in common.items() if length}
    return AgreedKv(min(int(each[0]) for each in told), sum(int(each[1]) for each in told), known)


def _pack(command: Command, body: Array | None) -> Array:
    head = _encoder.encode(command)
    raw = b"" if body is None else body.tobytes()
    return np.frombuffer(len(head).to_bytes(_HEAD_BYTES, "little") + head + raw, dtype=np.uint8)


def _unpack(packed: Array) -> tuple[Command, Array | None]:
    raw = packed.tobytes()
    stop = _HEAD_BYTES + int.from_bytes(raw[:_HEAD_BYTES], "little")
    try:
        command = _decoder.decode(raw[_HEAD_BYTES:stop])
        if not isinstance(command, RankStep):
            return command, None
        return command, np.frombuffer(raw[stop:], _INPUTS[command.dtype]).reshape(command.shape)
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise LinkError(
            f"the first rank sent a command that cannot be read: {error}",
            hint="run the same release on every node",
        ) from None

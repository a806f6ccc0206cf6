"""Mutated frames: valid ones of every kind that travels, changed as chance and an enemy would, from a seed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from shardcompute.control.events import NodeMeasured, ShardFailed, ShardLoaded, encode_event
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.wire import Message, StageTiming, StepFrame, open_session, pack_frame, pack_ids
from shardcompute.wire import messages as wire
from shardcompute.wire.codecs import CODECS, find_codec
from shardcompute.wire.control import (
    CardReply,
    Command,
    CommandReply,
    FetchModel,
    FetchTensor,
    Heartbeat,
    LedgerDoubted,
    LedgerShown,
    LookAtLedger,
    NodeEvent,
    Register,
    Registered,
    TensorBytes,
)
from shardcompute.wire.framing import PREFIX_BYTES
from shardcompute.wire.generations import (
    Generate,
    GenerationFailed,
    HostLoad,
    ReceiptMade,
    StepTimed,
    pack_request,
)
from shardcompute.wire.limits import WireLimits
from support.network.training_words import training_words
from support.pictures import picture

LIMITS = WireLimits(max_header_bytes=1 << 16, max_body_bytes=1 << 16)
_PREFIX = struct.Struct("<3sBIQ")
_EDGES = (
    0,
    1,
    -1,
    127,
    128,
    255,
    1 << 15,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
_VALUES: tuple[Any, ...] = (
    *_EDGES,
    *(-(1 << 31), -(1 << 63)),
    *(0.0, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *(None, True, False, "", "x" * 5000, "\x00\x1b[2J", b"", b"\xff" * 4096),
    *([], {}, [[]] * 50, {0: 1}, {"a": None}),
)
WIDTH = 8


def frame(chain: str = "chain", epoch: int = 1, codec: str = "", session: int = 1) -> tuple[StepFrame, bytes]:
    """A step of one session: from a driver where no codec is named, else from a stage."""
    ids, width = [1, 2, 3], WIDTH if codec else 0
    body = bytes(find_codec(codec).body_bytes(len(ids), width)) if width else b""
    segment = wire.SegmentHeader(session, 0, len(ids), 1, pack_ids(ids), b"", 2)
    opened = open_session(session, Sampling(logit_bias={5: 1.0}, seed=7), len(ids), None)
    step = StepFrame(
        chain, epoch, 1, [segment], len(ids), width, codec, False, [opened], [StageTiming("node")]
    )
    return step, body


def corpus(chain: str = "chain", epoch: int = 1) -> list[tuple[Message, bytes]]:
    """Valid messages of every kind, with their bodies."""
    row = wire.RowResult(1, 4, 5, -0.5, [(5, -0.5), (6, -1.0)], bytes(16))
    draft = wire.HeadDraftIds(1, 5, pack_ids([1, 2]))
    events = [
        NodeMeasured(
            node="node", incarnation=1, seconds_per_byte=1e-9, overhead_s=0.001, model="m", layer_s=0.01
        ),
        ShardLoaded("node", 1, chain, "m", 0, 2, 1000),
        ShardFailed("node", 1, chain, "m", 0, 2, "no room", 0.0),
    ]
    plain: list[Message] = [
        wire.Hello(2, 2, "node", "stage", "home"),
        wire.Ping(1, 0.5),
        wire.Credit(3),
        wire.Fence(chain, epoch),
        wire.SessionClose(chain, [1, 2], epoch),
        wire.StepResult(chain, epoch, 1, [row], [row], [StageTiming("node")], [draft]),
        wire.StepFailed(chain, epoch, 1, [1], "CapacityError", "no room"),
        *(kind(encode_event(event)) for event in events for kind in (NodeEvent, Register)),
        *(
            Registered(1, 0.5, b"{}"),
            Heartbeat(1, 5, 6, (), 40.0, 10.0, 7),
            *(LookAtLedger(3), LedgerShown(b'{"kind":"head"}', [bytes(32)] * 2), LedgerDoubted("fork")),
            Command(1, b'{"type":"Probe"}'),
            Command(2, b'{"type":"HoldLayers","model":"m","start":0,"stop":2,"sources":[],"bytes_per_s":5}'),
            CommandReply(1, "no", b"{}"),
        ),
        *(FetchModel(1, "m"), CardReply(1, b"x\x9c"), FetchTensor(1, "m", "weight", 0, 64)),
        Generate(1, chain, pack_request(GenerationRequest((1, 2, 3), 8))),
        *(
            GenerationFailed(1, "LinkError", "gone"),
            StepTimed(chain, b"\x90"),
            HostLoad(chain, 1, 0, 5, 100, {"a": 1.0}),
            ReceiptMade("rcpt-1", b"packed"),
            wire.SessionCommit(chain, epoch, 1, 7, True),
            wire.StageSigned(chain, 1, b"\x82", "certificate", True),
            *(wire.KvOffer(chain, 1, 0, 2, "host"), wire.KvAccepted()),
            *(wire.KvEnded([1, 2]), wire.KvSealed({1: 3})),
            *(wire.ShareOpen("m", "node", "tcp://host:1", 0, 2, True), wire.ShareOpened([bytes(32)] * 3)),
        ),
    ]
    steps = [frame(chain, epoch, codec) for codec in ("", *sorted(CODECS))]
    kv = wire.KvPiece(1, 0, 3, 64, bytes(32), pack_ids([1, 2, 3]), steps[0][0].opens[0])
    bodies = [
        *training_words(WIDTH),
        *_shown(chain, epoch),
        (TensorBytes(1, 64, bytes(32)), bytes(64)),
        (kv, bytes(64)),
    ]
    bodies += [(kind, bytes(64)) for kind in (wire.ShareRows(1, 2, 2, 4), wire.ShareProducts(1, 4, 2))]
    return [*((message, b"") for message in plain), *steps, *bodies]


def _shown(chain: str, epoch: int) -> list[tuple[Message, bytes]]:
    """What a driver sends of a session with pictures, and what it is sent of a request with them."""
    shown = picture(0), picture(5, 9)
    step, _ = frame(chain, epoch)
    headers = [
        wire.PictureHeader(each.span.start, each.span.count, *each.span.grid, len(each.patches))
        for each in shown
    ]
    opened = msgspec.structs.replace(step.opens[0], prompt_length=10, pictures=headers)
    body = b"".join(each.patches for each in shown)
    request = pack_request(GenerationRequest(tuple(range(10)), 8, pictures=shown))
    return [
        (msgspec.structs.replace(step, opens=[opened]), body),
        (Generate(1, chain, request, [len(each.patches) for each in shown]), body),
    ]


class FrameMutator:
    """An endless stream of mutated frames; equal seeds give equal streams."""

    def __init__(self, seed: int, messages: Sequence[tuple[Message, bytes]]) -> None:
        self._chance = random.Random(seed)
        self._frames = [b"".join(pack_frame(message, [body], LIMITS)) for message, body in messages]
        self._fields = [msgspec.msgpack.decode(_header(each), strict=False) for each in self._frames]
        self._mutations: tuple[Callable[[int], bytes], ...] = (
            self._change_field,
            self._change_field,
            self._change_field,
            self._change_bytes,
            self._cut,
            self._insert,
            self._splice,
            self._lie_about_lengths,
            self._nest,
        )

    def __iter__(self) -> Iterator[bytes]:
        chance, mutations, count = self._chance, self._mutations, len(self._frames)
        while True:
            yield chance.choice(mutations)(chance.randrange(count))

    def _change_field(self, index: int) -> bytes:
        """Another value somewhere in the message, everything else in order."""
        fields = _copy(self._fields[index])
        for _ in range(self._chance.choice((1, 1, 1, 2, 4))):
            self._change_one(fields)
        header = msgspec.msgpack.encode(fields)
        body = self._frames[index][PREFIX_BYTES + len(_header(self._frames[index])) :]
        return _PREFIX.pack(b"SCw", 1, len(header), len(body)) + header + body

    def _change_one(self, fields: list[Any]) -> None:
        inner: Any = fields
        while True:
            place = (
                self._chance.randrange(len(inner))
                if isinstance(inner, list)
                else self._chance.choice(list(inner))
            )
            value = inner[place]
            if isinstance(value, list | dict) and value and self._chance.random() < 0.8:
                inner = value
                continue
            if isinstance(value, bytes | str) and value and self._chance.random() < 0.5:
                start = self._chance.randrange(len(value))
                times = self._chance.choice((0, 2, 300) if len(value) < 200 else (0, 1))
                inner[place] = value[:start] + value[start:] * times
            elif isinstance(inner, list) and self._chance.random() < 0.2:
                # Not thousands of thousands: frames that large are refused by their length.
                copies = (1, 2, 3000) if len(msgspec.msgpack.encode(value)) < 200 else (1, 2)
                inner[place:place] = [_copy(value) for _ in range(self._chance.choice(copies))]
            else:
                inner[place] = _copy(self._chance.choice(_VALUES))
            return

    def _change_bytes(self, index: int) -> bytes:
        content = bytearray(self._frames[index])
        for _ in range(self._chance.choice((1, 1, 2, 8, 32))):
            content[self._chance.randrange(len(content))] = self._chance.randrange(256)
        return bytes(content)

    def _cut(self, index: int) -> bytes:
        content = self._frames[index]
        return content[: self._chance.randrange(len(content))]

    def _insert(self, index: int) -> bytes:
        content, place = self._frames[index], self._chance.randrange(len(self._frames[index]))
        return (
            content[:place] + self._chance.randbytes(self._chance.choice((1, 2, 16, 200))) + content[place:]
        )

    def _splice(self, index: int) -> bytes:
        one, other = self._frames[index], self._chance.choice(self._frames)
        return one[: self._chance.randrange(len(one))] + other[self._chance.randrange(len(other)) :]

    def _lie_about_lengths(self, index: int) -> bytes:
        content = self._frames[index]
        header_bytes = self._chance.choice((0, 1, 1 << 15, LIMITS.max_header_bytes, (1 << 32) - 1))
        body_bytes = self._chance.choice((0, 1, 1 << 15, LIMITS.max_body_bytes, 1 << 40, (1 << 64) - 1))
        return _PREFIX.pack(b"SCw", 1, header_bytes, body_bytes) + content[PREFIX_BYTES:]

    def _nest(self, index: int) -> bytes:
        """A message that begins well and goes on in deep lists or with sizes that nothing has."""
        start = _header(self._frames[index])[:2]
        rest = self._chance.choice(
            (b"\x91" * 20_000, b"\x81\x00" * 5_000, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")
        )
        return _PREFIX.pack(b"SCw", 1, len(start + rest), 0) + start + rest


def _header(content: bytes) -> bytes:
    return content[PREFIX_BYTES : PREFIX_BYTES + _PREFIX.unpack_from(content)[2]]


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(each) for each in value]
    return {key: _copy(each) for key, each in value.items()} if isinstance(value, dict) else value

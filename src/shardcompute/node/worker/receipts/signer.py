"""Signer of steps: digests of what came in and went out of a stage, on the tapes of its sessions."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from shardcompute.backends.matrix import Array
from shardcompute.core.steps import Opening, Picked, SessionRows
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.worker.activation_log import Chunk
from shardcompute.security.credentials import Credentials
from shardcompute.security.receipts.records import (
    BlockCommitment,
    StageClaim,
    StageTranscript,
    TranscriptHeader,
    id_of,
    id_row,
)
from shardcompute.security.receipts.tape import NO_PICK, SessionTape
from shardcompute.wire import Message, SessionCommit, StageSigned, StepFrame, find_codec

_MOST_TAPES = 1024
_MOST_TOLD = 4
"""Commitments in one message."""
TapeKey = tuple[str, int]
"""(chain, session)"""


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step as it was computed: `body` came in with `frame`, `out` went out."""

    frame: StepFrame
    body: memoryview
    work: Sequence[SessionRows]
    openings: Sequence[Opening]
    out: Chunk | list[Picked]
    claim: StageClaim
    driver: Peer | None
    """Whose sessions these are; None: it is yet to come back."""

    @property
    def size_bytes(self) -> int:
        return self.body.nbytes + (self.out.rows.nbytes if isinstance(self.out, Chunk) else 0)


@dataclass(slots=True)
class _OpenTape:
    tape: SessionTape
    signed: list[BlockCommitment] = field(default_factory=list)
    told: int = 0
    """So many of these the driver was told."""


class StepSigner:
    """Of all stages of a worker; not thread-safe. `send` tells drivers what was signed for, and raises LinkError."""

    def __init__(self, credentials: Callable[[], Credentials], send: Callable[[Peer, Message], None]) -> None:
        self._credentials = credentials
        self._send = send
        self._tapes: OrderedDict[TapeKey, _OpenTape] = OrderedDict()

    def write(self, step: StepRows) -> None:
        """A step is done."""
        frame = step.frame
        for opening in step.openings:
            if opening.receipt_nonce:
                self._open(opening, step)
        first, came, sent = 0, _came(step), _sent(step)
        for part in step.work:
            span = slice(first, first + len(part.ids))
            first = span.stop
            known = self._tapes.get((frame.chain, part.session))
            if known is None:
                continue
            ids = list(part.ids)
            known.signed += known.tape.write(
                part.start,
                frame.sequence,
                frame.epoch,
                ids,
                [id_row(each) for each in ids] if came is None else _digests(came[span]),
                _picks(part, sent) if isinstance(sent, dict) else _digests(sent[span]),
                self._sign,
                is_replay=frame.replay,
            )
            if known.told < len(known.signed) and step.driver is not None:
                self._tell(frame.chain, part.session, known, step.driver, is_over=False)

    def cut(self, message: SessionCommit, driver: Peer) -> None:
        """Sign for what is kept of a session."""
        key = (message.chain, message.session)
        known = self._tapes.pop(key, None) if message.is_over else self._tapes.get(key)
        if known is not None:
            known.signed += known.tape.cut(message.length, self._sign)
            if not message.is_over:
                # The chain has another shape: what was told over links that broke may have been lost with them.
                known.told = 0
            self._tell(message.chain, message.session, known, driver, is_over=message.is_over)
        elif message.is_over:
            # Nobody has to wait for what will not come.
            self._send(driver, StageSigned(message.chain, message.session, b"", "", is_over=True))

    def forget(self, key: TapeKey) -> None:
        self._tapes.pop(key, None)

    def _open(self, opening: Opening, step: StepRows) -> None:
        header = TranscriptHeader(
            receipt=id_of(opening.receipt_nonce),
            chain=step.frame.chain,
            session=opening.session,
            adapter=opening.adapter,
            opened_epoch=step.frame.epoch,
            opened_frame=step.frame.sequence,
            claim=step.claim,
        )
        self._tapes[step.frame.chain, opening.session] = _OpenTape(SessionTape(header))
        while len(self._tapes) > _MOST_TAPES:
            self._tapes.popitem(last=False)

    def _tell(self, chain: str, session: int, known: _OpenTape, driver: Peer, *, is_over: bool) -> None:
        certificate = self._credentials().certificate_pem
        while True:
            part = known.signed[known.told : known.told + _MOST_TOLD]
            is_last = known.told + len(part) == len(known.signed)
            packed = msgspec.msgpack.encode(StageTranscript(header=known.tape.header, commitments=part))
            self._send(driver, StageSigned(chain, session, packed, certificate, is_over and is_last))
            known.told += len(part)
            if is_last:
                return

    def _sign(self, message: bytes) -> bytes:
        return self._credentials().identity.sign(message)


def _came(step: StepRows) -> Array | None:
    """The activations that came in, as every stage would read them; None: token ids did."""
    frame = step.frame
    if frame.width == 0:
        return None
    return find_codec(frame.codec).decode(step.body, frame.rows, frame.width)


def _sent(step: StepRows) -> Array | dict[tuple[int, int], int]:
    """What went out, as the next stage reads it, or the tokens picked by session and row."""
    out = step.out
    if isinstance(out, Chunk):
        return find_codec(out.codec).rows.unpack(out.rows, out.width)
    return {(each.session, each.position): each.choice.id for each in out if not each.is_scored}


def _picks(part: SessionRows, picked: dict[tuple[int, int], int]) -> list[bytes]:
    rows = range(part.start, part.start + len(part.ids))
    tokens = (picked.get((part.session, row)) for row in rows)
    return [NO_PICK if token is None else id_row(token) for token in tokens]


def _digests(rows: Array) -> list[bytes]:
    exact = np.ascontiguousarray(rows, dtype="<f4")
    return [hashlib.sha256(row.data).digest() for row in exact]

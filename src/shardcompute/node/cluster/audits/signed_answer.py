"""Signed answers: what an audit takes from a receipt. Who computed which layers, and what each has signed as sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.matrix import Array
from shardcompute.security.receipts.records import (
    Receipt,
    StageClaim,
    StageTranscript,
    blocks_of,
    commitment_bytes,
    digest_rows,
)


@dataclass(frozen=True, slots=True)
class SignedStage:
    """One stage of an answer, with what it has signed for in the end."""

    claim: StageClaim
    signed: bytes
    """Its last commitment, which has the digests of all before: what draws are made of."""
    sent: dict[int, bytes]
    """By the first row of each block, the digest of what it signed as sent."""

    def has_sent(self, pieces: Sequence[Array]) -> bool:
        """Whether these rows, one piece behind the other, from the first on, are what it signed for."""
        if len({piece.shape[1] for piece in pieces}) != 1:
            return False
        rows = np.concatenate(pieces)
        for start, stop in blocks_of(0, len(rows)):
            exact = np.ascontiguousarray(rows[start:stop], dtype="<f4")
            digest = digest_rows([hashlib.sha256(row.data).digest() for row in exact])
            if self.sent.get(start) != digest:
                return False
        return True


@dataclass(frozen=True, slots=True)
class SignedAnswer:
    """An answer that one shape of a chain computed from its first row on."""

    receipt: str
    model: str
    adapter: str
    tokens: tuple[int, ...]
    rows: int
    picked_from: int
    stages: tuple[SignedStage, ...]


def read_answer(receipt: Receipt) -> SignedAnswer | None:
    """Of a receipt that was verified. None where it cannot be audited: rows were known from an earlier answer, or the
    chain had another shape meanwhile."""
    if len(receipt.runs) != 1 or receipt.reused_rows or not receipt.runs[0].stop:
        return None
    run = receipt.runs[0]
    of_node = {each.header.claim.node: each for each in receipt.transcripts}
    if len(of_node) != len(receipt.transcripts) or any(node not in of_node for node in run.nodes):
        return None
    stages = tuple(_stage(of_node[node]) for node in run.nodes)
    return SignedAnswer(
        receipt.id,
        receipt.model,
        receipt.adapter,
        tuple(receipt.tokens),
        run.stop,
        run.picked_from,
        stages,
    )


def _stage(transcript: StageTranscript) -> SignedStage:
    sent: dict[int, bytes] = {}
    for commitment in transcript.commitments:
        # What is written from a row on replaces what was there.
        sent = {start: digest for start, digest in sent.items() if start < commitment.start}
        for (start, _), digest in zip(
            _blocks(commitment.start, commitment.stop), commitment.outputs, strict=False
        ):
            sent[start] = digest
    signed = (
        commitment_bytes(transcript.header, transcript.commitments[-1]) if transcript.commitments else b""
    )
    return SignedStage(transcript.header.claim, signed, sent)


def _blocks(start: int, stop: int) -> Sequence[tuple[int, int]]:
    return list(blocks_of(start, stop))

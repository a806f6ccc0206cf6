"""Records of a receipt, and the bytes that are signed.

A stage commits to *blocks*: rows between multiples of `BLOCK_ROWS`, so that stages which began at different times cut
alike. Of each block it gives one digest of what came in and one of what went out: a SHA-256 over the digests of its
rows, in order. A row's bytes are its activations as float32, whatever form they travelled in; what comes into a first
stage are token ids, and what a last one puts out are the tokens picked, four bytes each (`digest_ids`).

Commitments of one stage to one session are a chain: each has the digest of the one before. All structs are bounded and
refuse fields that they do not know; as JSON they are the file that people keep.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shardcompute.core.errors import SourceError
from shardcompute.core.fields import Name, Number
from shardcompute.core.generation import RECEIPT_PREFIX

BLOCK_ROWS = 32
DIGEST_BYTES = 32
NONCE_BYTES = 16
MOST_BLOCKS = 512
"""In one commitment: more rows are signed for in several."""
MOST_TOKENS = 1 << 20
MOST_STAGES = 256
MOST_RUNS = 64
MOST_RECEIPT_BYTES = 32 << 20
FORMAT: Literal["shardcompute receipt v1"] = "shardcompute receipt v1"
NO_DIGEST = bytes(DIGEST_BYTES)
_COMMITMENT = b"shardcompute stage commitment v1\x00"
_RECEIPT = b"shardcompute receipt v1\x00"

Row: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
RowDigest: TypeAlias = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Digests: TypeAlias = Annotated[list[RowDigest], Meta(max_length=MOST_BLOCKS)]
Signature: TypeAlias = Annotated[bytes, Meta(max_length=64)]
Pem: TypeAlias = Annotated[str, Meta(max_length=8192)]
ReceiptId: TypeAlias = Annotated[str, Meta(pattern=f"^{RECEIPT_PREFIX}[0-9a-f]{{32}}$")]
Sign = Callable[[bytes], bytes]
"""As `NodeIdentity.sign`."""


class StageClaim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stage says it is: whose, which layers of what, and with what it computes them."""

    node: Name
    start: Row
    stop: Row
    is_last: bool
    model: Name
    fingerprint: Name
    """Of the weights in the form in which they are served (`weights.card`)."""
    form: Name
    exactness: Name
    """Its exactness class: backend, release, numbers, kernels."""
    version: Name
    """The release that it runs."""
    ranks: Annotated[tuple[Name, ...], Meta(max_length=MOST_STAGES)] = ()
    """Of a stage that several compute: all of them; the first one signs."""


class TranscriptHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every commitment of a transcript is about."""

    receipt: ReceiptId
    """The job: a random number in hexadecimal, chosen before anything was computed."""
    chain: Name
    session: Number
    adapter: Name
    opened_epoch: Number
    opened_frame: Number
    """The frame that began it; 0: what a stage was told that took over."""
    claim: StageClaim


class BlockCommitment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows `[start, stop)`, block by block: what came in, what went out, and the frame that wrote them last."""

    number: Number
    epoch: Number
    start: Row
    stop: Row
    is_replay: bool
    """Told again to a stage that took over: it computed the rows for its memory and sent nothing on."""
    frames: Annotated[list[Number], Meta(max_length=MOST_BLOCKS)]
    inputs: Digests
    outputs: Digests
    """None of a replay."""
    previous: RowDigest
    signature: Signature = b""


class StageTranscript(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one stage signed of one session, in order."""

    header: TranscriptHeader
    commitments: Annotated[list[BlockCommitment], Meta(max_length=MOST_TOKENS // BLOCK_ROWS)]


class ReceiptRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows that one shape of the chain computed in a row: until the end, or until the chain had another shape. None, in
    the last one: the chain changed after the last row, before all had signed."""

    session: Number
    epoch: Number
    opened_frame: Number
    start: Row
    stop: Row
    picked_from: Row
    """From this row on tokens were picked; those before were known."""
    nodes: Annotated[list[Name], Meta(min_length=1, max_length=MOST_STAGES)]
    """The stages, in order."""


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One answer: its tokens, and what every stage signed of it. The driver signs the whole."""

    format: Literal["shardcompute receipt v1"] = FORMAT
    id: ReceiptId
    cluster: Name
    issued_s: Number
    """When, in seconds since 1970, by the driver's clock."""
    model: Name
    adapter: Name
    tokens: Annotated[list[Row], Meta(min_length=2, max_length=MOST_TOKENS)]
    """Of prompt and answer."""
    prompt_tokens: Row
    given_tokens: Row
    """The first so many were given to this chain: the prompt, and what a driver before had of the answer."""
    reused_rows: Row
    """The first so many rows the chain knew from an earlier answer: nobody signs for them here."""
    runs: Annotated[list[ReceiptRun], Meta(min_length=1, max_length=MOST_RUNS)]
    transcripts: Annotated[list[StageTranscript], Meta(max_length=MOST_STAGES)]
    certificates: Annotated[dict[Name, Pem], Meta(max_length=MOST_STAGES)]
    authority: Pem
    driver: Name
    signature: Signature = b""


def new_receipt_id() -> str:
    """A receipt to be: unguessable, and never given twice."""
    return id_of(secrets.token_bytes(NONCE_BYTES))


def id_of(nonce: bytes) -> str:
    """The receipt that stages were told this of."""
    return f"{RECEIPT_PREFIX}{nonce.hex()}"


def blocks_of(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The blocks of rows `[start, stop)`: cut at multiples of `BLOCK_ROWS`."""
    while start < stop:
        edge = min(start - start % BLOCK_ROWS + BLOCK_ROWS, stop)
        yield start, edge
        start = edge


def digest_rows(rows: Sequence[bytes]) -> bytes:
    """Of a block, by what its rows are known by."""
    return hashlib.sha256(b"".join(rows)).digest()


def digest_ids(ids: Sequence[int]) -> bytes:
    """Of a block whose rows are token ids; -1: none."""
    return digest_rows([id_row(each) for each in ids])


def id_row(token: int) -> bytes:
    return token.to_bytes(4, "little", signed=True)


def commitment_bytes(header: TranscriptHeader, commitment: BlockCommitment) -> bytes:
    """What a stage signs, and what the next commitment has the digest of."""
    unsigned = msgspec.structs.replace(commitment, signature=b"")
    return _COMMITMENT + msgspec.msgpack.encode((header, unsigned))


def receipt_bytes(receipt: Receipt) -> bytes:
    """What a driver signs."""
    return _RECEIPT + msgspec.msgpack.encode(msgspec.structs.replace(receipt, signature=b""))


def sign_receipt(receipt: Receipt, sign: Sign) -> Receipt:
    return msgspec.structs.replace(receipt, signature=sign(receipt_bytes(receipt)))


def write_receipt(receipt: Receipt) -> bytes:
    """As the file that people keep."""
    return msgspec.json.format(msgspec.json.encode(receipt), indent=1) + b"\n"


def read_receipt(content: bytes) -> Receipt:
    """SourceError where this is no receipt; whether one is true says `verify_receipt`."""
    hint = "give the file that `run --receipt` wrote, or the body of GET /v1/receipts/ID"
    if len(content) > MOST_RECEIPT_BYTES:
        raise SourceError(f"a receipt of {len(content)} bytes is too long", hint=hint)
    try:
        return _receipts.decode(content)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"this is no receipt: {error}", hint=hint) from error


_receipts = msgspec.json.Decoder(Receipt)

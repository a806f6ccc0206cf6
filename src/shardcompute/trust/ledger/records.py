"""Records of a ledger: its header, its entries and its signed heads, each one line of JSON.

The line itself is the leaf of the tree (`tree.hash_leaf`), so that whoever replays a ledger needs no more than SHA-256
and JSON. A line is only good as this release writes it: another order of fields, a space or a number written otherwise
is refused, and so nothing in a file can be changed that its heads do not notice.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

MOST_LINE_BYTES = 1 << 20
MOST_NODES = 4096
FORMAT: Literal["shardcompute ledger v1"] = "shardcompute ledger v1"
_HEAD = b"shardcompute ledger head v1\x00"

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Label: TypeAlias = Annotated[str, Meta(max_length=512)]
Words: TypeAlias = Annotated[str, Meta(max_length=2000)]
HexHash: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
HexSignature: TypeAlias = Annotated[str, Meta(pattern="^([0-9a-f]{128})?$")]
Standing = Literal["joined", "left", "lost", "revoked", "quarantined"]
"""Of a machine, from now on. One that was pardoned, or is back, has joined again."""


class LedgerError(ValueError):
    """A ledger does not fit: `place` says where."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


class TokenWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """Rows of answers, and these times the layers that were computed of each."""

    tokens: Count = 0
    token_layers: Count = 0

    def __add__(self, other: TokenWork) -> TokenWork:
        return TokenWork(self.tokens + other.tokens, self.token_layers + other.token_layers)

    def __sub__(self, other: TokenWork) -> TokenWork:
        """ValueError where there is not so much."""
        if other.tokens > self.tokens or other.token_layers > self.token_layers:
            raise ValueError("more work than there was")
        return TokenWork(self.tokens - other.tokens, self.token_layers - other.token_layers)


NO_WORK = TokenWork()
WorkByNode: TypeAlias = Annotated[dict[Label, TokenWork], Meta(max_length=MOST_NODES)]
CountByNode: TypeAlias = Annotated[dict[Label, Count], Meta(max_length=MOST_NODES)]


class LedgerHeader(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="header"
):
    """The first line of a file: whose ledger it is, and who vouches for its heads."""

    format: Literal["shardcompute ledger v1"] = FORMAT
    cluster: Label
    log: Label
    """The coordinator that keeps it, by its node."""
    authority: Annotated[str, Meta(max_length=8192)]
    """Certificate (PEM) of the key that signs."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """`number` counts entries from 0; `at_s` are seconds since 1970, by the coordinator's clock."""

    number: Count
    at_s: Count


class LogOpened(_Entry, frozen=True, tag="opened"):
    """The coordinator has started: nobody is known to be there until it joins."""

    release: Label
    draw: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """Digest of the secret by which audits are drawn; "": there are none."""


class LogClosed(_Entry, frozen=True, tag="closed"):
    """The coordinator has stopped in order."""


class MemberChanged(_Entry, frozen=True, tag="member"):
    node: Label
    name: Label
    standing: Standing
    role: Label = ""
    reason: Words = ""


class LaidStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers `[start, stop)` on these machines: one, or several that compute each layer together."""

    nodes: Annotated[tuple[Label, ...], Meta(min_length=1, max_length=256)]
    start: Count
    stop: Count


class LayoutSet(_Entry, frozen=True, tag="layout"):
    """Who has which layers of a chain from this epoch on; no stages: the chain is over."""

    chain: Label
    model: Label
    epoch: Count
    stages: Annotated[tuple[LaidStage, ...], Meta(max_length=256)]


class ReceiptsTaken(_Entry, frozen=True, tag="receipts"):
    """Receipts since the entry before of this kind: the root of a tree over their files, in the order in which they
    came, and the work that stages signed for in them. What is uncredited is in receipts that do not fit, or was
    contradicted by an audit before this was written."""

    count: Count
    root: HexHash
    credited: WorkByNode
    uncredited: WorkByNode = {}


class AuditTaken(_Entry, frozen=True, tag="audit"):
    """What an audit found, and the work that it takes back of what was credited for that answer before."""

    receipt: Label
    node: Label
    start: Count
    stop: Count
    auditors: Annotated[tuple[Label, ...], Meta(max_length=16)]
    outcome: Label
    findings: Annotated[dict[Label, Label], Meta(max_length=16)]
    """By node."""
    withdrawn: WorkByNode = {}


class MeterRead(_Entry, frozen=True, tag="meter"):
    """What machines report, and nobody has signed for: since the entry before of this kind, but `stored_bytes`, which
    is as of now."""

    steps: CountByNode = {}
    """Steps of chains in which it computed its layers, with and without receipts."""
    stored_bytes: CountByNode = {}
    """Of layers in memory."""
    seeded_bytes: CountByNode = {}
    """Of weights, sent to others."""
    relayed_bytes: CountByNode = {}


class TreeHead(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="head"
):
    """The tree over the first `size` entries, signed."""

    cluster: Label
    log: Label
    size: Count
    root: HexHash
    signed_s: Count
    signature: HexSignature = ""


Entry: TypeAlias = LogOpened | LogClosed | MemberChanged | LayoutSet | ReceiptsTaken | AuditTaken | MeterRead
Record: TypeAlias = LedgerHeader | Entry | TreeHead
_records = msgspec.json.Decoder(Record)


def write_line(record: Record) -> bytes:
    """As it stands in a file, without its end."""
    return msgspec.json.encode(record, order="sorted")


def read_line(line: bytes, place: str) -> Record:
    """LedgerError for what this release would not have written."""
    if len(line) > MOST_LINE_BYTES:
        raise LedgerError(place, f"a line of more than {MOST_LINE_BYTES} bytes")
    try:
        record: Record = _records.decode(line)
    except (ValueError, RecursionError) as error:
        raise LedgerError(place, f"this is no record of a ledger: {error}") from error
    if write_line(record) != line:
        raise LedgerError(place, "it is not written as records are")
    return record


def head_bytes(head: TreeHead) -> bytes:
    """What is signed."""
    return _HEAD + write_line(msgspec.structs.replace(head, signature=""))

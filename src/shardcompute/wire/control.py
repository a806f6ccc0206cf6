"""Messages of the control plane and of travelling weights.

Every node dials the coordinator and keeps that link (role "control"): it registers, sends heartbeats and what
happened, and is told what to do. Commands and events are the control room's own values, encoded by it; this room
only carries them. Generations that a worker computes for the coordinator have messages and links of their own
(`wire.generations`). Weights are fetched over links of their own (role "weights"), so that they never delay a
heartbeat: a `CardReply` says what a model consists of, then ranges of its tensors are asked for. Only
`TensorBytes` has a body.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from shardcompute.core.fields import Name, Number, Text
from shardcompute.wire.generations import GenerationMessage

MOST_REGISTER_BYTES = 512 << 10
MOST_EVENT_BYTES = 16 << 10
MOST_RESULT_BYTES = 4 << 20
MOST_REQUEST_CHARACTERS = 16_384
MOST_TICKET_BYTES = 1024
MOST_OFFER_BYTES = 8192
Doors: TypeAlias = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=300)], ...], msgspec.Meta(max_length=8)
]
"""URLs of one relay, the one to prefer first."""
MOST_USAGE_ROWS = 64
MOST_CONTROL_URLS = 8
MOST_DRAFT_HEADS = 32
MOST_HEAD_BYTES = 8192
MOST_PROOF_HASHES = 128


class Register(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """A node introduces itself, or shows what it still holds after the coordinator was away.

    `event` is a `control.events.NodeJoined`, whose incarnation and time the coordinator fills in.
    """

    event: Annotated[bytes, msgspec.Meta(max_length=MOST_REGISTER_BYTES)]


class Registered(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """`leader_epoch` is that of the coordinator among several, 0 where there is one; `control_urls` are where all of
    them are found, none where the node knows enough."""

    incarnation: Number
    heartbeat_interval_s: float
    revocations: bytes = b""
    leader_epoch: Number = 0
    control_urls: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_CONTROL_URLS)] = ()
    has_ledger: bool = False
    """Whether it may be asked for the head of a ledger."""


class DraftHeadReport(msgspec.Struct, frozen=True, array_like=True):
    """How a last stage stands with the draft head of its model: it takes so many bytes and drafts or, where `problem`
    says why, it does not. Neither: it is being loaded."""

    chain: Name
    size_bytes: Number = 0
    problem: Text = ""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """`resident_bytes` is what the node's process takes of its machine's memory (0: it does not say), `kv_used_bytes`
    what conversations fill of the KV memory that it has reserved; `busy_watts` and `idle_watts` are what the machine
    draws while it computes and while it does not (0: nobody knows), `seeded_bytes` what others got of its weights."""

    incarnation: Number
    resident_bytes: Number = 0
    kv_used_bytes: Number = 0
    draft_heads: Annotated[tuple[DraftHeadReport, ...], msgspec.Meta(max_length=MOST_DRAFT_HEADS)] = ()
    busy_watts: float = 0.0
    idle_watts: float = 0.0
    seeded_bytes: Number = 0


class HeartbeatHeard(msgspec.Struct, frozen=True, array_like=True, tag=29):
    """The coordinator that leads among several heard a heartbeat: a node to which it says nothing looks for another."""


class NodeEvent(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Something the coordinator must know: a `control.events.Event`."""

    event: Annotated[bytes, msgspec.Meta(max_length=MOST_EVENT_BYTES)]


class Command(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Something the node must do: a `control.actions.Action`. It is answered under its number."""

    number: Number
    action: bytes


class CommandReply(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """A command was carried out or, where `error` says why not, failed."""

    number: Number
    error: Text = ""
    result: Annotated[bytes, msgspec.Meta(max_length=MOST_RESULT_BYTES)] = b""


class StepOverdue(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """A driver misses a step's results: sent `waited_s` ago, where `allowed_s` was to be expected at most."""

    chain: Name
    epoch: Number
    session_namespace: Number
    sequence: Number
    waited_s: float
    allowed_s: float


class RenewCertificate(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """A node asks for its next certificate, with a request that its own key has signed."""

    request_pem: Annotated[str, msgspec.Meta(max_length=MOST_REQUEST_CHARACTERS)]


class CertificateIssued(msgspec.Struct, frozen=True, array_like=True, tag=28):
    """The node's next certificate or, where `error` says why, none."""

    certificate_pem: str = ""
    error: Text = ""


class RelayAccess(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """Which relays a node may use, each by its doors, and the ticket to show there for the next hours."""

    ticket: Annotated[bytes, msgspec.Meta(max_length=MOST_TICKET_BYTES)]
    relays: Annotated[tuple[Doors, ...], msgspec.Meta(max_length=16)]


class MeetPeer(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """A node wants a link with `peer`, whom it cannot dial: the coordinator carries the offer there. Answered with a
    `PeerAnswered` of the same number."""

    number: Number
    peer: Name
    offer: Annotated[bytes, msgspec.Meta(max_length=MOST_OFFER_BYTES)]


class PeerAnswered(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """What the peer says to an offer or, where `error` says why, nothing."""

    number: Number
    error: Text = ""
    answer: Annotated[bytes, msgspec.Meta(max_length=MOST_OFFER_BYTES)] = b""


class FetchModel(msgspec.Struct, frozen=True, array_like=True, tag=30):
    number: Number
    model: Name


class CardReply(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """What a model consists of: JSON of `weights.card.Card`, compressed."""

    number: Number
    card: bytes


class FetchTensor(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """`length` bytes of a stored tensor, from its byte `offset` on. A request for none asks for the hash of so many
    (`hashed`; 0: of all of the tensor); `claim` is then the one that the asker has found, for what it has read at the
    model's source."""

    number: Number
    model: Name
    tensor: Name
    offset: Number
    length: Number
    claim: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    hashed: Number = 0


class TensorBytes(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """The bytes asked for, as the body, or the SHA-256 that was asked for."""

    number: Number
    size: Number
    sha256: bytes = b""


class FetchFailed(msgspec.Struct, frozen=True, array_like=True, tag=34):
    number: Number
    reason: Text


class DrawQuota(msgspec.Struct, frozen=True, array_like=True, tag=60):
    """A driver says how it stands with an API key that has limits, and what it wants; number 0 wants no answer. `boot`
    tells its process from others of the same node."""

    number: Number
    boot: Number
    key: Name
    day: Number
    version: Number
    spent: Number
    held: Number
    tokens: Number = 0
    requests: Number = 0
    valid_s: float = 0.0


class QuotaGranted(msgspec.Struct, frozen=True, array_like=True, tag=61):
    """What a driver may have of what it wanted or, where `error` says why, nothing."""

    number: Number
    day: Number = 0
    tokens: Number = 0
    requests: Number = 0
    spent: Number = 0
    held: Number = 0
    wait_s: float = 0.0
    error: Text = ""


class UsageRow(msgspec.Struct, frozen=True, array_like=True):
    """What one key asked of one model in the hour from `start_s` on."""

    start_s: Number
    key: Name
    model: Name
    requests: Number
    prompt_tokens: Number
    generated_tokens: Number


class ReportUsage(msgspec.Struct, frozen=True, array_like=True, tag=62):
    """What a driver's clients have used since its last report; told again until it is taken."""

    boot: Number
    sequence: Number
    rows: Annotated[list[UsageRow], msgspec.Meta(max_length=MOST_USAGE_ROWS)]


class UsageTaken(msgspec.Struct, frozen=True, array_like=True, tag=63):
    """The report of this number counts, whether it came once or more often."""

    sequence: Number


class LookAtLedger(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """A node asks for the head of the coordinator's ledger, and for a proof that it goes on from the first `size`
    entries, which it has seen the head of. `seeded_bytes` are what it has sent to others of weights, since its process
    started."""

    size: Number
    seeded_bytes: Number = 0


class LedgerShown(msgspec.Struct, frozen=True, array_like=True, tag=65):
    """The head (a line of JSON, `trust.ledger.TreeHead`) and the proof; none where there are not so many entries."""

    head: Annotated[bytes, msgspec.Meta(max_length=MOST_HEAD_BYTES)]
    proof: Annotated[
        list[Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]],
        msgspec.Meta(max_length=MOST_PROOF_HASHES),
    ]


class LedgerDoubted(msgspec.Struct, frozen=True, array_like=True, tag=66):
    """A node does not believe the ledger, for this reason, or ("") does again."""

    reason: Text


ControlMessage: TypeAlias = (
    Register
    | Registered
    | Heartbeat
    | HeartbeatHeard
    | NodeEvent
    | Command
    | CommandReply
    | StepOverdue
    | RenewCertificate
    | CertificateIssued
    | RelayAccess
    | MeetPeer
    | PeerAnswered
    | FetchModel
    | CardReply
    | FetchTensor
    | TensorBytes
    | FetchFailed
    | DrawQuota
    | QuotaGranted
    | ReportUsage
    | UsageTaken
    | LookAtLedger
    | LedgerShown
    | LedgerDoubted
    | GenerationMessage
)

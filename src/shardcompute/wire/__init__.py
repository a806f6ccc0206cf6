"""Wire: frames between nodes. Messages, tensor codecs, and the links over which they travel.

Owns every message with its bounds, the form of activations on the way, the handshake with its protocol version, and
transports by URL scheme (`inproc`, `tcp` with TLS). Sizes are checked before anything is allocated. May call `core`
alone; knows nobody who sends.
"""

from __future__ import annotations

from shardcompute.wire.codecs import CODECS, Codec, PackedRows, find_codec
from shardcompute.wire.framing import Body, FrameReader, pack_frame
from shardcompute.wire.handshake import negotiate
from shardcompute.wire.inproc import InprocLink, InprocTransport
from shardcompute.wire.limits import WireLimits, check_message
from shardcompute.wire.links import Admit, Link, LinkOptions, LinkStats, Listener, Transport
from shardcompute.wire.messages import (
    ID_BYTES,
    VERSION_MAX,
    VERSION_MIN,
    CollectiveFrame,
    Credit,
    Fence,
    Goodbye,
    HeadDraftIds,
    Hello,
    JoinWorld,
    KvAccepted,
    KvEnded,
    KvOffer,
    KvPiece,
    KvSealed,
    Message,
    PictureHeader,
    Ping,
    Pong,
    Refused,
    RowResult,
    SegmentHeader,
    SessionClose,
    SessionCommit,
    SessionOpen,
    StageSigned,
    StageTiming,
    StepFailed,
    StepFrame,
    StepResult,
    TrainingFrame,
    Welcome,
    open_session,
    pack_ids,
    unpack_ids,
)
from shardcompute.wire.pump import LinkPump
from shardcompute.wire.tcp import TcpTransport, join_address
from shardcompute.wire.transports import Transports, default_transports
from shardcompute.wire.warmth import WarmthPolicy, choose_warmth

__all__ = [
    "CODECS",
    "ID_BYTES",
    "VERSION_MAX",
    "VERSION_MIN",
    "Admit",
    "Body",
    "Codec",
    "CollectiveFrame",
    "Credit",
    "Fence",
    "FrameReader",
    "Goodbye",
    "HeadDraftIds",
    "Hello",
    "InprocLink",
    "InprocTransport",
    "JoinWorld",
    "KvAccepted",
    "KvEnded",
    "KvOffer",
    "KvPiece",
    "KvSealed",
    "Link",
    "LinkOptions",
    "LinkPump",
    "LinkStats",
    "Listener",
    "Message",
    "PackedRows",
    "PictureHeader",
    "Ping",
    "Pong",
    "Refused",
    "RowResult",
    "SegmentHeader",
    "SessionClose",
    "SessionCommit",
    "SessionOpen",
    "StageSigned",
    "StageTiming",
    "StepFailed",
    "StepFrame",
    "StepResult",
    "TcpTransport",
    "TrainingFrame",
    "Transport",
    "Transports",
    "WarmthPolicy",
    "Welcome",
    "WireLimits",
    "check_message",
    "choose_warmth",
    "default_transports",
    "find_codec",
    "join_address",
    "negotiate",
    "open_session",
    "pack_frame",
    "pack_ids",
    "unpack_ids",
]

"""Every message of the data plane, on one page (those of the control plane are in `wire.control`).

A link opens with `Hello` from the side that dialled and `Welcome` or `Refused` from the other. Then each
`StepFrame` flows along the chain, and its result goes from the tail straight to the driver. A `StepFrame`
has a body: activations `[rows, width]` in the form that `codec` names; on the way from the driver to the
first stage there are none yet and the token ids say it all (`width` 0, `codec` ""), but for the patches of
pictures of sessions that begin, which are its body then. So has a `CollectiveFrame`, between ranks that
compute a stage together, and `KvPiece`, on a link (role "kv") from a stage to one that is to go on in its place.

Structs travel as MessagePack arrays headed by their number, so fields are known by their place: a later
version appends fields with defaults and never reorders or renumbers, and an older reader skips what it does
not know. Token ids travel as little-endian int32 (`pack_ids`, `unpack_ids`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shardcompute.core.batch import Segment
from shardcompute.core.errors import LinkError
from shardcompute.core.fields import Name, Number, Text
from shardcompute.core.generation import MAX_GRAMMAR_CHARS, Grammar, GrammarKind, Sampling
from shardcompute.core.pictures import MAX_PICTURES
from shardcompute.wire.control import ControlMessage

VERSION_MIN = 2
VERSION_MAX = 2
ID_BYTES = 4
MOST_STAGES = 1024
"""More than any chain has."""
MOST_NONCE_BYTES = 16
MOST_TRAINING_BYTES = 7 << 20
"""Of what a step learns from, as tokens."""
MOST_SIGNED_BYTES = 256 << 10
MOST_CERTIFICATE_BYTES = 8 << 10
MOST_KV_BYTES = 4 << 20
"""In one `KvPiece`."""
MOST_KV_SESSIONS = 1 << 16
MOST_SHARED_MAPS = 1 << 14
"""Of one client at one machine."""
MOST_SHARE_BYTES = 4 << 20
"""Of the shares in one frame."""
SHARE_BYTES = 8

Position: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Who dials, in which role, for which cluster, and the protocol versions it speaks. Bounded by the small frame
    that strangers may send."""

    version_min: Number
    version_max: Number
    node: str
    role: str
    cluster: str


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The link is open: the highest version both sides speak, and who answered."""

    version: Number
    node: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    reason: Text


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The sender is about to close the link on purpose."""

    reason: Text


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=5):
    nonce: Number
    sent_s: float


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A `Ping` sent back: `sent_s` is on the clock of who asked."""

    nonce: Number
    sent_s: float


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The receiver of frames has room for this many more."""

    frames: Count


class Fence(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The chain has a new shape: drop its frames of epochs below this one."""

    chain: Name
    epoch: Number


class SegmentHeader(msgspec.Struct, frozen=True, array_like=True):
    """A `core.batch.Segment` with the token ids of its rows, which the tail needs for its history.

    `targets`, where given, are token ids to score instead of picking, one for each logit row. The last stage may draft
    `head_draft_tokens`.
    """

    session: Number
    start: Position
    count: Count
    logit_rows: Position
    ids: bytes
    targets: bytes = b""
    head_draft_tokens: Position = 0

    def segment(self) -> Segment:
        return Segment(self.session, self.start, self.count, self.logit_rows)


class PictureHeader(msgspec.Struct, frozen=True, array_like=True):
    """A `core.pictures.PictureSpan`, and how many bytes of patches the frame's body has of it: to the first stage, of
    pictures whose rows it is to compute."""

    start: Position
    count: Count
    frames: Count
    rows: Count
    columns: Count
    size_bytes: Position = 0


Pictures: TypeAlias = Annotated[list[PictureHeader], msgspec.Meta(max_length=MAX_PICTURES)]


class SessionOpen(msgspec.Struct, frozen=True, array_like=True):
    """What the tail must know to choose tokens for a session; it travels with the session's first frame."""

    session: Number
    prompt_length: Position
    prompt_logprobs: Position | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[TokenId, float]
    seed: int
    logprobs: Position | None
    wants_hidden: bool = False
    grammar_kind: GrammarKind | None = None
    grammar: bytes = b""
    """The grammar's text, compressed."""
    prefix_source: Number = 0
    prefix_length: Position = 0
    """Not 0: the session begins with so many tokens of another, which is over if it `is_moved`."""
    is_moved: bool = False
    adapter: Name = ""
    """What every stage computes the session with; "": the base alone."""
    pictures: Pictures = []
    """Those of its prompt, in order."""
    receipt_nonce: Annotated[bytes, msgspec.Meta(max_length=MOST_NONCE_BYTES)] = b""
    """Not empty: every stage signs for what it computes of the session (`security.receipts`)."""
    wants_states: bool = False

    def sampling(self) -> Sampling:
        """The sampling parameters, as unchecked as they came: `decoding.validate_sampling` judges them."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            logprobs=self.logprobs,
            wants_hidden=self.wants_hidden,
            wants_states=self.wants_states,
            grammar=None
            if self.grammar_kind is None
            else Grammar(self.grammar_kind, _unpack_text(self.grammar)),
        )


class StageTiming(msgspec.Struct, frozen=True, array_like=True):
    """What one stage did for a step; the tail hands the list to the driver. `codec` and `sent_bytes` tell in which
    form and length activations went to the next stage; the tail sends none."""

    node: Name
    queue_s: float = 0.0
    compute_s: float = 0.0
    codec_s: float = 0.0
    received_bytes: Number = 0
    codec: Name = ""
    sent_bytes: Number = 0
    draft_s: float = 0.0
    """Of a last stage: how long it drafted, which `compute_s` leaves out."""
    exchange_s: float = 0.0
    """Of a stage with tensor ranks: how much of `compute_s` they were exchanging, or waiting for each other."""
    slowest: Name = ""
    """Of such a stage: the node for which the others have waited most of late; "": nobody knows yet."""


Timings: TypeAlias = Annotated[list[StageTiming], msgspec.Meta(max_length=MOST_STAGES)]


class StepFrame(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """One ragged batch on its way along a chain. A `replay` frame restores KV and wants no answer."""

    chain: Name
    epoch: Number
    sequence: Number
    segments: list[SegmentHeader]
    rows: Count
    width: Position
    codec: Name
    replay: bool = False
    opens: list[SessionOpen] = []
    timings: Timings = []


class SessionClose(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """These sessions are over: free what they hold and pass it on along the chain. Epoch 0 stands for any."""

    chain: Name
    sessions: list[Number]
    epoch: Number = 0


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """The token that stands at `position` of a session, chosen or, for a prompt's own, scored; with the hidden
    or final state (`core.generation.TokenChoice`) that it was chosen from, where the session wants it."""

    session: Number
    position: Position
    token: TokenId
    logprob: float | None = None
    alternatives: list[tuple[TokenId, float]] = []
    hidden: bytes = b""


class HeadDraftIds(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that the last stage drafts for a session, from position `start` on."""

    session: Number
    start: Position
    ids: bytes
    grade: Position = 0


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """A step's choices, one for each logit row, and the log-probabilities of prompt tokens asked for."""

    chain: Name
    epoch: Number
    sequence: Number
    rows: list[RowResult]
    prompt_rows: list[RowResult] = []
    timings: Timings = []
    head_drafts: list[HeadDraftIds] = []


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A step ended without results; `code` is the name of a class in `core.errors`."""

    chain: Name
    epoch: Number
    sequence: Number
    sessions: list[Number]
    code: Name
    message: Text


class CollectiveFrame(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A frame of a collective (`collectives.fabrics`), as the body, on a link whose socket is not theirs alone."""

    size: Number


class JoinWorld(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The first word of a rank on a link to another, and the other's answer, which is `Refused` where it expects
    somebody else: which world, which forming of it, and who speaks."""

    world: Name
    epoch: Number
    rank: Number


class PathSwitched(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The last word on this way of a link: whoever sends it goes on on another. As the first word on a way: this is
    the one of several that a link will go on on."""


class SessionCommit(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Of this session the first `length` rows are kept: sign for them, and pass this on along the chain. `is_over`: the
    answer has ended, and no more of it has to be remembered for that."""

    chain: Name
    epoch: Number
    session: Number
    length: Position
    is_over: bool


class StageSigned(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """A stage signs for rows of a session, to the session's driver: a `security.receipts.StageTranscript` with what is
    new in it, as MessagePack, and the certificate of the key. `is_over`: the answer to a `SessionCommit` that was."""

    chain: Name
    session: Number
    signed: Annotated[bytes, msgspec.Meta(max_length=MOST_SIGNED_BYTES)]
    certificate: Annotated[str, msgspec.Meta(max_length=MOST_CERTIFICATE_BYTES)]
    is_over: bool


class KvOffer(msgspec.Struct, frozen=True, array_like=True, tag=70):
    """The first word of a stage to one that takes layers over from it: of which copy, which layers, and how rows lie in
    each (`backends.executor.MovableKv`). Answered with `KvAccepted`, or `Refused`."""

    chain: Name
    number: Number
    start: Position
    stop: Position
    format: Name


class KvAccepted(msgspec.Struct, frozen=True, array_like=True, tag=71):
    """The sender of an offer may go on."""


class KvPiece(msgspec.Struct, frozen=True, array_like=True, tag=72):
    """Rows of a session as they are kept, `size` bytes as the body, in place of any that were sent from `start` on.
    With its first row comes how the session was `opened`, and with each row of a last stage its token (`ids`)."""

    session: Number
    start: Position
    count: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=MOST_KV_BYTES)]
    sha256: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    ids: bytes = b""
    opened: SessionOpen | None = None


class KvEnded(msgspec.Struct, frozen=True, array_like=True, tag=73):
    """These sessions are over, or cannot be taken over after all: what was sent of them counts for nothing."""

    sessions: Annotated[list[Number], msgspec.Meta(max_length=MOST_KV_SESSIONS)]


class KvSealed(msgspec.Struct, frozen=True, array_like=True, tag=74):
    """The last word: nothing is computed here any more, and of these sessions so many rows were sent, which is all."""

    lengths: Annotated[dict[Number, Count], msgspec.Meta(max_length=MOST_KV_SESSIONS)]


class ShareOpen(msgspec.Struct, frozen=True, array_like=True, tag=80):
    """The first word of a client on a link of role "shares": be ready to multiply shares with the linear maps of these
    layers, and of the head, whose weights come from `origin`. Answered with `ShareOpened`, or `Refused`."""

    model: Name
    origin_node: Name
    origin_url: Name
    start: Position
    stop: Position
    has_head: bool = False


class ShareOpened(msgspec.Struct, frozen=True, array_like=True, tag=81):
    """What each map consists of here (`trust.shares.fixed_point.RingMatrix.digest`), in the order of loading."""

    digests: Annotated[
        list[Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]],
        msgspec.Meta(max_length=MOST_SHARED_MAPS),
    ]


class ShareRows(msgspec.Struct, frozen=True, array_like=True, tag=82):
    """Shares of rows for one of the maps, as the body: integers of 64 bits, little-endian. Answered with
    `ShareProducts` of the same number, or `Refused`."""

    number: Number
    map: Position
    rows: Count
    width: Count


class ShareProducts(msgspec.Struct, frozen=True, array_like=True, tag=83):
    """What a map makes of these shares, as the body."""

    number: Number
    rows: Count
    width: Count


class TrainingFrame(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """A word of a fine-tuning run (`finetune.frames`): between its driver and a stage, or activations and gradients
    between two stages, as the body. `facts` are what `kind` calls for, as JSON."""

    run: Name
    kind: Name
    call: Number
    number: Number
    facts: Annotated[bytes, msgspec.Meta(max_length=MOST_TRAINING_BYTES)]
    size: Number


DataMessage: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | Goodbye
    | Ping
    | Pong
    | Credit
    | Fence
    | StepFrame
    | SessionClose
    | StepResult
    | StepFailed
    | CollectiveFrame
    | JoinWorld
    | PathSwitched
    | SessionCommit
    | StageSigned
    | KvOffer
    | KvAccepted
    | KvPiece
    | KvEnded
    | KvSealed
    | ShareOpen
    | ShareOpened
    | ShareRows
    | ShareProducts
    | TrainingFrame
)
Message: TypeAlias = DataMessage | ControlMessage


def open_session(
    session: int, sampling: Sampling, prompt_length: int, prompt_logprobs: int | None = None
) -> SessionOpen:
    return SessionOpen(
        session=session,
        prompt_length=prompt_length,
        prompt_logprobs=prompt_logprobs,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        wants_hidden=sampling.wants_hidden,
        grammar_kind=None if sampling.grammar is None else sampling.grammar.kind,
        grammar=b"" if sampling.grammar is None else zlib.compress(sampling.grammar.text.encode()),
        wants_states=sampling.wants_states,
    )


def _unpack_text(packed: bytes) -> str:
    """Raises `LinkError` where it is no text, or longer than any grammar may be."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, 4 * MAX_GRAMMAR_CHARS)
        if not unpacker.eof:
            raise LinkError("a grammar is cut short or far too long")
        return text.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise LinkError(
            f"a grammar cannot be read: {error}", hint="the peer may run an incompatible release"
        ) from error


def pack_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> npt.NDArray[np.int32]:
    """The token ids, read-only. Raises `LinkError` where they cannot be ids of any vocabulary."""
    if len(packed) % ID_BYTES:
        raise LinkError(f"token ids of {len(packed)} bytes: not a multiple of {ID_BYTES}")
    ids = np.frombuffer(packed, dtype="<i4")
    if ids.size and ids.min() < 0:
        raise LinkError(f"{int(ids.min())} is no token id", hint="the peer may run an incompatible release")
    return ids

"""Verification of a receipt: needs the receipt, the cluster's authority, and nothing else.

Fields are looked at in the order of the file, then what stages say against each other, and the driver's signature at
last, so that the first thing that does not fit is named as closely as can be. What follows from a receipt that passes:

- every stage named in a run signed for the rows it got and the rows it gave, with a key of this cluster;
- what one stage signed to have sent is, digest by digest, what the next one signed to have got; the first got these
  tokens, and the last picked them;
- rows without such signatures are listed, and are rows of a run that ended because the chain changed.

It does not follow that the rows were computed rightly.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from shardcompute.core.errors import AuthError, ShardComputeError
from shardcompute.security.certificates import (
    PeerIdentity,
    certificate_der,
    fingerprint_of,
    parse_certificate,
    peer_from_certificate,
    utc,
)
from shardcompute.security.identity import verify_signature
from shardcompute.security.names import Role
from shardcompute.security.receipts.records import (
    FORMAT,
    NO_DIGEST,
    BlockCommitment,
    Receipt,
    ReceiptRun,
    StageTranscript,
    blocks_of,
    commitment_bytes,
    digest_ids,
    receipt_bytes,
)


class ReceiptError(ShardComputeError):
    """A receipt does not fit: `field` says where."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 400

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}", hint="do not rely on this receipt")
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True)
class UnsignedRows:
    """Rows of a run for which a stage has not signed: it was lost before, or left the chain."""

    node: str
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReceiptVerdict:
    """What a receipt that fits shows."""

    fingerprint: str
    """Of the authority that vouches for the keys."""
    nodes: tuple[str, ...]
    """All whose signatures were checked."""
    epochs: tuple[int, ...]
    rows: int
    """Of prompt and answer, that stages signed for."""
    picked: int
    """Tokens of the answer that last stages signed to have picked."""
    unsigned: tuple[UnsignedRows, ...]
    compared: int
    """Digests that two stages agree on, or that follow from the tokens."""


def verify_receipt(receipt: Receipt, authority_pem: str, *, is_strict: bool = False) -> ReceiptVerdict:
    """Raises ReceiptError at the first field that does not fit; where `is_strict`, also at rows without signatures."""
    peers = _check_certificates(receipt, authority_pem)
    _check_tokens(receipt)
    _check_runs(receipt)
    tapes = [_Tape.read(receipt, index, peers) for index in range(len(receipt.transcripts))]
    comparison = _Comparison(receipt, tapes)
    for index in range(len(receipt.runs)):
        comparison.check_run(index)
    _check_picks(receipt)
    if not verify_signature(peers[receipt.driver].public_key, receipt.signature, receipt_bytes(receipt)):
        raise ReceiptError("signature", f"{receipt.driver} has not signed a receipt with this content")
    unsigned = tuple(comparison.unsigned)
    if is_strict:
        _check_all_signed(receipt, unsigned)
    picks = {row for run in receipt.runs for row in range(max(run.picked_from, run.start), run.stop)}
    lost = {
        row
        for run in receipt.runs
        for each in unsigned
        if (each.epoch, each.node) == (run.epoch, run.nodes[-1])
        for row in range(max(each.start, run.picked_from), each.stop)
    }
    return ReceiptVerdict(
        fingerprint=_fingerprint(authority_pem),
        nodes=tuple(dict.fromkeys([receipt.driver, *(each.node for each in tapes)])),
        epochs=tuple(dict.fromkeys(run.epoch for run in receipt.runs)),
        rows=len(receipt.tokens) - 1 - receipt.reused_rows,
        picked=len(picks - lost),
        unsigned=unsigned,
        compared=comparison.compared,
    )


def _check_all_signed(receipt: Receipt, unsigned: Sequence[UnsignedRows]) -> None:
    if receipt.reused_rows:
        raise ReceiptError("reused_rows", "nobody signed for the first rows")
    if receipt.given_tokens > receipt.prompt_tokens:
        raise ReceiptError("given_tokens", "nobody signed for having picked the first tokens of the answer")
    for index, run in enumerate(receipt.runs):
        for each in unsigned:
            if each.epoch == run.epoch and each.node in run.nodes and run.start <= each.start < run.stop:
                raise ReceiptError(
                    f"runs[{index}].nodes",
                    f"{each.node} has not signed for rows {each.start} to {each.stop}",
                )


def _fingerprint(pem: str) -> str:
    return fingerprint_of(certificate_der(parse_certificate(pem)))


def _check_certificates(receipt: Receipt, authority_pem: str) -> Mapping[str, PeerIdentity]:
    if receipt.format != FORMAT:
        raise ReceiptError("format", f"this release knows {FORMAT!r} only")
    root = parse_certificate(authority_pem)
    try:
        is_same = certificate_der(parse_certificate(receipt.authority)) == certificate_der(root)
    except AuthError as error:
        raise ReceiptError("authority", error.message) from error
    if not is_same:
        raise ReceiptError("authority", "another cluster's authority than the one you trust")
    peers = {}
    for node, pem in receipt.certificates.items():
        field = f"certificates.{node}"
        try:
            certificate = parse_certificate(pem)
            certificate.verify_directly_issued_by(root)
            peer = peer_from_certificate(certificate)
        except (AuthError, InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError) as error:
            raise ReceiptError(
                field, str(getattr(error, "message", "")) or "not issued by the authority"
            ) from error
        if peer.node_id != node:
            raise ReceiptError(field, f"it belongs to {peer.node_id}")
        if peer.cluster != receipt.cluster:
            raise ReceiptError("cluster", f"the certificates are of {peer.cluster}")
        _check_dates(field, certificate, receipt.issued_s)
        peers[node] = peer
    if receipt.driver not in peers:
        raise ReceiptError("driver", f"there is no certificate of {receipt.driver}")
    return peers


def _check_dates(field: str, certificate: x509.Certificate, issued_s: int) -> None:
    try:
        is_valid = certificate.not_valid_before_utc <= utc(issued_s) <= certificate.not_valid_after_utc
    except (OverflowError, ValueError, OSError):
        is_valid = False
    if not is_valid:
        raise ReceiptError("issued_s", f"{field} was not valid at that time")


def _check_tokens(receipt: Receipt) -> None:
    count = len(receipt.tokens)
    if not 0 < receipt.prompt_tokens < count:
        raise ReceiptError("prompt_tokens", f"of {count} tokens some must be prompt and some answer")
    if not receipt.prompt_tokens <= receipt.given_tokens < count:
        raise ReceiptError("given_tokens", "not between the prompt and the last token")


def _check_runs(receipt: Receipt) -> None:
    """Runs follow each other, and lead from the first row that was computed to the last."""
    runs, rows = receipt.runs, len(receipt.tokens) - 1
    for index, run in enumerate(runs):
        field = f"runs[{index}]"
        is_end = index == len(runs) - 1 and index > 0 and run.start == rows
        if not (run.start < run.stop or is_end) or run.stop > rows:
            raise ReceiptError(f"{field}.stop", f"rows {run.start} to {run.stop} of {rows}")
        if not receipt.given_tokens - 1 <= run.picked_from <= run.stop:
            raise ReceiptError(f"{field}.picked_from", "no row of the run from which a token could be picked")
        if index and run.epoch < runs[index - 1].epoch:
            raise ReceiptError(f"{field}.epoch", "epochs only grow")
        if len(set(run.nodes)) != len(run.nodes):
            raise ReceiptError(f"{field}.nodes", "a node is named twice")
        for node in run.nodes:
            # Who was lost before it signed for anything has shown none.
            if node not in receipt.certificates and index == len(runs) - 1 and not is_end:
                raise ReceiptError(f"{field}.nodes", f"there is no certificate of {node}")
    if runs[-1].stop != rows:
        raise ReceiptError(f"runs[{len(runs) - 1}].stop", f"the answer has {rows} rows")
    needed = runs[-1].start
    for run in reversed(runs):
        if run.start < needed <= run.stop:
            needed = run.start
    if needed != receipt.reused_rows:
        raise ReceiptError("reused_rows", f"the runs begin at row {needed}")


def _check_picks(receipt: Receipt) -> None:
    """Every token of the answer was picked in some run."""
    picked = {row for run in receipt.runs for row in range(max(run.picked_from, run.start), run.stop)}
    for row in range(receipt.given_tokens - 1, len(receipt.tokens) - 1):
        if row not in picked:
            raise ReceiptError(f"tokens[{row + 1}]", "in no run it was picked")


@dataclass(frozen=True, slots=True)
class _Block:
    """A block as a stage signed for it last."""

    frame: int
    came: bytes
    sent: bytes | None
    field: str


@dataclass(frozen=True, slots=True)
class _Tape:
    """One transcript, checked by itself: its chain, its signatures, and the blocks that stand in the end."""

    transcript: StageTranscript
    field: str
    live: Mapping[tuple[int, int, int], _Block]
    """By epoch, start and stop."""
    replayed: Mapping[tuple[int, int, int], _Block]

    @property
    def node(self) -> str:
        return self.transcript.header.claim.node

    @classmethod
    def read(cls, receipt: Receipt, index: int, peers: Mapping[str, PeerIdentity]) -> _Tape:
        field, transcript = f"transcripts[{index}]", receipt.transcripts[index]
        _check_header(receipt, transcript, f"{field}.header")
        live: dict[tuple[int, int, int], _Block] = {}
        replayed: dict[tuple[int, int, int], _Block] = {}
        previous, epoch = NO_DIGEST, transcript.header.opened_epoch
        signer = peers[transcript.header.claim.node]
        if Role.WORKER not in signer.roles:
            raise ReceiptError(f"{field}.header.claim.node", f"{signer.node_id} may not compute")
        key = signer.public_key
        for number, commitment in enumerate(transcript.commitments):
            where = f"{field}.commitments[{number}]"
            _check_commitment(commitment, number, epoch, previous, where)
            signed = commitment_bytes(transcript.header, commitment)
            if not verify_signature(key, commitment.signature, signed):
                raise ReceiptError(f"{where}.signature", "its node has not signed this")
            previous, epoch = hashlib.sha256(signed).digest(), commitment.epoch
            table = replayed if commitment.is_replay else live
            # What is written from a row on replaces what was there; what other epochs wrote is theirs.
            for block in [each for each in table if each[0] == epoch and each[2] > commitment.start]:
                del table[block]
            for at, (start, stop) in enumerate(blocks_of(commitment.start, commitment.stop)):
                sent = None if commitment.is_replay else commitment.outputs[at]
                table[commitment.epoch, start, stop] = _Block(
                    commitment.frames[at], commitment.inputs[at], sent, f"{where}.{{}}[{at}]"
                )
        return cls(transcript, field, live, replayed)


def _check_header(receipt: Receipt, transcript: StageTranscript, field: str) -> None:
    header, claim = transcript.header, transcript.header.claim
    first = receipt.transcripts[0].header
    if claim.node not in receipt.certificates:
        raise ReceiptError(f"{field}.claim.node", f"there is no certificate of {claim.node}")
    expected: list[tuple[str, object, object]] = [
        ("receipt", header.receipt, receipt.id),
        ("adapter", header.adapter, receipt.adapter),
        ("chain", header.chain, first.chain),
        ("claim.model", claim.model, receipt.model),
        ("claim.fingerprint", claim.fingerprint, first.claim.fingerprint),
        ("claim.form", claim.form, first.claim.form),
    ]
    for name, said, wanted in expected:
        if said != wanted:
            raise ReceiptError(f"{field}.{name}", f"{said!r} where {wanted!r} was expected")
    if not claim.start < claim.stop:
        raise ReceiptError(f"{field}.claim.stop", "no layers")
    if header.session not in {run.session for run in receipt.runs}:
        raise ReceiptError(f"{field}.session", "no run has that session")


def _check_commitment(
    commitment: BlockCommitment, number: int, epoch: int, previous: bytes, field: str
) -> None:
    if commitment.number != number:
        raise ReceiptError(f"{field}.number", f"{commitment.number} where {number} was expected")
    if commitment.previous != previous:
        raise ReceiptError(f"{field}.previous", "not the digest of the commitment before")
    if commitment.epoch < epoch:
        raise ReceiptError(f"{field}.epoch", "epochs only grow")
    if not commitment.start < commitment.stop:
        raise ReceiptError(f"{field}.stop", "no rows")
    blocks = sum(1 for _ in blocks_of(commitment.start, commitment.stop))
    sent = 0 if commitment.is_replay else blocks
    for name, count, wanted in (
        ("frames", len(commitment.frames), blocks),
        ("inputs", len(commitment.inputs), blocks),
        ("outputs", len(commitment.outputs), sent),
    ):
        if count != wanted:
            raise ReceiptError(f"{field}.{name}", f"{count} where the rows have {wanted} blocks")


class _Comparison:
    """What stages say against each other and against the tokens, run by run."""

    def __init__(self, receipt: Receipt, tapes: Sequence[_Tape]) -> None:
        self._receipt = receipt
        self._tapes = tapes
        self.unsigned: list[UnsignedRows] = []
        self.compared = 0

    def check_run(self, index: int) -> None:
        run = self._receipt.runs[index]
        if run.start == run.stop:
            return
        stages = [self._tape_of(run, node) for node in run.nodes]
        self._check_layers(run, index, stages)
        is_final = index == len(self._receipt.runs) - 1
        for start, stop in blocks_of(run.start, run.stop):
            found = [None if tape is None else tape.live.get((run.epoch, start, stop)) for tape in stages]
            newest = max((block.frame for block in found if block is not None), default=0)
            for node, block, tape in zip(run.nodes, found, stages, strict=True):
                if block is not None and block.frame == newest:
                    continue
                if is_final:
                    where = f"runs[{index}].nodes" if tape is None else f"{tape.field}.commitments"
                    raise ReceiptError(where, f"{node} has not signed for rows {start} to {stop}")
                self._note_unsigned(node, run.epoch, start, stop)
            standing = [block if block and block.frame == newest else None for block in found]
            self._compare(run, start, stop, standing)
        self._compare_replays(run, stages)

    def _tape_of(self, run: ReceiptRun, node: str) -> _Tape | None:
        """The stage's own of this run: begun with it or, where it took over, by a replay."""
        mine = [
            tape
            for tape in self._tapes
            if tape.node == node and tape.transcript.header.session == run.session
        ]
        for tape in mine:
            if tape.transcript.header.opened_frame == run.opened_frame:
                return tape
        told = [
            tape
            for tape in mine
            if tape.transcript.header.opened_frame == 0 and tape.transcript.header.opened_epoch <= run.epoch
        ]
        return max(told, key=lambda tape: tape.transcript.header.opened_epoch, default=None)

    def _check_layers(self, run: ReceiptRun, index: int, stages: Sequence[_Tape | None]) -> None:
        """Stages follow each other without a gap; where one has signed nothing, whatever lies between."""
        after: int | None = 0
        for position, tape in enumerate(stages):
            if tape is None:
                after = None
                continue
            claim = tape.transcript.header.claim
            if after not in (None, claim.start):
                raise ReceiptError(f"{tape.field}.header.claim.start", f"layer {after} comes next")
            if claim.is_last != (position == len(stages) - 1):
                raise ReceiptError(f"{tape.field}.header.claim.is_last", f"it is stage {position} of the run")
            after = claim.stop
        if all(tape is None for tape in stages):
            raise ReceiptError(f"runs[{index}].nodes", "none of them has signed anything")

    def _compare(self, run: ReceiptRun, start: int, stop: int, blocks: Sequence[_Block | None]) -> None:
        tokens = self._receipt.tokens
        first, last = blocks[0], blocks[-1]
        if first is not None:
            self._match(
                first.came, digest_ids(tokens[start:stop]), first.field.format("inputs"), "the tokens"
            )
        for before, after in itertools.pairwise(blocks):
            if before is not None and after is not None:
                sent = before.sent or b""
                self._match(after.came, sent, after.field.format("inputs"), "what the stage before sent")
        if last is not None:
            picks = [tokens[row + 1] if row >= run.picked_from else -1 for row in range(start, stop)]
            self._match(last.sent or b"", digest_ids(picks), last.field.format("outputs"), "the tokens")

    def _compare_replays(self, run: ReceiptRun, stages: Sequence[_Tape | None]) -> None:
        """What a stage was told that took over is what was sent, wherever it can be seen."""
        for position, tape in enumerate(stages):
            if tape is None:
                continue
            for (epoch, start, stop), block in tape.replayed.items():
                if epoch != run.epoch or stop > run.start:
                    continue
                where = block.field.format("inputs")
                if position == 0:
                    ids = self._receipt.tokens[start:stop]
                    self._match(block.came, digest_ids(ids), where, "the tokens")
                elif (sent := _sent_before(stages[position - 1], epoch, start, stop)) is not None:
                    self._match(block.came, sent, where, "what the stage before had sent")

    def _match(self, said: bytes, wanted: bytes, field: str, what: str) -> None:
        if said != wanted:
            raise ReceiptError(field, f"not the digest of {what}")
        self.compared += 1

    def _note_unsigned(self, node: str, epoch: int, start: int, stop: int) -> None:
        for index, each in enumerate(self.unsigned):
            if (each.node, each.epoch, each.stop) == (node, epoch, start):
                self.unsigned[index] = UnsignedRows(node, epoch, each.start, stop)
                return
        self.unsigned.append(UnsignedRows(node, epoch, start, stop))


def _sent_before(tape: _Tape | None, epoch: int, start: int, stop: int) -> bytes | None:
    """What a stage sent of a block in the latest of its epochs before this one."""
    found: Iterator[tuple[int, _Block]] = iter(())
    if tape is not None:
        found = (
            (key[0], block) for key, block in tape.live.items() if key[1:] == (start, stop) and key[0] < epoch
        )
    latest = max(found, key=lambda each: each[0], default=None)
    return None if latest is None else latest[1].sent

"""A chain on paper: stages with real keys and certificates whose activations are made up, for receipts.

chain = PaperChain(folder, stages=3)
chain.answer(prompt=40, answer=90, drafts=3)
receipt = chain.receipt()
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardcompute.security import ClusterAuthority, NodeIdentity, Role
from shardcompute.security.receipts import (
    NO_PICK,
    BlockCommitment,
    Receipt,
    ReceiptRun,
    SessionTape,
    StageClaim,
    StageTranscript,
    TranscriptHeader,
    new_receipt_id,
    sign_receipt,
)
from shardcompute.security.receipts.records import id_row

SESSION = 7
FRAME = 11
EPOCH = 3


@dataclass
class PaperStage:
    identity: NodeIdentity
    certificate: str
    claim: StageClaim
    tape: SessionTape
    signed: list[BlockCommitment] = field(default_factory=list)
    sent: dict[int, bytes] = field(default_factory=dict)
    """By row, what went out last."""

    @property
    def transcript(self) -> StageTranscript:
        return StageTranscript(header=self.tape.header, commitments=self.signed)


class PaperChain:
    """`tokens` are those of prompt and answer; a token is as good as any."""

    def __init__(self, folder: Path, stages: int = 3, name: str = "paper") -> None:
        self.folder = folder
        self.name = name
        self.authority = ClusterAuthority.create(folder / "authority", name, now_s=time.time())
        self.id = new_receipt_id()
        self.epoch = EPOCH
        self.frame = FRAME
        self._made = 0
        self.stages = [self.make_stage(index, index == stages - 1, FRAME) for index in range(stages)]
        self.lost: list[PaperStage] = []
        self.driver, self.driver_certificate = self.enrol(Role.COORDINATOR)
        self.runs: list[ReceiptRun] = []
        self.start = 0
        self.picked_from = 0
        self.silent: int | None = None
        """A stage that computes and signs for nothing any more."""
        self.tokens: list[int] = []
        self.prompt = 0

    def enrol(self, role: Role = Role.WORKER) -> tuple[NodeIdentity, str]:
        self._made += 1
        identity = NodeIdentity.open(self.folder / f"node-{self._made}")
        request = identity.certificate_request()
        certificate = self.authority.issue(request, node_id=identity.node_id, roles={role}, now_s=time.time())
        return identity, certificate

    def make_stage(self, index: int, is_last: bool, opened_frame: int) -> PaperStage:
        identity, certificate = self.enrol()
        claim = StageClaim(
            node=identity.node_id,
            start=2 * index,
            stop=2 * index + 2,
            is_last=is_last,
            model="paper",
            fingerprint="f" * 64,
            form="int8",
            exactness="onnx-1/float32/avx2",
            version="1.0",
        )
        header = TranscriptHeader(
            receipt=self.id,
            chain="paper-1",
            session=SESSION,
            adapter="",
            opened_epoch=self.epoch,
            opened_frame=opened_frame,
            claim=claim,
        )
        return PaperStage(identity, certificate, claim, SessionTape(header))

    @property
    def nodes(self) -> list[str]:
        return [stage.identity.node_id for stage in self.stages]

    def step(self, start: int, ids: Sequence[int], picks: Sequence[int | None]) -> None:
        """A frame with rows of these tokens goes along all stages."""
        came = [id_row(each) for each in ids]
        for index, stage in enumerate(self.stages):
            rows = range(start, start + len(ids))
            if stage.claim.is_last:
                out = [NO_PICK if each is None else id_row(each) for each in picks]
            else:
                out = _made_up(index, rows, ids)
            if index != self.silent:
                stage.signed += stage.tape.write(
                    start, self.frame, self.epoch, ids, came, out, stage.identity.sign
                )
            stage.sent.update(zip(rows, out, strict=True))
            came = out
        self.frame += 1

    def begin(self, tokens: Sequence[int], prompt: int, chunk: int = 50) -> None:
        """The prompt's rows; the last of them picks the first token of the answer."""
        self.tokens, self.prompt, self.picked_from = list(tokens), prompt, prompt - 1
        for start in range(0, prompt, chunk):
            stop = min(start + chunk, prompt)
            picks = [self.tokens[row + 1] if row >= prompt - 1 else None for row in range(start, stop)]
            self.step(start, self.tokens[start:stop], picks)

    def decode(self, rows: int, stop: int, drafts: int = 0, ahead: int = 0) -> int:
        """Go on from `rows` computed rows to `stop`, each step with this many drafts, of which the last is wrong, and
        with `ahead` more steps that are all wrong before they are voided. Returns how many rows are computed."""
        while rows < stop:
            right = self.tokens[rows : min(rows + 1 + max(drafts - 1, 0), stop)]
            wrong = [self.tokens[rows] + 1] if drafts else []
            ids = [*right, *wrong]
            picks = [self.tokens[min(row + 1, len(self.tokens) - 1)] for row in range(rows, rows + len(ids))]
            self.step(rows, ids, picks)
            for extra in range(ahead):
                start = rows + len(ids) + 5 * extra
                self.step(start, [1, 2, 3, 4, 5], [9, 9, 9, 9, 9])
            rows += len(right)
        return rows

    def cut(self, rows: int) -> None:
        """The first rows are kept: every stage signs for them."""
        for stage in self.stages:
            stage.signed += stage.tape.cut(rows, stage.identity.sign)
        self.runs.append(
            ReceiptRun(
                session=SESSION,
                epoch=self.epoch,
                opened_frame=FRAME,
                start=self.start,
                stop=rows,
                picked_from=self.picked_from,
                nodes=self.nodes,
            )
        )
        self.start = self.picked_from = rows

    def lose(self, index: int, rows: int) -> None:
        """A stage is gone without another word, and a new one is told what it was sent, in pieces."""
        self.silent = None
        gone = self.stages[index]
        self.lost.append(gone)
        run_nodes = self.nodes
        survivors = [stage for stage in self.stages if stage is not gone]
        for stage in survivors:
            stage.signed += stage.tape.cut(rows, stage.identity.sign)
        self.runs.append(
            ReceiptRun(
                session=SESSION,
                epoch=self.epoch,
                opened_frame=FRAME,
                start=self.start,
                stop=rows,
                picked_from=self.picked_from,
                nodes=run_nodes,
            )
        )
        self.epoch += 1
        new = self.make_stage(index, gone.claim.is_last, 0)
        before = self.stages[index - 1].sent if index else None
        for start in range(0, rows, 20):
            ids = self.tokens[start : min(start + 20, rows)]
            span = range(start, start + len(ids))
            came = [id_row(each) for each in ids] if before is None else [before[row] for row in span]
            out = [NO_PICK] * len(ids) if new.claim.is_last else _made_up(index, span, ids)
            new.sent.update(zip(span, out, strict=True))
            new.signed += new.tape.write(
                start, 0, self.epoch, ids, came, out, new.identity.sign, is_replay=True
            )
        new.signed += new.tape.cut(rows, new.identity.sign)
        self.stages[index] = new
        self.start = self.picked_from = rows

    def receipt(self) -> Receipt:
        """Joined and signed, as the driver would."""
        everyone = [*self.lost, *self.stages]
        return sign_receipt(
            Receipt(
                id=self.id,
                cluster=self.name,
                issued_s=int(time.time()),
                model="paper",
                adapter="",
                tokens=self.tokens,
                prompt_tokens=self.prompt,
                given_tokens=self.prompt,
                reused_rows=0,
                runs=self.runs,
                transcripts=[stage.transcript for stage in everyone],
                certificates={
                    **{stage.identity.node_id: stage.certificate for stage in everyone},
                    self.driver.node_id: self.driver_certificate,
                },
                authority=self.authority.certificate_pem,
                driver=self.driver.node_id,
            ),
            self.driver.sign,
        )


def _made_up(stage: int, rows: Sequence[int], ids: Sequence[int]) -> list[bytes]:
    """What a stage makes of tokens, always the same."""
    made = zip(rows, ids, strict=True)
    return [hashlib.sha256(f"{stage} {row} {token}".encode()).digest() for row, token in made]


def tokens_of(count: int) -> list[int]:
    """Many that differ, and always the same."""
    return [(31 * at * at + 7 * at + 3) % 997 for at in range(count)]


def plain_receipt(folder: Path, prompt: int = 40, answer: int = 60) -> tuple[PaperChain, Receipt]:
    """Of an answer that nothing happened to."""
    chain = PaperChain(folder)
    chain.begin(tokens_of(prompt + answer), prompt)
    rows = chain.decode(prompt, prompt + answer - 1)
    chain.cut(rows)
    return chain, chain.receipt()


def interrupted_receipt(folder: Path, stage: int = 1, drafts: int = 3) -> tuple[PaperChain, Receipt]:
    """Of an answer with drafts in the middle of which a machine was lost."""
    chain = PaperChain(folder)
    chain.begin(tokens_of(140), 40)
    rows = chain.decode(40, 90, drafts)
    chain.lose(stage, rows)
    rows = chain.decode(rows, 139, drafts)
    chain.cut(rows)
    return chain, chain.receipt()

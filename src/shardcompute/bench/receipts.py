"""`bench receipts`: what signing for an answer costs, and whether a verifier refuses what was changed.

The model is cut into stages in this process and answers greedily. Every step of every stage is timed, and right behind
it what a worker does besides for a receipt: handing the step over, which is all that the computing thread does, and
hashing and signing, which another thread does for several steps at once. Times are those of the processor, not of the
clock on the wall: one thread computes, and whoever else uses the machine is left out. The share is that of both in what
the stages compute. Then the receipt is joined, verified, and verified again with one value of it changed, over and
over.
"""

from __future__ import annotations

import base64
import copy
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Array
from shardcompute.bench.codecs import cut_evenly
from shardcompute.bench.report import Result, Say
from shardcompute.core.errors import SourceError
from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.core.steps import Opening, Picked, SessionRows
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.rpc.frames import segment_of
from shardcompute.node.worker.activation_log import Chunk
from shardcompute.node.worker.receipts.signer import StepRows, StepSigner
from shardcompute.node.worker.receipts.stage_receipts import STEPS_AT_ONCE, StageReceipts
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.security import ClusterAuthority, Credentials, NodeIdentity, Role
from shardcompute.security.receipts import (
    Receipt,
    ReceiptError,
    ReceiptRun,
    StageClaim,
    StageTranscript,
    new_receipt_id,
    read_receipt,
    sign_receipt,
    verify_receipt,
    write_receipt,
)
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.resolve import ModelFiles
from shardcompute.wire import Message, SessionCommit, StageSigned, StepFrame, find_codec

_SESSION = 1
_CHAIN = "bench"
_DRIVER = Peer("driver", "inproc://driver")
_transcripts = msgspec.msgpack.Decoder(StageTranscript)


@dataclass(frozen=True, slots=True)
class ReceiptBench:
    files: ModelFiles
    stages: int = 3
    prompt: int = 64
    steps: int = 128
    wire: str = "exact"
    mutations: int = 10_000


@dataclass(slots=True)
class _BenchStage:
    runtime: StageRuntime
    credentials: Credentials
    claim: StageClaim
    signer: StepSigner
    handover: StageReceipts
    told: list[StageSigned]
    waiting: list[StepRows] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    sign_s: list[float] = field(default_factory=list)
    handover_s: list[float] = field(default_factory=list)

    def sign(self) -> None:
        for rows in self.waiting:
            self.signer.write(rows)
        self.waiting.clear()


def run_receipt_bench(bench: ReceiptBench, say: Say) -> list[Result]:
    with ExitStack() as stack, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        authority = ClusterAuthority.create(Path(folder) / "authority", "bench", now_s=time.time())
        say("loading")
        stages = _open_stages(bench, Path(folder), authority, stack)
        receipt_id = new_receipt_id()
        tokens = _answer(bench, stages, receipt_id, say)
        driver = _enrol(Path(folder) / "driver", authority)
        receipt = _join(stages, tokens, bench.prompt, receipt_id, driver)
    labels = {"stages": bench.stages, "wire": bench.wire, "model": stages[0].claim.model}
    return [*_costs(stages, receipt, labels), *_mutate(receipt, bench.mutations, labels, say)]


def _enrol(folder: Path, authority: ClusterAuthority) -> Credentials:
    identity = NodeIdentity.open(folder)
    pem = authority.issue(
        identity.certificate_request(), node_id=identity.node_id, roles={Role.WORKER}, now_s=time.time()
    )
    return Credentials(identity, pem, authority.certificate_pem)


def _open_stages(
    bench: ReceiptBench, folder: Path, authority: ClusterAuthority, stack: ExitStack
) -> list[_BenchStage]:
    stages = []
    with open_checkpoint(bench.files) as checkpoint:
        options = ExecutorOptions(
            kv_bytes=256 << 20, context_length=bench.prompt + bench.steps + 1, threads=1
        )
        for index, cut in enumerate(cut_evenly(checkpoint.spec.layer_count, bench.stages - 1)):
            executor = open_shard(checkpoint, stage=cut, options=options)
            runtime = StageRuntime(executor, is_first=cut.is_first, is_last=cut.is_last)
            stack.callback(runtime.close)
            credentials = _enrol(folder / f"stage-{index}", authority)
            claim = StageClaim(
                node=credentials.identity.node_id,
                start=cut.start,
                stop=cut.stop,
                is_last=cut.is_last,
                model=checkpoint.name,
                fingerprint="bench",
                form="native",
                exactness="bench",
                version="bench",
            )
            told: list[StageSigned] = []
            signer = StepSigner(_always(credentials), _keeper(told))
            handover = StageReceipts(_always(credentials), lambda peer, message: None)
            stack.callback(handover.close)
            stages.append(_BenchStage(runtime, credentials, claim, signer, handover, told))
    return stages


def _always(credentials: Credentials) -> Callable[[], Credentials]:
    return lambda: credentials


def _keeper(told: list[StageSigned]) -> Callable[[Peer, Message], None]:
    def keep(peer: Peer, message: Message) -> None:
        if isinstance(message, StageSigned):
            told.append(message)

    return keep


def _answer(bench: ReceiptBench, stages: Sequence[_BenchStage], receipt_id: str, say: Say) -> list[int]:
    """The prompt in one frame, then a row a frame; times of the prompt are left out."""
    tokens = [7 + at % 50 for at in range(bench.prompt)]
    nonce = bytes.fromhex(receipt_id.removeprefix("rcpt-"))
    opening = Opening(_SESSION, Sampling(), bench.prompt, receipt_nonce=nonce)
    start = 0
    for number in range(1, bench.steps + 1):
        ids = tuple(tokens[start:])
        part = SessionRows(_SESSION, start, ids, 1)
        tokens.append(_step(bench, stages, number, part, [opening] if number == 1 else []))
        start += len(ids)
        if number % 32 == 0:
            say(f"{number} of {bench.steps} tokens")
    for stage in stages:
        stage.sign()
        stage.signer.cut(SessionCommit(_CHAIN, 1, _SESSION, len(tokens) - 1, True), _DRIVER)
    return tokens


def _step(
    bench: ReceiptBench,
    stages: Sequence[_BenchStage],
    number: int,
    part: SessionRows,
    openings: list[Opening],
) -> int:
    codec, body, width = find_codec(bench.wire), memoryview(b""), 0
    out: Array | list[Picked] = []
    flowing: Array | None = None
    for stage in stages:
        frame = StepFrame(
            _CHAIN, 1, number, [segment_of(part)], len(part.ids), width, codec.name if width else ""
        )
        started = time.thread_time()
        out = stage.runtime.step([part], openings, flowing)
        computed = time.thread_time()
        if isinstance(out, list):
            sent: Chunk | list[Picked] = out
        else:
            packed = codec.rows.pack(np.array(out, dtype=np.float32))
            sent = Chunk(codec.rows.name, out.shape[1], packed)
        rows = StepRows(frame, body, [part], openings, sent, stage.claim, _DRIVER)
        signing = time.thread_time()
        stage.waiting.append(rows)
        if len(stage.waiting) == STEPS_AT_ONCE:
            stage.sign()
        signed = time.thread_time()
        if stage.handover.concerns(_CHAIN, [part], openings):
            stage.handover.computed(rows)
        handed = time.thread_time()
        if number > 1:
            stage.compute_s.append(computed - started)
            stage.sign_s.append(signed - signing)
            stage.handover_s.append(handed - signed)
        if isinstance(sent, Chunk):
            width = sent.width
            body = memoryview(b"".join(codec.wrap(sent.rows)))
            flowing = codec.decode(body, len(part.ids), width)
    assert isinstance(out, list)
    choice: TokenChoice = out[-1].choice
    return choice.id


def _join(
    stages: Sequence[_BenchStage], tokens: list[int], prompt: int, receipt_id: str, driver: Credentials
) -> Receipt:
    transcripts = []
    for stage in stages:
        parts = [_transcripts.decode(each.signed) for each in stage.told]
        commitments = [each for part in parts for each in part.commitments]
        transcripts.append(StageTranscript(header=parts[0].header, commitments=commitments))
    run = ReceiptRun(
        session=_SESSION,
        epoch=1,
        opened_frame=1,
        start=0,
        stop=len(tokens) - 1,
        picked_from=prompt - 1,
        nodes=[stage.claim.node for stage in stages],
    )
    members = [driver, *(stage.credentials for stage in stages)]
    receipt = Receipt(
        id=receipt_id,
        cluster="bench",
        issued_s=int(time.time()),
        model=stages[0].claim.model,
        adapter="",
        tokens=tokens,
        prompt_tokens=prompt,
        given_tokens=prompt,
        reused_rows=0,
        runs=[run],
        transcripts=transcripts,
        certificates={each.identity.node_id: each.certificate_pem for each in members},
        authority=driver.authority_pem,
        driver=driver.identity.node_id,
    )
    return sign_receipt(receipt, driver.identity.sign)


def _costs(stages: Sequence[_BenchStage], receipt: Receipt, labels: dict[str, Any]) -> list[Result]:
    compute_s = sum(sum(stage.compute_s) for stage in stages)
    sign_s = sum(sum(stage.sign_s) for stage in stages)
    handover_s = sum(sum(stage.handover_s) for stage in stages)
    count = len(stages[0].compute_s)
    return [
        Result("compute", 1e3 * compute_s / count, "ms/token", labels),
        Result("hash and sign", 1e6 * sign_s / count, "µs/token", labels),
        Result("hand over", 1e6 * handover_s / count, "µs/token", labels),
        Result("share of computing", 100 * (sign_s + handover_s) / compute_s, "%", labels),
        Result("receipt", len(write_receipt(receipt)), "bytes", labels),
        Result("receipt per token", len(write_receipt(receipt)) / len(receipt.tokens), "bytes", labels),
    ]


def _mutate(receipt: Receipt, count: int, labels: dict[str, Any], say: Say) -> list[Result]:
    document = msgspec.json.decode(write_receipt(receipt))
    places = _leaves(document, ())
    rng = random.Random(17)
    started, refused, changed = time.perf_counter(), 0, 0
    verify_receipt(receipt, receipt.authority)
    verify_s = time.perf_counter() - started
    for number in range(count):
        made = copy.deepcopy(document)
        path = rng.choice(places)
        holder = made
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = _another(holder[path[-1]], rng)
        if made == document:
            continue
        changed += 1
        try:
            verify_receipt(read_receipt(msgspec.json.encode(made)), receipt.authority)
        except (ReceiptError, SourceError):
            refused += 1
        if number % 1000 == 0:
            say(f"{number} of {count} changed receipts")
    return [
        Result("verify", 1e3 * verify_s, "ms", labels),
        Result("changed receipts", changed, "receipts", labels),
        Result("of these refused", refused, "receipts", labels),
    ]


def _leaves(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, each in items for leaf in _leaves(each, (*path, key))]
    return found or [path]


def _another(value: Any, rng: random.Random) -> Any:
    """Of the same kind; a text by one character, bytes by one bit."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(value + rng.choice((-1, 1, 32, 1 << 20)), 0)
    if not isinstance(value, str) or not value:
        return "x"
    try:
        raw = bytearray(base64.b64decode(value, validate=True))
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        return base64.b64encode(raw).decode()
    except (ValueError, IndexError):
        at = rng.randrange(len(value))
        return value[:at] + rng.choice("abcxyz019") + value[at + 1 :]

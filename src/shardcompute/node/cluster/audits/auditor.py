"""Auditor: draws from the receipts of answers, has drawn stages computed again elsewhere, and acts upon what is found.

One thread, one audit at a time: serving comes first. What is drawn nobody can steer (`trust.draws`); who computes again
is told nothing of it (`recomputation`); whom a difference blames is judged by `trust.judgement`.
"""

from __future__ import annotations

import logging
import queue
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from shardcompute.backends.exactness import with_kv
from shardcompute.backends.matrix import Array
from shardcompute.control.events import AuditSettled
from shardcompute.control.roles.seeding import computing_nodes
from shardcompute.control.sizes import memory_of
from shardcompute.control.state import Assignment, ClusterState, Model, Node
from shardcompute.control.transitions.state_updates import claimed_bytes
from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.core.steps import Opening, Picked
from shardcompute.node.cluster.audits.comparing import (
    SentPiece,
    can_score,
    compare_picks,
    compare_rows,
    compare_scores,
    compares_bits,
)
from shardcompute.node.cluster.audits.recomputation import AuditedRows, Recomputations, kv_tokens_for
from shardcompute.node.cluster.audits.signed_answer import SignedAnswer, SignedStage, read_answer
from shardcompute.node.coordinator.coordinator import Coordinator
from shardcompute.node.coordinator.node_registry import await_answer
from shardcompute.node.driver.receipts.store import unpack_text
from shardcompute.node.rpc.commands import ShowRows, decode_rows
from shardcompute.security.receipts import ReceiptError, read_receipt, verify_receipt
from shardcompute.security.receipts.records import NONCE_BYTES, Receipt
from shardcompute.trust.distributions import WINDOW
from shardcompute.trust.draws import SECRET_BYTES, commit_secret, is_drawn
from shardcompute.trust.judgement import Comparison, Judgement, contradiction, is_fair, judge, withheld
from shardcompute.trust.pools import may_audit, rate_of, weigh

log = logging.getLogger(__name__)
_MOST_REQUESTS = 4096
_MOST_WAITING = 256
_SHOW_S = 30.0
_CLOSE_S = 5.0
_SCORED = 20
_GOT = re.compile(r"transcripts\[(\d+)\]\.commitments\[\d+\]\.inputs\[\d+\]")


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """An audit of one stage of an answer, for people to see."""

    receipt: str
    node: str
    """Whose rows were audited."""
    start: int
    stop: int
    auditors: tuple[str, ...]
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class _Draw:
    answer: SignedAnswer
    request: GenerationRequest
    position: int

    @property
    def stage(self) -> SignedStage:
        return self.answer.stages[self.position]

    @property
    def is_last(self) -> bool:
        return self.position == len(self.answer.stages) - 1


class _WithheldError(ShardComputeError):
    """A machine does not show what it has signed for."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(reason)
        self.node = node


class Auditor:
    """`asked` and `made` may be called from any thread and return at once."""

    def __init__(
        self,
        rate: float,
        authority_pem: str,
        coordinator: Coordinator,
        recomputations: Recomputations,
        on_audit: Callable[[AuditRecord], None],
        *,
        secret: bytes = b"",
    ) -> None:
        """Audits a share of `rate` of what machines of good reputation compute, more of others."""
        self._rate = rate
        self._authority_pem = authority_pem
        self._coordinator = coordinator
        self._recomputations = recomputations
        self._on_audit = on_audit
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, GenerationRequest] = OrderedDict()
        self._inbox: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MOST_WAITING)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="auditor", daemon=True)
        log.info(
            "a share of %g is audited; the secret of the draw has digest %s", rate, self.commitment.hex()
        )
        self._thread.start()

    @property
    def commitment(self) -> bytes:
        """What is published of the secret by which audits are drawn, in the log."""
        return commit_secret(self._secret)

    def asked(self, request: GenerationRequest) -> None:
        """An answer with a receipt is under way: how its tokens are to be picked is not in the receipt."""
        with self._lock:
            self._requests[request.receipt] = replace(request, pictures=request.pictures[:1])
            while len(self._requests) > _MOST_REQUESTS:
                self._requests.popitem(last=False)

    def made(self, receipt: str, packed: bytes) -> None:
        """Its receipt, as the store keeps it; empty: there is none. Where audits fall behind it is left out."""
        with self._lock:
            is_known = receipt in self._requests
        if packed and is_known:
            try:
                self._inbox.put_nowait((receipt, packed))
            except queue.Full:
                log.warning("audits fall behind: %s is not looked at", receipt)

    def close(self) -> None:
        self._is_closed = True
        try:
            self._inbox.put_nowait(None)
        except queue.Full:
            log.debug("audits that wait are dropped")
        self._thread.join(_CLOSE_S)

    # In the auditor's thread

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None and not self._is_closed:
            try:
                self._look_at(*item)
            except Exception:
                log.exception("the receipt %s could not be audited", item[0])

    def _look_at(self, receipt_id: str, packed: bytes) -> None:
        with self._lock:
            request = self._requests.pop(receipt_id, None)
        text = unpack_text(packed)
        if request is None or text is None:
            return
        receipt = read_receipt(text)
        if receipt.id != receipt_id:
            return
        try:
            verify_receipt(receipt, self._authority_pem)
        except ReceiptError as error:
            self._contradicted(receipt, error)
            return
        answer = read_answer(receipt)
        if (
            answer is None
            or request.pictures
            or tuple(request.prompt) != answer.tokens[: len(request.prompt)]
        ):
            log.info("%s is not of a kind that can be audited", receipt_id)
            return
        for position, stage in enumerate(answer.stages):
            state = self._coordinator.state
            node, member = state.nodes.get(stage.claim.node), state.pool.get(stage.claim.node)
            if node is None or stage.claim.ranks or not stage.signed:
                continue
            if is_drawn(
                self._secret, stage.signed, rate_of(member, state.pooling, self._rate, node.reputation)
            ):
                self._audit(_Draw(answer, request, position))

    def _contradicted(self, receipt: Receipt, error: ReceiptError) -> None:
        """Two stages that signed for different rows are both named by their signatures; anything else that is wrong
        with a receipt may be its driver's fault."""
        found = _GOT.fullmatch(error.field)
        if found is None or len(receipt.runs) != 1:
            log.warning("the receipt %s does not fit: %s", receipt.id, error.message)
            return
        claim = receipt.transcripts[int(found.group(1))].header.claim
        nodes = receipt.runs[0].nodes
        position = nodes.index(claim.node) if claim.node in nodes else 0
        if not position:
            return
        reason = f"{nodes[position - 1]} signed to have sent other rows than {claim.node} signed to have got"
        judgement = contradiction(nodes[position - 1], claim.node, reason)
        self._settle(AuditRecord(receipt.id, claim.node, claim.start, claim.stop, (), judgement))

    def _audit(self, draw: _Draw) -> None:
        claim = draw.stage.claim
        auditors: list[str] = []
        try:
            judgement = self._judged(draw, auditors)
        except _WithheldError as error:
            judgement = withheld(error.node, error.message)
        except LinkError as error:
            log.info("the audit of %s for %s came to nothing: %s", claim.node, draw.answer.receipt, error)
            return
        if judgement is not None:
            record = AuditRecord(
                draw.answer.receipt, claim.node, claim.start, claim.stop, tuple(auditors), judgement
            )
            self._settle(record, draw.answer.rows // WINDOW)

    def _judged(self, draw: _Draw, auditors: list[str]) -> Judgement | None:
        """None: there is nobody who could compute it again."""
        claim = draw.stage.claim
        inputs = None
        if draw.position:
            inputs = np.concatenate([each.rows for each in self._shown(draw, draw.position - 1)])
        sent = () if draw.is_last else self._shown(draw, draw.position)
        first = self._next_auditor(draw, auditors)
        if first is None:
            log.info("nobody has room to audit layers %d to %d of %s", claim.start, claim.stop, claim.node)
            return None
        computed = self._compute(draw, inputs, first, claim.exactness)
        comparison = self._compare(draw, sent, computed, claim.exactness, self._class_of(first, draw))
        if is_fair(comparison) or comparison == "unknown":
            return judge(claim.node, first.id, comparison)
        arbiter = self._next_auditor(draw, auditors)
        if arbiter is None:
            return judge(claim.node, first.id, comparison)
        again = self._compute(draw, inputs, arbiter, claim.exactness)
        return judge(
            claim.node,
            first.id,
            comparison,
            arbiter=arbiter.id,
            against_audited=self._compare(draw, sent, again, claim.exactness, self._class_of(arbiter, draw)),
            against_auditor=_between(
                computed,
                again,
                (self._class_of(first, draw), self._class_of(arbiter, draw)),
                claim.stop - claim.start,
            ),
        )

    def _shown(self, draw: _Draw, position: int) -> Sequence[SentPiece]:
        """What a stage has sent of the answer, which has to be what it signed for."""
        stage, answer = draw.answer.stages[position], draw.answer
        node, pieces, row = stage.claim.node, [], 0
        while row < answer.rows:
            asked = self._coordinator.registry.ask(node, ShowRows(answer.receipt, stage.claim.start, row))
            try:
                shown = decode_rows(await_answer(node, asked, _SHOW_S))
            except LinkError as error:
                known = self._coordinator.state.nodes.get(node)
                if known is None or not known.is_answering:
                    raise
                raise _WithheldError(node, f"it does not show what it signed for: {error.message}") from error
            rows = np.frombuffer(shown.content, dtype="<f4").reshape(shown.count, shown.width)
            pieces.append(SentPiece(shown.codec, rows[: answer.rows - row]))
            row += shown.count
        if not stage.has_sent([each.rows for each in pieces]):
            raise _WithheldError(node, "it shows other rows than it signed for")
        return pieces

    def _next_auditor(self, draw: _Draw, used: list[str]) -> Node | None:
        """Who can compute these layers: of the same class first, then who computes for no ring, which is not to be
        slowed down, then who holds them, then of the best reputation."""
        state, claim = self._coordinator.state, draw.stage.claim
        requested = state.models.get(claim.model)
        if requested is None:
            return None
        found = [
            node
            for node in state.nodes.values()
            if node.can_work
            and node.status == "ready"
            and node.id != claim.node
            and node.id not in used
            and may_audit(state.pool.get(node.id))
            and node.can_run(requested.model)
            and _has_room(state, requested.model, node, claim.start, claim.stop, draw.answer.rows)
        ]
        if not found:
            return None

        computing = computing_nodes(state)

        def preference(node: Node) -> tuple[bool, bool, bool, bool, float, str]:
            is_same = self._class_of(node, draw) == claim.exactness
            holds = any(held.start == claim.start and held.stop == claim.stop for held in node.shards)
            takes_part = any(node.id == stage.claim.node for stage in draw.answer.stages)
            return not is_same, node.id in computing, not holds, takes_part, -node.reputation, node.id

        chosen = min(found, key=preference)
        used.append(chosen.id)
        return chosen

    def _class_of(self, node: Node, draw: _Draw) -> str:
        model = self._coordinator.state.models[draw.stage.claim.model].model
        return with_kv(node.exactness_of(model), model.kv_type)

    def _compute(self, draw: _Draw, inputs: Array | None, node: Node, audited: str) -> Array | list[Picked]:
        answer, claim = draw.answer, draw.stage.claim
        sampling, alternatives = draw.request.sampling, 0
        targets: tuple[int, ...] = ()
        if draw.is_last and not compares_bits(audited, self._class_of(node, draw)):
            if not can_score(sampling):
                raise LinkError("how these tokens were drawn cannot be judged by another class")
            targets, alternatives = answer.tokens[answer.picked_from + 1 :], _SCORED
            sampling = Sampling(temperature=sampling.temperature, seed=sampling.seed)
        asked = AuditedRows(
            self._coordinator.state.models[claim.model].model,
            claim.start,
            claim.stop,
            Opening(
                0,
                sampling,
                len(draw.request.prompt),
                alternatives,
                adapter=answer.adapter,
                receipt_nonce=secrets.token_bytes(NONCE_BYTES),
            ),
            answer.tokens[: answer.rows],
            inputs,
            answer.picked_from,
            targets,
        )
        return self._recomputations.run(node, asked)

    def _compare(
        self,
        draw: _Draw,
        sent: Sequence[SentPiece],
        computed: Array | list[Picked],
        audited: str,
        auditor: str,
    ) -> Comparison:
        claim = draw.stage.claim
        if not isinstance(computed, list):
            return compare_rows(sent, computed, (audited, auditor), claim.stop - claim.start)
        if compares_bits(audited, auditor):
            return compare_picks(draw.answer.tokens[draw.answer.picked_from + 1 :], computed)
        return compare_scores(draw.request.sampling, computed, (audited, auditor))

    def _settle(self, record: AuditRecord, windows: int = 0) -> None:
        judgement = weigh(record.judgement, self._coordinator.state.pool)
        record = replace(record, judgement=judgement)
        words = "; ".join(f"{each.node}: {each.reason}" for each in judgement.blames if each.reason)
        level = logging.INFO if judgement.outcome in ("passed", "inconclusive") else logging.WARNING
        log.log(level, "audit of %s for %s: %s %s", record.node, record.receipt, judgement.outcome, words)
        for blame in judgement.blames:
            now_s = self._coordinator.now_s()
            reason = shorten(blame.reason)
            self._coordinator.post(
                AuditSettled(
                    blame.node, blame.finding, reason, record.receipt, now_s, windows, at_s=time.time()
                )
            )
        self._on_audit(record)


def _between(
    first: Array | list[Picked], second: Array | list[Picked], classes: tuple[str, str], layers: int
) -> Comparison:
    """What two auditors have computed."""
    if isinstance(first, list) and isinstance(second, list):
        return "equal" if _tokens(first) == _tokens(second) else "unknown"
    if isinstance(first, list) or isinstance(second, list):
        return "unknown"
    return compare_rows([SentPiece("exact", first)], second, classes, layers)


def _tokens(picked: Sequence[Picked]) -> list[tuple[int, int, bool]]:
    return [(each.position, each.choice.id, each.is_scored) for each in picked]


def _has_room(state: ClusterState, model: Model, node: Node, start: int, stop: int, rows: int) -> bool:
    """Whether these layers fit beside what it holds, or it holds them in reserve."""
    for chain in state.live_chains(model.name):
        if node.has_shard(chain.id, start, stop) and node.id not in chain.members and chain.status == "ready":
            return True
    small = msgspec.structs.replace(model, kv_tokens=kv_tokens_for(rows))
    need = memory_of(state, small, Assignment(node.id, start, stop))
    held = max(claimed_bytes(state, node.id), sum(shard.size_bytes for shard in node.shards))
    return need <= node.room_bytes - held

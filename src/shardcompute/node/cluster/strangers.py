"""Strangers at an open cluster: machines that come without a token are let in on probation, or told why not.

Who was let in is on record before it has its certificate, and told to the coordinator before it can dial in. What it
becomes is the state's (`ClusterState.pool`); what decides is `trust.pools`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec

from shardcompute.control.events import StrangerAdmitted
from shardcompute.control.state import ClusterState
from shardcompute.control.transitions.state_updates import is_on_probation
from shardcompute.core.errors import AuthError, JournalError, UsageError
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.cluster.record import ClusterNotes
from shardcompute.node.enrolment.admission import Application, Companion
from shardcompute.node.enrolment.certificate_issuer import CertificateIssuer
from shardcompute.security import Role
from shardcompute.security.receipts import new_receipt_id
from shardcompute.trust.pools import Pool, PoolMember, PoolPolicy, admitted, network_of, why_refused

log = logging.getLogger(__name__)
_NOTE = "pool"


class StrangerDesk:
    """Of one open cluster. Methods may be called from any thread."""

    def __init__(
        self,
        policy: PoolPolicy,
        notes: ClusterNotes,
        state: Callable[[], ClusterState],
        on_admitted: Callable[[StrangerAdmitted], None],
        is_member: Callable[[str], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`is_member` knows who came with a token."""
        self._policy = policy
        self._notes = notes
        self._state = state
        self._on_admitted = on_admitted
        self._is_member = is_member
        self._clock = clock
        self._lock = threading.Lock()
        self._book = read_book(notes)

    def admit(self, application: Application, peer: str, issuer: CertificateIssuer) -> list[str]:
        """Certificates of who applies and its companions. AuthError where the policy keeps one of them out."""
        if application.role != Role.WORKER.value:
            raise UsageError("only workers join without a token", hint="ask the operator for a token")
        network, now_s = network_of(peer), self._clock()
        applicants = [Companion(application.node_id, application.request_pem), *application.companions]
        new = [each.node_id for each in applicants if not self._is_member(each.node_id)]
        with self._lock:
            book = self._admitted(new, network, now_s)
            certificates = [
                issuer.admit(each.request_pem, node_id=each.node_id, role=Role.WORKER) for each in applicants
            ]
            if book != self._book:
                self._notes.write(_NOTE, msgspec.json.encode(book))
                self._book = book
        for node in new:
            log.info("%s came without a token, from %s: it is on probation", node, network)
            self._on_admitted(StrangerAdmitted(node, network, book[node].admitted_s))
        return certificates

    def _admitted(self, nodes: Sequence[str], network: str, now_s: float) -> dict[str, PoolMember]:
        state, book = self._state(), self._book
        present = [id for id, node in state.nodes.items() if node.is_live]
        for node in nodes:
            refusal = why_refused(_known(book, state.pool), self._policy, node, network, now_s, present)
            if refusal:
                raise AuthError(refusal, hint="ask the operator of the pool")
            book = admitted(book, node, network, now_s)
        return book


def read_book(notes: ClusterNotes) -> dict[str, PoolMember]:
    """Who was ever let in without a token."""
    return notes.read(_NOTE, _decode, {})


def forgotten(notes: ClusterNotes, pool: Pool) -> Iterable[StrangerAdmitted]:
    """Who was let in and then the coordinator ended before it had written that down: they are strangers still."""
    for node, member in read_book(notes).items():
        if node not in pool:
            yield StrangerAdmitted(node, member.network, member.admitted_s)


def expelled(pool: Pool) -> list[str]:
    return [node for node, member in pool.items() if member.standing == "expelled"]


def with_checks(state: ClusterState, chain: str, request: GenerationRequest) -> GenerationRequest:
    """The request as a chain gets it: what strangers compute is audited wholly. Such answers have receipts, and begin
    with nothing that is kept of others, which could not be computed again."""
    known = state.chains.get(chain)
    if known is None or not any(is_on_probation(state, node) for node in known.members):
        return request
    receipt = request.receipt or new_receipt_id()
    return replace(request, receipt=receipt, cache_salt=receipt)


def _known(book: Pool, pool: Pool) -> dict[str, PoolMember]:
    """What the state says of a key counts; of the others what the book says."""
    return {**book, **pool}


def _decode(content: bytes) -> dict[str, PoolMember]:
    try:
        return msgspec.json.decode(content, type=dict[str, PoolMember])
    except msgspec.MsgspecError as error:
        raise JournalError("who came without a token cannot be read") from error

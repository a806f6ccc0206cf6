"""Attested nodes of a cluster: who has shown evidence of its hardware, under which policy, as it joined.

Evidence is judged once, with the join token, and what it proved is kept by node, whose name is that of its key. Another
policy begins anew: what was shown under a former one counts for nothing.
"""

from __future__ import annotations

import logging
import threading

import msgspec

from shardcompute.core.errors import AuthError, SourceError
from shardcompute.node.cluster.record import ClusterNotes
from shardcompute.node.enrolment.admission import Application
from shardcompute.security.attestation.evidence import VerifiedReport, decode_evidence, report_data_of
from shardcompute.security.attestation.policy import AttestationPolicy
from shardcompute.security.names import Role

log = logging.getLogger(__name__)
_NOTE = "attested"
_MOST_NODES = 4096
_SHOWN_DIGITS = 16


class AttestedStanding(msgspec.Struct, frozen=True):
    """What was verified of a node."""

    kind: str
    measurement: str
    policy: str
    since_s: float


class AttestedNodes:
    """Methods may be called from any thread."""

    def __init__(self, policy: AttestationPolicy | None, notes: ClusterNotes) -> None:
        """Without a policy nobody has to show anything."""
        self._policy = policy
        self._notes = notes
        self._lock = threading.Lock()
        self._standings: dict[str, AttestedStanding] = {}
        if policy is not None:
            self._standings = notes.read(_NOTE, _decode, self._standings)

    def verify(self, application: Application, role: Role, now_s: float) -> AttestedStanding | None:
        """What a worker's evidence proves; None where nothing has to be. AuthError where it is not enough."""
        policy = self._policy
        if policy is None or role is not Role.WORKER:
            return None
        if application.companions:
            raise AuthError("Evidence is about one worker, and several apply", hint="join with one --device")
        if not application.evidence:
            raise AuthError(
                "This cluster takes only machines whose hardware is attested: join with --evidence"
            )
        evidence = decode_evidence(application.evidence)
        found: VerifiedReport = policy.verify(evidence, report_data_of(application.request_pem), now_s)
        return AttestedStanding(found.kind, found.measurement, policy.digest, now_s)

    def remember(self, node: str, standing: AttestedStanding | None) -> None:
        """It takes effect once it is on record; raises where that cannot be done."""
        if standing is None:
            return
        with self._lock:
            standings = {**self._standings, node: standing}
            while len(standings) > _MOST_NODES:
                del standings[min(standings, key=lambda each: standings[each].since_s)]
            self._notes.write(_NOTE, msgspec.json.encode(standings))
            self._standings = standings
        log.info("%s is attested: %s, measurement %s", node, standing.kind, standing.measurement)

    def standing_of(self, node: str) -> str | None:
        """In words, "" where nothing has to be verified; None: it may not work here."""
        if self._policy is None:
            return ""
        with self._lock:
            found = self._standings.get(node)
        if found is None or found.policy != self._policy.digest:
            return None
        return f"{found.kind}, measurement {found.measurement[:_SHOWN_DIGITS]}…"


def _decode(content: bytes) -> dict[str, AttestedStanding]:
    try:
        return msgspec.json.decode(content, type=dict[str, AttestedStanding])
    except ValueError as error:
        raise SourceError(f"who is attested cannot be read: {error}") from error

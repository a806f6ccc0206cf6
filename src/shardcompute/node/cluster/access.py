"""Access to a cluster: books of the tokens that let machines join, of API keys, and of who was thrown out; pairing.

What lets somebody in takes effect once it is on record; what throws somebody out takes effect first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from shardcompute.core.errors import UsageError
from shardcompute.node.cluster.attested import AttestedNodes
from shardcompute.node.cluster.record import ClusterNotes, authority_folder
from shardcompute.node.cluster.strangers import StrangerDesk
from shardcompute.node.enrolment.admission import Application, Companion
from shardcompute.node.enrolment.certificate_issuer import CertificateIssuer
from shardcompute.node.enrolment.pairing_server import PairingServer
from shardcompute.security import (
    ClusterAuthority,
    KeyBook,
    KeyLimits,
    KeyRole,
    KeySummary,
    Revocations,
    Role,
    TokenBook,
)
from shardcompute.security.api_keys import NO_LIMITS
from shardcompute.security.pairing.codes import PairingCode, PairingDesk
from shardcompute.security.revocations import load_revocations, save_revocations
from shardcompute.security.token_book import TokenSummary
from shardcompute.security.tokens import PUBLIC_ID, PUBLIC_SECRET, JoinToken

log = logging.getLogger(__name__)
_PAIRED_LIFE_S = 600.0


class ClusterAccess:
    """The books of one cluster. Methods may be called from any thread."""

    def __init__(
        self,
        authority: ClusterAuthority,
        folder: Path,
        notes: ClusterNotes,
        *,
        join_addresses: Callable[[], Sequence[str]],
        on_keys: Callable[[], None],
        recovers: bool,
        attested: AttestedNodes | None = None,
    ) -> None:
        """`folder` is the cluster's; `on_keys` is called when others are to hear of the keys."""
        self._authority = authority
        self._folder = authority_folder(folder)
        self._notes = notes
        self._join_addresses = join_addresses
        self._on_keys = on_keys
        self._attested = attested or AttestedNodes(None, notes)
        self._lock = threading.Lock()
        self._pairing = PairingDesk()
        self._on_pairing: Callable[[str, bool], None] = lambda machine, is_right: None
        self._on_joined: Callable[[str, str, str], None] = lambda node, role, token_id: None
        self._strangers: StrangerDesk | None = None
        self._tokens = notes.read("tokens", TokenBook.from_bytes, TokenBook())
        self._keys = notes.read("keys", KeyBook.from_bytes, KeyBook())
        self._revocations = self._open_revocations(recovers)

    def _open_revocations(self, recovers: bool) -> Revocations:
        """Who was thrown out is known to the journal and also beside the authority."""
        kept = load_revocations(self._folder)
        noted = self._notes.read("revocations", Revocations.from_bytes, None)
        if kept is None and noted is None and recovers:
            log.warning("who was thrown out of the cluster is not known any more: throw them out again")
        revocations = (kept or Revocations()).merged(noted or Revocations())
        if kept != revocations:
            save_revocations(self._folder, revocations)
        if noted != revocations:
            self._notes.begin_with("revocations", revocations.to_bytes())
        return revocations

    # Who may join

    def create_token(
        self,
        *,
        life_s: float = 86_400.0,
        max_uses: int | None = None,
        roles: Collection[Role] = (Role.WORKER, Role.DRIVER),
    ) -> str:
        with self._lock:
            tokens, token = self._tokens.create(
                addresses=self._join_addresses(),
                fingerprint=self._authority.fingerprint,
                cluster=self._authority.name,
                now_s=time.time(),
                roles=roles,
                life_s=life_s,
                max_uses=max_uses,
            )
            self._notes.write("tokens", tokens.to_bytes())
            self._tokens = tokens
        return token.encode()

    def tokens(self) -> tuple[TokenSummary, ...]:
        return self._tokens.summaries(time.time())

    def tokens_used_by(self, node: str) -> tuple[str, ...]:
        """Ids of tokens that a node joined with and that are still good."""
        return self._tokens.used_by(node, time.time())

    def revoke_token(self, token_id: str) -> None:
        with self._lock:
            self._tokens = self._tokens.revoke(token_id)
            self._notes.keep("tokens", self._tokens.to_bytes())

    def open_pool(self, strangers: StrangerDesk) -> None:
        """Let machines in without a token as well."""
        self._strangers = strangers

    def public_token(self) -> str:
        """What anybody may join an open cluster with: it names the cluster, and is no secret."""
        token = JoinToken(
            PUBLIC_ID,
            PUBLIC_SECRET,
            tuple(self._join_addresses()),
            self._authority.fingerprint,
            self._authority.name,
        )
        return token.encode()

    def has_admitted(self, node: str) -> bool:
        """Whether a node has come with a token, be that as good as it was or not."""
        return any(record.has_admitted(node) for record in self._tokens.records)

    def admit(self, application: Application, issuer: CertificateIssuer, peer: str = "") -> list[str]:
        """Certificates of who applies and of its companions, for a token that lets them in; where the cluster is open,
        without one, on probation."""
        if self._strangers is not None and application.token_id == PUBLIC_ID:
            certificates = self._strangers.admit(application, peer, issuer)
            self._on_joined(application.node_id, application.role, PUBLIC_ID)
            return certificates
        if application.role not in (Role.WORKER.value, Role.DRIVER.value):
            raise UsageError(f"nobody joins as {application.role!r}")
        role, now_s = Role(application.role), time.time()
        shown = self._attested.verify(application, role, now_s)
        with self._lock:
            tokens, _ = self._tokens.use(
                application.token_id,
                application.secret,
                node_id=application.node_id,
                role=role,
                now_s=now_s,
                companions=[each.node_id for each in application.companions],
            )
            applicants = [Companion(application.node_id, application.request_pem), *application.companions]
            certificates = [
                issuer.admit(each.request_pem, node_id=each.node_id, role=role) for each in applicants
            ]
            self._attested.remember(application.node_id, shown)
            self._notes.write("tokens", tokens.to_bytes())
            self._tokens = tokens
        for each in applicants:
            log.info("%s joined as %s", each.node_id, role)
            self._on_joined(each.node_id, role.value, application.token_id)
        return certificates

    def standing_of(self, node: str) -> str | None:
        """What was verified of a worker's hardware, "" where nothing has to be; None: it may not work here."""
        return self._attested.standing_of(node)

    def listen_to_joins(self, listener: Callable[[str, str, str], None]) -> None:
        """Call `listener` with the node, role and token's id of every machine that is let in, in any thread."""
        self._on_joined = listener

    # Pairing

    def open_pairing(self) -> PairingCode:
        """A code that lets one machine in, once and soon; the one before is good for nothing."""
        return self._pairing.open()

    def watch_pairing(self, listener: Callable[[str, bool], None]) -> None:
        """Call `listener`, from any thread, with what a machine calls itself and whether its code was right."""
        self._on_pairing = listener

    def pairing_server(self) -> PairingServer:
        return PairingServer(self._pairing, self._authority.fingerprint, self._pair, self._pairing_refused)

    def _pair(self, machine: str) -> str:
        token = self.create_token(life_s=_PAIRED_LIFE_S, max_uses=1)
        self._on_pairing(machine, True)
        return token

    def _pairing_refused(self, machine: str) -> None:
        self._on_pairing(machine, False)

    # Who was thrown out

    @property
    def revocations(self) -> Revocations:
        return self._revocations

    def revoke_node(self, node: str, act: Callable[[Revocations], None]) -> bool:
        """Throw a node out for good, and with it the tokens that it joined with, as it knows them. `act` has that take
        effect everywhere. Whether it is on record; otherwise it will be once the disk has room."""
        with self._lock:
            self._revocations = revocations = self._revocations.with_node(node)
            for token_id in self._tokens.used_by(node, time.time()):
                self._tokens = self._tokens.revoke(token_id)
        act(revocations)
        with self._lock:
            revocations, folder = self._revocations, self._folder
            is_saved = self._notes.keep_file("revoked nodes", lambda: save_revocations(folder, revocations))
            is_saved = self._notes.keep("tokens", self._tokens.to_bytes()) and is_saved
            return self._notes.keep("revocations", revocations.to_bytes()) and is_saved

    # API keys

    def create_key(
        self,
        label: str,
        *,
        role: KeyRole = KeyRole.USE,
        limits: KeyLimits = NO_LIMITS,
        life_s: float | None = None,
    ) -> str:
        with self._lock:
            keys, key = self._keys.create(
                label=label, now_s=time.time(), role=role, limits=limits, life_s=life_s
            )
            self._notes.write("keys", keys.to_bytes())
            self._keys = keys
        self._on_keys()
        return key

    def keys(self) -> tuple[KeySummary, ...]:
        return self._keys.summaries()

    @property
    def key_book(self) -> KeyBook:
        """What other drivers know keys by."""
        return self._keys

    def find_key(self, key: str) -> KeySummary | None:
        """Whose API key this is, None if it is unknown; AuthError if it was good once."""
        return self._keys.find(key, now_s=time.time())

    def revoke_key(self, key_id: str) -> None:
        with self._lock:
            self._keys = self._keys.revoke(key_id)
        self._on_keys()
        with self._lock:
            self._notes.keep("keys", self._keys.to_bytes())

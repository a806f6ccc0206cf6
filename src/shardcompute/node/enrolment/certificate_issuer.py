"""Certificate issuer of a cluster: certificates for members that join, their renewal, and the coordinator's own."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from shardcompute.core.errors import ShardComputeError, UsageError
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.security.authority import NODE_DAYS, ClusterAuthority
from shardcompute.security.certificates import PeerIdentity, check_peer, needs_renewal
from shardcompute.security.credentials import Credentials
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.names import Role
from shardcompute.security.revocations import Revocations

log = logging.getLogger(__name__)
MEMBER_DAYS: float = NODE_DAYS
OWN_DAYS = 365.0
_NOTICE_DAYS = 180.0
_DAY_S = 86_400.0


class CertificateIssuer:
    """Signs for one authority. Methods may be called from any thread."""

    def __init__(
        self,
        authority: ClusterAuthority,
        folder: Path,
        revocations: Callable[[], Revocations],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder` holds the coordinator's own key; `revocations` are those of the moment."""
        self._authority = authority
        self._folder = folder
        self._revocations = revocations
        self._clock = clock
        self._daily_log = RateLimitedLog(log, every_s=_DAY_S)

    def own(self) -> Credentials:
        """The coordinator's own credentials, with a new certificate."""
        identity = NodeIdentity.open(self._folder)
        certificate = self._authority.issue(
            identity.certificate_request(),
            node_id=identity.node_id,
            roles=[Role.COORDINATOR, Role.DRIVER],
            now_s=self._clock(),
            days=OWN_DAYS,
        )
        return Credentials(identity, certificate, self._authority.certificate_pem)

    def admit(self, request_pem: str, *, node_id: str, role: Role) -> str:
        """The first certificate of a machine whose join token has been checked."""
        return self._issue(request_pem, node_id, frozenset({role}))

    def renew(self, peer: PeerIdentity, request_pem: str) -> str:
        """The next certificate of a member that has shown its present one; it may act as it may now.

        AuthError for one that was revoked or has run out, UsageError where it is too soon.
        """
        now_s = self._clock()
        check_peer(peer, cluster=self._authority.name, revocations=self._revocations(), now_s=now_s)
        if peer.expires_at_s - now_s > MEMBER_DAYS * _DAY_S / 2:
            raise UsageError("The present certificate is good for long", hint="ask again when it is not")
        certificate = self._issue(request_pem, peer.node_id, peer.roles)
        log.info("the certificate of %s was renewed", peer.node_id)
        return certificate

    def check_own(self, endpoint: Endpoint, join_tls: ssl.SSLContext) -> None:
        """Renew the coordinator's own certificate when it is time to, and say early that the authority runs out."""
        now_s = self._clock()
        if needs_renewal(endpoint.credentials.certificate_pem, now_s):
            credentials = self.own()
            endpoint.renew(credentials)
            credentials.show_in(join_tls)
            log.info("the coordinator's own certificate was renewed")
            try:
                credentials.save()
            except (ShardComputeError, OSError) as error:
                log.warning("the coordinator's renewed certificate is not on disk: %s", error)
        days = (self._authority.expires_at_s - now_s) / _DAY_S
        if days < _NOTICE_DAYS:
            self._daily_log.warning(
                "authority",
                "the authority of this cluster runs out in %.0f days, and every certificate with it: make a new "
                "cluster and join all machines to it before that",
                days,
            )

    def _issue(self, request_pem: str, node_id: str, roles: frozenset[Role]) -> str:
        return self._authority.issue(
            request_pem,
            node_id=node_id,
            roles=roles,
            now_s=self._clock(),
            days=MEMBER_DAYS,
            revocations=self._revocations(),
        )

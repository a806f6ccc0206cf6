"""Certificate renewal: a node asks its coordinator for its next certificate, over the link that the present one opened.

It asks when two thirds of the present one's life are over, and again until it has another: at first after a minute,
then after longer and longer waits. What it gets is used for every link from then on, without a restart; links that the
former one opened end with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from cryptography.exceptions import InvalidSignature

from shardcompute.core.errors import AuthError, ShardComputeError
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.security.certificates import needs_renewal, parse_certificate
from shardcompute.security.credentials import Credentials
from shardcompute.wire.control import CertificateIssued, RenewCertificate

log = logging.getLogger(__name__)
_ASK_AGAIN_S = (60.0, 3600.0)
_DAY_S = 86_400.0


class CertificateRenewal:
    """`next_request` and `take` are called by one thread each."""

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float] = time.time) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._ask_at_s = 0.0
        self._wait_s = _ASK_AGAIN_S[0]

    def next_request(self) -> RenewCertificate | None:
        """What to ask for now; None while nothing is due, or was asked for lately."""
        now_s, credentials = self._clock(), self._endpoint.credentials
        if now_s < self._ask_at_s or not needs_renewal(credentials.certificate_pem, now_s):
            return None
        self._ask_at_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, _ASK_AGAIN_S[1])
        return RenewCertificate(credentials.identity.certificate_request())

    def take(self, issued: CertificateIssued) -> bool:
        """What the coordinator answered; whether links are opened with another certificate from now on."""
        credentials = self._endpoint.credentials
        try:
            if issued.error:
                raise AuthError(issued.error)
            renewed = _checked(credentials, issued.certificate_pem)
            self._endpoint.renew(renewed)
        except ShardComputeError as error:
            days = (credentials.own.expires_at_s - self._clock()) / _DAY_S
            log.warning("the certificate was not renewed, and ends in %.0f days: %s", days, error)
            return False
        try:
            renewed.save()
        except (ShardComputeError, OSError) as error:
            log.warning("the renewed certificate is not on disk, and lost with this process: %s", error)
        self._wait_s, self._ask_at_s = _ASK_AGAIN_S[0], 0.0
        log.info(
            "the certificate was renewed for %.0f days", (renewed.own.expires_at_s - self._clock()) / _DAY_S
        )
        return True


def _checked(former: Credentials, certificate_pem: str) -> Credentials:
    """The same node with its next certificate; AuthError unless it is of the same authority, for the same roles, and
    good for longer."""
    renewed = replace(former, certificate_pem=certificate_pem)
    try:
        parse_certificate(certificate_pem).verify_directly_issued_by(parse_certificate(former.authority_pem))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise AuthError("It is not of this cluster's authority", hint="join the cluster again") from error
    if (renewed.own.cluster, renewed.own.roles) != (former.own.cluster, former.own.roles):
        raise AuthError("It is for another cluster or other roles", hint="join the cluster again")
    if renewed.own.expires_at_s <= former.own.expires_at_s:
        raise AuthError(
            "It is good for no longer than the present one: the cluster's authority is about to run out",
            hint="make a new cluster and join it before that",
        )
    return renewed

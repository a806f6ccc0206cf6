"""TLS of an HTTP server: one context for all connections, whose certificate can be exchanged while it serves."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shardcompute.core.errors import ShardComputeError, SourceError
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.security.https.sources import CertificateSource, KeyedCertificate

log = logging.getLogger(__name__)
_NOTICE_S = 14 * 86_400.0
_DAY_S = 86_400.0


class ServerTls:
    """`look` from any thread, `show` in the thread that accepts connections: handshakes never see half a change."""

    def __init__(self, source: CertificateSource, clock: Callable[[], float] = time.time) -> None:
        """SourceError where the source has nothing that can be shown."""
        self._source = source
        self._clock = clock
        self._hourly_log = RateLimitedLog(log, every_s=3600.0)
        self._daily_log = RateLimitedLog(log, every_s=_DAY_S)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.options |= ssl.OP_NO_COMPRESSION
        self.context.set_alpn_protocols(["http/1.1"])
        self.shown = source.read(clock())
        _load(self.context, self.shown)
        self._notice(self.shown)

    def look(self) -> KeyedCertificate | None:
        """Another certificate than the one that is shown, if there is a good one; what cannot be used is said in the
        log, and the present one stays."""
        try:
            found = self._source.read(self._clock())
            # Whether OpenSSL takes it is tried where it does no harm.
            if found != self.shown:
                _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), found)
        except (ShardComputeError, OSError) as error:
            self._hourly_log.warning(str(error), "the certificate of the HTTP API stays as it is: %s", error)
            self._notice(self.shown)
            return None
        self._notice(found)
        return None if found == self.shown else found

    def show(self, certificate: KeyedCertificate) -> None:
        """Show it in every handshake from now on; connections that are open stay."""
        _load(self.context, certificate)
        self.shown = certificate
        log.info("the HTTP API shows a new certificate: %s", certificate.fingerprint)

    def _notice(self, certificate: KeyedCertificate) -> None:
        left_s = certificate.expires_at_s - self._clock()
        if left_s < _NOTICE_S:
            self._daily_log.warning(
                "expiry", "the certificate of the HTTP API runs out in %.1f days: renew it", left_s / _DAY_S
            )


def _load(context: ssl.SSLContext, certificate: KeyedCertificate) -> None:
    """OpenSSL reads files only: both are written for a moment, for this user alone."""
    descriptor, name = tempfile.mkstemp(prefix="shardcompute-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(certificate.key_pem + certificate.chain_pem.encode())
        # A password that is never needed keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(name, password="")
    except ssl.SSLError as error:
        raise SourceError(
            f"the certificate of the HTTP API cannot be used: {error.reason or error}",
            hint="a key of at least 2048 bits (RSA) or P-256 (EC), signed with SHA-256, will do",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()

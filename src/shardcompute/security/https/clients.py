"""TLS of HTTP clients towards a server that no authority of the system vouches for.

Either the client has the server's certificate (commands on the same machine), or it knows its public key's hash, the
pin: then the server is asked for its certificate first, which must have that key, and is all that the connections that
follow trust. Nothing is sent before. Names are not checked: the key says more.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ssl
from urllib.parse import urlsplit

from cryptography import x509

from shardcompute.core.errors import AuthError, SourceError, UsageError
from shardcompute.core.sockets.connecting import connect
from shardcompute.security.certificates import certificate_pem
from shardcompute.security.https.sources import PIN_PREFIX, pin_of

_TIMEOUT_S = 10.0
_DIGEST_BYTES = 32


def trusting(pem: str) -> ssl.SSLContext:
    """Trusts this certificate and no other, whatever name it is reached by."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    # Not its issuer, if it has one: the certificate itself.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError) as error:
        raise SourceError("the server's certificate cannot be read", hint="start the server again") from error
    return context


def pinned(url: str, pin: str) -> ssl.SSLContext:
    """Trusts the server at `url` as long as its key is the one of `pin`; AuthError if it has another."""
    wanted, parts = check_pin(pin), urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise UsageError(
            f"{url} is not reached by HTTPS, so that it shows no key", hint="begin it with https://"
        )
    certificate = _shown_by(parts.hostname, parts.port or 443)
    if not hmac.compare_digest(pin_of(certificate), wanted):
        raise AuthError(
            f"the server at {url} shows another key than the one that is pinned: {pin_of(certificate)}",
            hint="ask its operator which is right before you trust it: somebody may be in between",
        )
    return trusting(certificate_pem(certificate))


def check_pin(pin: str) -> str:
    """UsageError for what is no pin."""
    try:
        is_pin = (
            pin.startswith(PIN_PREFIX)
            and len(base64.b64decode(pin.removeprefix(PIN_PREFIX), validate=True)) == _DIGEST_BYTES
        )
    except (binascii.Error, ValueError):
        is_pin = False
    if not is_pin:
        raise UsageError(
            f"{pin[:80]!r} is not the pin of a key",
            hint=f"the server says it when it starts; it begins with {PIN_PREFIX}",
        )
    return pin


def _shown_by(host: str, port: int) -> x509.Certificate:
    """Without trusting it: it is looked at, and nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            connect(host, port, _TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as wrapped,
        ):
            der = wrapped.getpeercert(binary_form=True)
    except ssl.SSLError as error:
        raise SourceError(
            f"{host}:{port} does not speak HTTPS: {error.reason or error}",
            hint="check the address and its port",
        ) from error
    except OSError as error:
        raise SourceError(
            f"The server at {host}:{port} cannot be reached: {error}.", hint="check that it runs"
        ) from error
    assert der is not None
    return x509.load_der_x509_certificate(der)

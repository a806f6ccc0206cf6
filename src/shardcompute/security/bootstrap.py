"""Trust bootstrap: how a machine that has only a join token finds out that it talks to the right cluster.

The client sends `JOIN_HELLO` and the server answers, still in the clear, with the authority's certificate, two
bytes of length first. It is public; what counts is that its SHA-256 equals the fingerprint in the token. The
client then does a TLS 1.3 handshake that trusts this authority alone, and demands the role of coordinator.
Only after that does it send the token's secret. TLS begins with another byte than `JOIN_HELLO`, so that one
port can serve both.

Both functions take over the socket (whose timeout the caller has set) and close it if they fail.
`join_greeting` and `pinned_authority` are the same without the I/O, for asyncio or HTTP.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import struct
from collections.abc import Callable, Iterator

from cryptography import x509
from cryptography.x509.oid import NameOID

from shardcompute.core.errors import AuthError, LinkClosedError, LinkError, UsageError
from shardcompute.security.certificates import (
    PeerIdentity,
    certificate_der,
    certificate_pem,
    check_peer,
    fingerprint_of,
    parse_certificate,
)
from shardcompute.security.names import Role, check_cluster_name
from shardcompute.security.revocations import Revocations
from shardcompute.security.tls import join_client_context, peer_identity
from shardcompute.security.tokens import JoinToken

JOIN_HELLO = b"SCJOIN1\n"
_LENGTH = struct.Struct("!H")
_MAX_CERTIFICATE_BYTES = 4096


def join_greeting(authority_pem: str) -> bytes:
    """What the server sends in answer to `JOIN_HELLO`."""
    der = certificate_der(parse_certificate(authority_pem))
    return _LENGTH.pack(len(der)) + der


def pinned_authority(der: bytes, token: JoinToken) -> str:
    """The authority's certificate as PEM, if it is the very one that the token names; else `AuthError`."""
    if not hmac.compare_digest(fingerprint_of(der), token.fingerprint):
        raise AuthError(
            "The machine that answered belongs to another cluster than the join token, or somebody is between",
            hint="check the address, and ask the coordinator for a new token",
        )
    try:
        return certificate_pem(x509.load_der_x509_certificate(der))
    except ValueError as error:
        raise AuthError("The join token names no certificate", hint="ask for a new token") from error


def check_coordinator(peer: PeerIdentity, cluster: str) -> None:
    """Raises unless the peer may hear a secret of those who join: any other node of the cluster may not."""
    check_peer(peer, cluster=cluster, revocations=Revocations(), role=Role.COORDINATOR)


def open_join(sock: socket.socket, token: JoinToken) -> tuple[ssl.SSLSocket, str]:
    """(a connection on which the secret may be sent, the authority's certificate as PEM)."""
    return _greet(sock, lambda der: (pinned_authority(der, token), token.cluster))


def open_pairing(sock: socket.socket) -> tuple[ssl.SSLSocket, str]:
    """(a connection to the coordinator of *some* cluster, its authority's certificate as PEM).

    Nobody vouches for that cluster yet: a code that both sides know has to (see `pairing`), before anything is
    believed that comes over this connection.
    """
    return _greet(sock, _any_authority)


def _any_authority(der: bytes) -> tuple[str, str]:
    """The authority's certificate as PEM and its cluster's name."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        [name] = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return certificate_pem(certificate), check_cluster_name(str(name.value))
    except (ValueError, UsageError) as error:
        raise LinkError(
            "The machine that answered does not speak the join protocol", hint="check the address and port"
        ) from error


def _greet(sock: socket.socket, accept: Callable[[bytes], tuple[str, str]]) -> tuple[ssl.SSLSocket, str]:
    """A connection to the coordinator of a cluster whose authority `accept` takes, and that authority."""
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        with _naming_failures():
            sock.sendall(JOIN_HELLO)
            (size,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
            if not 0 < size <= _MAX_CERTIFICATE_BYTES:
                raise LinkError(
                    "The machine that answered does not speak the join protocol",
                    hint="check the address and port in the token",
                )
            authority_pem, cluster = accept(_receive(sock, size))
            connection = join_client_context(authority_pem).wrap_socket(sock)
        undo.callback(connection.close)
        check_coordinator(peer_identity(connection), cluster)
        undo.pop_all()
        return connection, authority_pem


def answer_join(sock: socket.socket, context: ssl.SSLContext, authority_pem: str) -> ssl.SSLSocket:
    """The server's side, with a context of `join_server_context`: a connection whose client is unknown."""
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        with _naming_failures():
            if _receive(sock, len(JOIN_HELLO)) != JOIN_HELLO:
                raise LinkError("Somebody called the join endpoint and said something else", hint="ignore it")
            sock.sendall(join_greeting(authority_pem))
            connection = context.wrap_socket(sock, server_side=True)
        undo.pop_all()
        return connection


def _receive(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes: one more would be the first of the TLS handshake."""
    content = bytearray()
    while len(content) < size:
        chunk = sock.recv(size - len(content))
        if not chunk:
            raise LinkClosedError(
                "The other side hung up during first contact", hint="check the address and try again"
            )
        content += chunk
    return bytes(content)


@contextlib.contextmanager
def _naming_failures() -> Iterator[None]:
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise AuthError(
            f"The coordinator's certificate is not good: {error.verify_message}",
            hint="check this machine's clock, and ask for a new token",
        ) from error
    except OSError as error:
        raise LinkError(
            f"First contact failed: {error.strerror or error}", hint="check the network and try again"
        ) from error

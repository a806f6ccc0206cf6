"""TLS between the nodes of a cluster: version 1.3, both sides with a certificate of the cluster's authority.

Host names are not checked, for home machines have no steady ones: after the handshake ask `peer_identity` who
the other side is and `check_peer` whether it is the one you want. Under TLS 1.3 a client learns that it was
refused only when it first reads. There are no session tickets, so that every connection shows a certificate.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
from pathlib import Path

from shardcompute.core.errors import AuthError, SourceError
from shardcompute.core.sockets.secure_socket import SecureSocket
from shardcompute.security.certificates import PeerIdentity, read_peer
from shardcompute.security.identity import NodeIdentity


def server_context(identity: NodeIdentity, certificate_pem: str, authority_pem: str) -> ssl.SSLContext:
    """For listening: only clients with a certificate of the cluster get through the handshake."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    _trust_only(context, authority_pem)
    show_certificate(context, identity, certificate_pem)
    return context


def client_context(identity: NodeIdentity, certificate_pem: str, authority_pem: str) -> ssl.SSLContext:
    """For dialling: shows our certificate and accepts only servers with one of the cluster."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    _trust_only(context, authority_pem)
    show_certificate(context, identity, certificate_pem)
    return context


def join_server_context(identity: NodeIdentity, certificate_pem: str) -> ssl.SSLContext:
    """For the join endpoint alone: clients have no certificate yet and are not asked for one."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_NONE
    show_certificate(context, identity, certificate_pem)
    return context


def join_client_context(authority_pem: str) -> ssl.SSLContext:
    """For joining: shows no certificate, and accepts only servers of the authority that the token pins."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    _trust_only(context, authority_pem)
    return context


def peer_identity(connection: ssl.SSLSocket | ssl.SSLObject) -> PeerIdentity:
    """Who is at the other end of a finished, verified handshake; `AuthError` if it showed no certificate."""
    if connection.context.verify_mode is not ssl.CERT_REQUIRED:
        raise AuthError("The peer's certificate was not checked", hint="use the contexts of this cluster")
    return read_peer(connection.getpeercert(binary_form=True))


def _context(protocol: int) -> ssl.SSLContext:
    # Not `create_default_context`: it would trust the system's authorities and obey SSLKEYLOGFILE.
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_COMPRESSION
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # A resumed session would skip the certificate, and with it revocation.
        context.num_tickets = 0
    context.sslsocket_class = SecureSocket
    return context


def _trust_only(context: ssl.SSLContext, authority_pem: str) -> None:
    try:
        context.load_verify_locations(cadata=authority_pem)
    except (ssl.SSLError, ValueError) as error:
        raise AuthError(
            "The certificate of the cluster's authority cannot be read", hint="join the cluster again"
        ) from error


def show_certificate(context: ssl.SSLContext, identity: NodeIdentity, certificate_pem: str) -> None:
    """Present `certificate_pem` in handshakes from now on, also in place of another. OpenSSL reads files only: the key
    stays where it is, the certificate, which is public, is written beside it for a moment."""
    path: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=".certificate.", dir=identity.key_path.parent)
        path = Path(name)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(certificate_pem)
        # A password that is never needed keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(path, identity.key_path, password="")
    except (ssl.SSLError, UnicodeEncodeError) as error:
        raise AuthError(
            f"The certificate of node {identity.node_id} does not fit its key", hint="join the cluster again"
        ) from error
    except OSError as error:
        raise SourceError(
            f"The key of node {identity.node_id} cannot be used: {error.strerror or error}",
            hint=f"check {identity.key_path} and who may write to its folder",
        ) from error
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()

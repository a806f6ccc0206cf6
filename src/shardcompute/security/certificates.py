"""Certificates of a cluster, read: who a peer is, when to renew, the authority's fingerprint.

`peer_from_certificate` says what a certificate claims and that the claim fits its key. Whether the cluster's
authority signed it is for the TLS handshake to check, before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID

from shardcompute.core.errors import AuthError, ForbiddenError
from shardcompute.security.names import Role, node_id_of, parse_node_uri
from shardcompute.security.revocations import Revocations


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a certificate of the cluster says about its owner."""

    node_id: str
    roles: frozenset[Role]
    cluster: str
    public_key: bytes
    serial: str
    expires_at_s: float


def peer_from_certificate(certificate: x509.Certificate) -> PeerIdentity:
    """The owner of a node's certificate; `AuthError` if it names nobody, or an id of another key."""
    try:
        key = certificate.public_key()
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise _not_a_node(str(error)) from error
    if not isinstance(key, Ed25519PublicKey) or len(names) != 1 or len(uris) != 1:
        raise _not_a_node("it does not have one name, one address and an Ed25519 key")
    cluster, node_id, roles = parse_node_uri(uris[0])
    public = key.public_bytes_raw()
    if names[0].value != node_id or node_id_of(public) != node_id:
        raise _not_a_node(f"it names {node_id} but its key belongs to {node_id_of(public)}")
    return PeerIdentity(
        node_id=node_id,
        roles=roles,
        cluster=cluster,
        public_key=public,
        serial=serial_of(certificate),
        expires_at_s=certificate.not_valid_after_utc.timestamp(),
    )


def read_peer(der: bytes | None) -> PeerIdentity:
    """The owner of the certificate that a handshake has verified; `AuthError` if there is none."""
    if der is None:
        raise _not_a_node("the peer showed none")
    try:
        certificate = x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise _not_a_node(str(error)) from error
    return peer_from_certificate(certificate)


def check_peer(
    peer: PeerIdentity,
    *,
    cluster: str,
    revocations: Revocations,
    role: Role | None = None,
    node_id: str | None = None,
    now_s: float | None = None,
) -> None:
    """Raises unless `peer` is of this cluster, not revoked, and the one (`role`, `node_id`) that is wanted.

    The handshake has checked the dates; pass `now_s` to check them again on a link that has been open long.
    """
    if peer.cluster != cluster:
        raise AuthError(
            f"The peer belongs to the cluster {peer.cluster}, not to {cluster}",
            hint="join both nodes to one cluster",
        )
    if revocations.covers(peer.node_id):
        raise ForbiddenError(
            f"Node {peer.node_id} has been removed from the cluster",
            hint="to let the machine back in, delete its node.key and join it with a new token",
        )
    if now_s is not None and now_s >= peer.expires_at_s:
        raise AuthError(
            f"The certificate of node {peer.node_id} has run out", hint="join the node with a new token"
        )
    if node_id is not None and peer.node_id != node_id:
        raise AuthError(
            f"Node {peer.node_id} answered where {node_id} was expected",
            hint="the address may have passed to another machine; try again after it has reconnected",
        )
    if role is not None and role not in peer.roles:
        raise ForbiddenError(
            f"Node {peer.node_id} may not act as {role}", hint=f"join it with a token for the role {role}"
        )


def needs_renewal(certificate_pem: str, now_s: float) -> bool:
    """Whether two thirds of the certificate's life are over (or it has run out)."""
    certificate = parse_certificate(certificate_pem)
    start_s = certificate.not_valid_before_utc.timestamp()
    stop_s = certificate.not_valid_after_utc.timestamp()
    return now_s >= start_s + (stop_s - start_s) * 2 / 3


def fingerprint_of(certificate_der: bytes) -> str:
    """SHA-256 of a certificate, in hexadecimal."""
    return hashlib.sha256(certificate_der).hexdigest()


def parse_certificate(pem: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise AuthError("This is not a certificate in PEM form", hint="join the cluster again") from error


def certificate_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def certificate_der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def serial_of(certificate: x509.Certificate) -> str:
    return f"{certificate.serial_number:x}"


def utc(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)


def _not_a_node(reason: str) -> AuthError:
    return AuthError(
        f"The certificate is not one of a ShardCompute node: {reason}",
        hint="check that the address belongs to a node of your cluster",
    )

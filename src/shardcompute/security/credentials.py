"""Credentials that a node keeps after joining: its certificate and the cluster's authority, one file beside its key."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from shardcompute.core.errors import AuthError, SourceError
from shardcompute.security.certificates import PeerIdentity, parse_certificate, peer_from_certificate
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.private_files import read_private, replace_private
from shardcompute.security.tls import client_context, server_context, show_certificate

CREDENTIALS_FILE = "certificate.pem"
_END = "-----END CERTIFICATE-----\n"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A node's identity with its certificate in one cluster."""

    identity: NodeIdentity
    certificate_pem: str
    authority_pem: str

    def __post_init__(self) -> None:
        if self.own.node_id != self.identity.node_id:
            raise AuthError(
                f"The certificate belongs to {self.own.node_id}, not to this node {self.identity.node_id}",
                hint="join the cluster again",
            )

    @property
    def own(self) -> PeerIdentity:
        """How the other nodes see this one."""
        return peer_from_certificate(parse_certificate(self.certificate_pem))

    def save(self) -> None:
        """Keeps the certificates beside the key, in place of older ones."""
        content = self.certificate_pem + self.authority_pem
        replace_private(self.identity.key_path.with_name(CREDENTIALS_FILE), content.encode("ascii"))

    @classmethod
    def load(cls, identity: NodeIdentity) -> Credentials | None:
        """The certificates kept beside the key, or None if this node has not joined."""
        path = identity.key_path.with_name(CREDENTIALS_FILE)
        try:
            content = read_private(path).decode("ascii")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            content = ""
        parts = [part + _END for part in content.split(_END)[:-1]]
        try:
            certificate_pem, authority_pem = parts
            parse_certificate(authority_pem)
            return cls(identity, certificate_pem, authority_pem)
        except (ValueError, AuthError) as error:
            raise SourceError(
                f"{path} is damaged or belongs to another node", hint="delete it and join the cluster again"
            ) from error

    def server_context(self) -> ssl.SSLContext:
        return server_context(self.identity, self.certificate_pem, self.authority_pem)

    def show_in(self, context: ssl.SSLContext) -> None:
        """Show this certificate in every handshake of a context that is in use."""
        show_certificate(context, self.identity, self.certificate_pem)

    def client_context(self) -> ssl.SSLContext:
        return client_context(self.identity, self.certificate_pem, self.authority_pem)

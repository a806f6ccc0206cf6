"""Node identity: an Ed25519 key that is made on first use and never leaves its folder.

    identity = NodeIdentity.open(folder)        # loads node.key, or makes it
    signature = identity.sign(b"receipt")
    verify_signature(identity.public_key, signature, b"receipt")

Deleting `node.key` makes a new node: it has to join again, under another id.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import NameOID

from shardcompute.core.errors import SourceError
from shardcompute.security.names import node_id_of
from shardcompute.security.private_files import create_private, read_private

KEY_FILE = "node.key"

# The same key signs TLS handshakes and certificate requests. Neither begins with these bytes, so a text that
# a stranger had signed can never pass for one of them.
_SIGNING_CONTEXT = b"shardcompute signature v1\x00"


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A node's key pair and the id that follows from it. Its repr shows no private part."""

    node_id: str
    public_key: bytes
    key_path: Path
    private_key: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path) -> NodeIdentity:
        """The identity kept in `folder`, made now if there is none."""
        try:
            return cls.load(folder)
        except FileNotFoundError:
            pass
        # If another process is first, its key is the node's.
        with contextlib.suppress(FileExistsError):
            create_private(folder / KEY_FILE, private_key_pem(Ed25519PrivateKey.generate()))
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> NodeIdentity:
        """The identity kept in `folder`; `FileNotFoundError` if there is none, `SourceError` if damaged."""
        path = folder / KEY_FILE
        key = parse_private_key(read_private(path), path)
        public = key.public_key().public_bytes_raw()
        return cls(node_id=node_id_of(public), public_key=public, key_path=path, private_key=key)

    def sign(self, message: bytes) -> bytes:
        """A 64-byte signature that `verify_signature` accepts for this message and key alone."""
        return self.private_key.sign(_SIGNING_CONTEXT + message)

    def certificate_request(self) -> str:
        """A PEM request for a certificate, whose signature proves that this node holds its key."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.node_id)])
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self.private_key, None)
        return request.public_bytes(serialization.Encoding.PEM).decode()


def verify_signature(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` was made by `NodeIdentity.sign` with this key over this message."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _SIGNING_CONTEXT + message)
    except (InvalidSignature, ValueError):
        return False
    return True


def private_key_pem(key: PrivateKeyTypes) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def parse_private_key(pem: bytes, path: Path) -> Ed25519PrivateKey:
    """The Ed25519 key in `pem`; `SourceError` naming `path` (never the content) if it holds none."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _damaged(path) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _damaged(path)
    return key


def _damaged(path: Path) -> SourceError:
    return SourceError(
        f"{path} is damaged: it does not hold an Ed25519 private key",
        hint="restore the file from a copy, or delete it and join the cluster again as a new node",
    )

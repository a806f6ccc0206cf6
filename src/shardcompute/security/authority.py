"""The cluster's own certificate authority: an Ed25519 root that lives with the coordinator.

    authority = ClusterAuthority.create(folder, "home", now_s=time.time())
    pem = authority.issue(request_pem, node_id=…, roles={Role.WORKER}, now_s=time.time())

Key and certificate are one file, so that they cannot be out of step. The root is valid for ten years and is
not rolled over: after that, or if its key leaks, a new cluster has to be made. It can sign nodes only, no
further authorities.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shardcompute.core.errors import AuthError, ForbiddenError, SourceError, UsageError
from shardcompute.security.certificates import (
    certificate_der,
    certificate_pem,
    fingerprint_of,
    parse_certificate,
    utc,
)
from shardcompute.security.identity import parse_private_key, private_key_pem
from shardcompute.security.names import Role, check_cluster_name, node_id_of, node_uri
from shardcompute.security.private_files import create_private, read_private
from shardcompute.security.revocations import Revocations

AUTHORITY_FILE = "authority.pem"
NODE_DAYS = 90
_ROOT_DAYS = 3650
# Clocks of home machines differ; a certificate must be good the moment it arrives.
_CLOCK_SKEW = timedelta(hours=1)
_MAX_REQUEST_CHARACTERS = 16_384
_MAX_ADDRESSES = 16
_HOST_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*", re.IGNORECASE)
_SIGNING_CONTEXT = b"shardcompute authority v1\x00"
_NO_REVOCATIONS = Revocations()


@dataclass(frozen=True, slots=True)
class ClusterAuthority:
    """The root that every node of one cluster trusts, and no other node of any other."""

    name: str
    certificate: x509.Certificate
    private_key: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def create(cls, folder: Path, name: str, *, now_s: float) -> ClusterAuthority:
        """Makes a new authority; `UsageError` if `folder` holds one, whose loss would cut off every node."""
        key = Ed25519PrivateKey.generate()
        certificate = _self_signed(key, check_cluster_name(name), now_s)
        path = folder / AUTHORITY_FILE
        try:
            create_private(path, private_key_pem(key) + certificate_pem(certificate).encode())
        except FileExistsError as error:
            raise UsageError(
                f"{path} exists: this folder has a cluster already",
                hint="use that cluster, or choose another folder",
            ) from error
        return cls(name, certificate, key)

    @classmethod
    def load(cls, folder: Path) -> ClusterAuthority:
        """The authority in `folder`; `FileNotFoundError` if there is none, `SourceError` if damaged."""
        path = folder / AUTHORITY_FILE
        content = read_private(path)
        key = parse_private_key(content, path)
        try:
            certificate = x509.load_pem_x509_certificate(content)
            certificate.verify_directly_issued_by(certificate)
            name = str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
            check_cluster_name(name)
        except (ValueError, TypeError, IndexError, InvalidSignature, UsageError) as error:
            raise _damaged(path, "its certificate cannot be used") from error
        if certificate.public_key() != key.public_key():
            raise _damaged(path, "its key and its certificate do not belong together")
        return cls(name, certificate, key)

    @property
    def certificate_pem(self) -> str:
        return certificate_pem(self.certificate)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the root certificate in hexadecimal: what a join token pins."""
        return fingerprint_of(certificate_der(self.certificate))

    @property
    def expires_at_s(self) -> float:
        return self.certificate.not_valid_after_utc.timestamp()

    def sign(self, message: bytes) -> bytes:
        """For `is_signed_by_authority`. Messages begin with what they are, so that none can be taken for a
        certificate."""
        return self.private_key.sign(_SIGNING_CONTEXT + message)

    def issue(
        self,
        request_pem: str,
        *,
        node_id: str,
        roles: Collection[Role],
        now_s: float,
        days: float = NODE_DAYS,
        addresses: Sequence[str] = (),
        revocations: Revocations = _NO_REVOCATIONS,
    ) -> str:
        """A certificate (PEM) for the holder of the request's key, who must be `node_id`.

        `addresses` are host names and IP addresses that *the caller* vouches for. Issue only to someone
        whose join token or present certificate has been checked: this proves the key, not the permission.
        """
        if not roles or days <= 0:
            raise UsageError("A certificate needs a role and a time", hint="pass at least one of each")
        public_key = _proven_key(request_pem, node_id)
        if node_id in revocations.node_ids:
            raise ForbiddenError(
                f"Node {node_id} has been removed from the cluster",
                hint="to let the machine back in, delete its node.key and join it with a new token",
            )
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(node_uri(self.name, node_id, frozenset(roles))),
            *_general_names(addresses),
        ]
        return certificate_pem(self._sign(public_key, node_id, names, now_s, days))

    def _sign(
        self, key: Ed25519PublicKey, node_id: str, names: list[x509.GeneralName], now_s: float, days: float
    ) -> x509.Certificate:
        root = self.certificate
        skew = min(_CLOCK_SKEW, timedelta(days=days) / 3)
        start = max(utc(now_s) - skew, root.not_valid_before_utc)
        stop = min(utc(now_s) + timedelta(days=days), root.not_valid_after_utc)
        if stop <= start:
            raise AuthError(
                f"The authority of cluster {self.name} has run out, or the clock is wrong",
                hint="check this machine's clock; if it is right, make a new cluster and join again",
            )
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.private_key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(_name(node_id))
            .issuer_name(root.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(stop)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.private_key, None)
        )


def is_signed_by_authority(authority_pem: str, signature: bytes, message: bytes) -> bool:
    """Whether the authority of this certificate signed the message with `ClusterAuthority.sign`."""
    try:
        _key_of(authority_pem).verify(signature, _SIGNING_CONTEXT + message)
    except (InvalidSignature, ValueError, AuthError):
        return False
    return True


@lru_cache(maxsize=8)
def _key_of(authority_pem: str) -> Ed25519PublicKey:
    key = parse_certificate(authority_pem).public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise AuthError("this certificate is of no authority of ours", hint="ask for another one")
    return key


def _proven_key(request_pem: str, node_id: str) -> Ed25519PublicKey:
    """The request's key: its owner signed the request, and `node_id` is that key's own id."""
    hint = "run the same version of ShardCompute on all nodes"
    if len(request_pem) > _MAX_REQUEST_CHARACTERS:
        raise UsageError("The request for a certificate is too long", hint=hint)
    try:
        request = x509.load_pem_x509_csr(request_pem.encode())
        key = request.public_key()
        is_signed = request.is_signature_valid
        names = [name.value for name in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"The request for a certificate cannot be read: {error}", hint=hint) from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError("The request for a certificate is not for an Ed25519 key", hint=hint)
    if not is_signed:
        raise AuthError("The request for a certificate is not signed by the key it names", hint="join again")
    actual = node_id_of(key.public_bytes_raw())
    if actual != node_id or names != [node_id]:
        raise AuthError(
            f"A node asks for a certificate as {node_id[:40]!r}, but its key belongs to {actual}",
            hint="every node keeps its own node.key; do not copy a node's folder to another machine",
        )
    return key


def _self_signed(key: Ed25519PrivateKey, name: str, now_s: float) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc(now_s) - _CLOCK_SKEW)
        .not_valid_after(utc(now_s) + timedelta(days=_ROOT_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_names(addresses: Sequence[str]) -> list[x509.GeneralName]:
    if len(addresses) > _MAX_ADDRESSES:
        raise UsageError(
            f"A certificate for {len(addresses)} addresses", hint=f"pass at most {_MAX_ADDRESSES} addresses"
        )
    return [_general_name(address) for address in addresses]


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        pass
    if len(address) > 253 or not _HOST.fullmatch(address):
        raise UsageError(
            f"{address[:80]!r} is neither a host name nor an IP address", hint="leave the port out"
        )
    return x509.DNSName(address)


def _damaged(path: Path, reason: str) -> SourceError:
    return SourceError(
        f"{path} is damaged: {reason}",
        hint="restore it from a copy; without it a new cluster has to be made and joined",
    )

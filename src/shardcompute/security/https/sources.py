"""Sources of a server's certificate: files of the operator, or a key of our own with a certificate that is made anew in
time.

`read` is asked again and again while the server runs; what it raises says what is wrong with what is there now.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shardcompute.core.errors import SourceError
from shardcompute.security.certificates import (
    certificate_der,
    certificate_pem,
    fingerprint_of,
    needs_renewal,
    utc,
)
from shardcompute.security.private_files import open_private_folder, read_private, replace_private

CERTIFICATE_FILE = "certificate.pem"
KEY_FILE = "key.pem"
PIN_PREFIX = "sha256//"
_MADE_DAYS = 365.0
_MOST_BYTES = 1 << 20
_MOST_NAMES = 64
# Clocks of clients differ from the server's.
_CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class KeyedCertificate:
    """A certificate, those of its issuers after it, and its key; they belong together."""

    chain: tuple[x509.Certificate, ...]
    key_pem: bytes = field(repr=False)

    @property
    def own(self) -> x509.Certificate:
        return self.chain[0]

    @property
    def own_pem(self) -> str:
        return certificate_pem(self.own)

    @property
    def chain_pem(self) -> str:
        return "".join(certificate_pem(each) for each in self.chain)

    @property
    def pin(self) -> str:
        """Its public key as curl's `--pinnedpubkey` has it: the same as long as the key is."""
        return pin_of(self.own)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, as browsers show it."""
        return fingerprint_of(certificate_der(self.own))

    @property
    def expires_at_s(self) -> float:
        return self.own.not_valid_after_utc.timestamp()


class CertificateSource(Protocol):
    def read(self, now_s: float) -> KeyedCertificate:
        """What to show now; SourceError where that cannot be used."""
        ...


@dataclass(frozen=True, slots=True)
class OperatorFiles:
    """PEM files that somebody else keeps up to date: the server's certificate, perhaps with those of its issuers after
    it, and its key (in the same file where `key` is None)."""

    certificate: Path
    key: Path | None = None

    def read(self, now_s: float) -> KeyedCertificate:
        content = _read(self.certificate)
        key_path = self.key or self.certificate
        chain = _parse_chain(content, self.certificate)
        key = _parse_key(content if self.key is None else _read(self.key), key_path)
        if key.public_key() != chain[0].public_key():
            raise SourceError(
                f"the key in {key_path} does not belong to the first certificate in {self.certificate}",
                hint="give the key that it was made for, and put the server's own certificate first",
            )
        _check_dates(chain[0], self.certificate, now_s)
        return KeyedCertificate(chain, _key_pem(key))


@dataclass(frozen=True, slots=True)
class MadeCertificate:
    """Self-signed, in a folder of its own. The key stays, so that clients that know it go on knowing the server; the
    certificate is made anew when two thirds of its life are over, or when `names` are not those that it has."""

    folder: Path
    names: Callable[[], Iterable[str]]
    """Host names and addresses by which clients call the server; what is neither is left out."""

    def read(self, now_s: float) -> KeyedCertificate:
        open_private_folder(self.folder)
        key = self._key()
        names = general_names(self.names())
        kept = self._kept(key)
        if kept is None or needs_renewal(certificate_pem(kept), now_s) or not _covers(kept, names):
            kept = _self_signed(key, names, now_s)
            replace_private(self.folder / CERTIFICATE_FILE, certificate_pem(kept).encode())
        return KeyedCertificate((kept,), _key_pem(key))

    def _key(self) -> ec.EllipticCurvePrivateKey:
        path = self.folder / KEY_FILE
        try:
            key = _parse_key(read_private(path), path)
        except FileNotFoundError:
            # Browsers take no Ed25519.
            made = ec.generate_private_key(ec.SECP256R1())
            replace_private(path, _key_pem(made))
            return made
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SourceError(f"{path} holds another kind of key", hint="delete it; a new one is made")
        return key

    def _kept(self, key: ec.EllipticCurvePrivateKey) -> x509.Certificate | None:
        with contextlib.suppress(FileNotFoundError, ValueError, UnsupportedAlgorithm):
            kept = x509.load_pem_x509_certificate(read_private(self.folder / CERTIFICATE_FILE))
            if kept.public_key() == key.public_key():
                return kept
        return None


def pin_of(certificate: x509.Certificate) -> str:
    public = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return PIN_PREFIX + base64.b64encode(hashlib.sha256(public).digest()).decode()


def general_names(names: Iterable[str]) -> list[x509.GeneralName]:
    """Those of a certificate, in order and once each; patterns such as `*` alone and unreadable names are left out."""
    found: dict[x509.GeneralName, None] = {}
    for name in names:
        text = name.strip().strip("[]").lower().removesuffix(".")
        with contextlib.suppress(ValueError):
            found[x509.IPAddress(ipaddress.ip_address(text))] = None
            continue
        labels = text.removeprefix("*.").split(".")
        if len(text) <= 253 and all(_is_label(label) for label in labels):
            found[x509.DNSName(text)] = None
    return list(found)[:_MOST_NAMES]


def _is_label(label: str) -> bool:
    inner = label.replace("-", "").replace("_", "")
    return 0 < len(label) <= 63 and inner.isascii() and inner.isalnum() and label.strip("-") == label


def _self_signed(
    key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName], now_s: float
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ShardCompute HTTP API")])
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc(now_s) - _CLOCK_SKEW)
        .not_valid_after(utc(now_s) + timedelta(days=_MADE_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _covers(certificate: x509.Certificate, names: list[x509.GeneralName]) -> bool:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return False
    return set(names) <= set(extension.value)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read: {error.strerror or error}",
            hint="--tls-cert and --tls-key name PEM files that this user can read",
        ) from error
    if len(content) > _MOST_BYTES:
        raise SourceError(f"{path} is too large for a certificate or key", hint="name a PEM file")
    return content


def _parse_chain(content: bytes, path: Path) -> tuple[x509.Certificate, ...]:
    try:
        return tuple(x509.load_pem_x509_certificates(content))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SourceError(
            f"{path} holds no certificate in PEM form",
            hint="it begins with -----BEGIN CERTIFICATE-----; openssl x509 -inform der makes one of DER",
        ) from error


def _parse_key(content: bytes, path: Path) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(content, password=None)
    except TypeError as error:
        raise SourceError(
            f"the key in {path} is protected by a passphrase",
            hint="a server starts unattended: openssl pkey writes it without one; keep that file to yourself",
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SourceError(
            f"{path} holds no private key in PEM form", hint="it begins with -----BEGIN PRIVATE KEY-----"
        ) from error


def _check_dates(certificate: x509.Certificate, path: Path, now_s: float) -> None:
    now = utc(now_s)
    if now >= certificate.not_valid_after_utc:
        raise SourceError(
            f"the certificate in {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC",
            hint="renew it, or check this machine's clock",
        )
    if now < certificate.not_valid_before_utc - _CLOCK_SKEW:
        raise SourceError(
            f"the certificate in {path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC",
            hint="check this machine's clock",
        )


def _key_pem(key: PrivateKeyTypes) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

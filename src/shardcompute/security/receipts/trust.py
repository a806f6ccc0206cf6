"""Whom a verifier trusts: a cluster's authority, from a file of its own or by its fingerprint."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from shardcompute.core.errors import AuthError, SourceError, UsageError
from shardcompute.security.certificates import (
    certificate_der,
    certificate_pem,
    fingerprint_of,
    parse_certificate,
)
from shardcompute.security.receipts.records import Receipt
from shardcompute.security.receipts.verification import ReceiptError

_MOST_BYTES = 1 << 16


def read_authority(content: bytes, name: str) -> str:
    """The authority's certificate (PEM) in a file: `authority.pem` of a coordinator, or the `certificate.pem` of any
    member, which has it beside its own. SourceError where there is none."""
    try:
        found = x509.load_pem_x509_certificates(content[:_MOST_BYTES])
        for certificate in found:
            if certificate.issuer == certificate.subject:
                certificate.verify_directly_issued_by(certificate)
                return certificate_pem(certificate)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise _none_in(name) from error
    raise _none_in(name)


def authority_by_fingerprint(receipt: Receipt, fingerprint: str) -> str:
    """The authority that a receipt has with it, where it is the one of this fingerprint. UsageError for what can be no
    fingerprint; that it is another's, `verify_receipt` cannot say, so this does."""
    wanted = parse_fingerprint(fingerprint)
    try:
        found = authority_fingerprint(receipt.authority)
    except AuthError as error:
        raise ReceiptError("authority", "this is no certificate") from error
    if found != wanted:
        raise ReceiptError("authority", f"its fingerprint is {found}")
    return receipt.authority


def parse_fingerprint(text: str) -> str:
    """64 digits in lower case; UsageError for what can be no fingerprint."""
    wanted = text.replace(":", "").strip().lower()
    if len(wanted) != 64 or any(each not in "0123456789abcdef" for each in wanted):
        raise UsageError(f"{text[:80]!r} is no SHA-256 fingerprint", hint="give 64 hexadecimal digits")
    return wanted


def authority_fingerprint(authority_pem: str) -> str:
    """AuthError where this is no certificate."""
    return fingerprint_of(certificate_der(parse_certificate(authority_pem)))


def canonical_pem(authority_pem: str) -> str:
    """The same certificate as we write it; AuthError where there is none."""
    return certificate_pem(parse_certificate(authority_pem))


def _none_in(name: str) -> SourceError:
    return SourceError(
        f"{name} has no authority's certificate",
        hint="give the certificate.pem of a member of the cluster, or --fingerprint",
    )

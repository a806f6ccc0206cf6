"""Certificate chains of hardware vendors: leaf, intermediate and one of the roots that the operator has given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256, SHA384

from shardcompute.core.errors import AuthError


def read_certificates(content: str) -> list[x509.Certificate]:
    """All in a PEM text. AuthError where one cannot be read, or there is none."""
    try:
        return x509.load_pem_x509_certificates(content.encode())
    except ValueError as error:
        raise AuthError(f"A certificate of the evidence cannot be read: {error}") from error


def check_chain(
    chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate], now_s: float
) -> x509.Certificate:
    """The leaf, if each certificate is signed by the next, and the last by one of the roots or is one of them. All are
    of their time; all but the leaf may sign others."""
    chain = [each for each in chain if each not in roots]
    if not 1 <= len(chain) <= 3:
        raise AuthError("The evidence comes without its certificates")
    now = datetime.fromtimestamp(now_s, UTC)
    for signed, issuer in itertools.pairwise(chain):
        _check_issued(signed, issuer, now)
    last = chain[-1]
    if not any(_is_issued(last, root, now) for root in roots):
        raise AuthError("The evidence is not signed under any root that this cluster trusts")
    if _may_sign(chain[0]):
        raise AuthError("The key that signed the evidence is one of an authority, not of a machine")
    return chain[0]


def _is_issued(signed: x509.Certificate, root: x509.Certificate, now: datetime) -> bool:
    try:
        _check_issued(signed, root, now)
    except AuthError:
        return False
    return True


def _check_issued(signed: x509.Certificate, issuer: x509.Certificate, now: datetime) -> None:
    for each in (signed, issuer):
        if not each.not_valid_before_utc <= now <= each.not_valid_after_utc:
            raise AuthError("A certificate of the evidence has run out, or is not good yet")
    if signed.issuer != issuer.subject or not _may_sign(issuer):
        raise AuthError("A certificate of the evidence is not issued by the next one")
    try:
        _verify(signed, issuer)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise AuthError("A certificate of the evidence has a wrong signature") from error


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return False


def _verify(signed: x509.Certificate, issuer: x509.Certificate) -> None:
    """RSA-PSS with SHA-384, or ECDSA with SHA-256 or SHA-384: what the two vendors use."""
    key, algorithm = issuer.public_key(), signed.signature_hash_algorithm
    parameters = signed.signature_algorithm_parameters
    if isinstance(key, rsa.RSAPublicKey):
        if not isinstance(parameters, padding.PSS) or not isinstance(algorithm, SHA384):
            raise InvalidSignature
        key.verify(signed.signature, signed.tbs_certificate_bytes, parameters, algorithm)
    elif isinstance(key, ec.EllipticCurvePublicKey):
        if not isinstance(algorithm, SHA256 | SHA384):
            raise InvalidSignature
        key.verify(signed.signature, signed.tbs_certificate_bytes, ec.ECDSA(algorithm))
    else:
        raise InvalidSignature

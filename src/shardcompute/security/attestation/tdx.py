"""Intel TDX quotes of version 4: the guest's report, signed by a key that a quoting enclave vouches for, which the
platform's certificate (PCK) vouches for, under Intel's intermediate and root.

As the Intel TDX DCAP quoting library's documentation has it. What Intel publishes of platforms from day to day (TCB
info, identities, revocations) is not fetched: the operator's rules say which versions and enclaves will do.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from shardcompute.core.errors import AuthError
from shardcompute.security.attestation.chains import check_chain, read_certificates
from shardcompute.security.attestation.evidence import REPORT_DATA_BYTES, Evidence, VerifiedReport

KIND = "tdx"
MEASUREMENT_BYTES = 48
SVN_BYTES = 16
SIGNER_BYTES = 32
HEADER_BYTES = 48
BODY_BYTES = 584
SIGNED_BYTES = HEADER_BYTES + BODY_BYTES
QE_REPORT_BYTES = 384
_VERSION = 4
_ECDSA_P256 = 2
_TDX = 0x81
_INTEL = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
_QE_DATA, _PEM_CHAIN = 6, 5
_SIGNATURE_BYTES = 64
_DEBUG_BITS = 0xFF
"""Of a guest's attributes: a guest with any of them is under test, and its memory can be read."""
_QE_DEBUG = 1 << 1
_PLATFORM = x509.ObjectIdentifier("1.2.840.113741.1.13.1")
"""What Intel says of a platform in its certificate; others of Intel's certificates have no such extension."""


@dataclass(frozen=True, slots=True)
class TdxRules:
    """What an operator asks of a quote: one of these measurements (MRTD), quoted by an enclave of one of these signers,
    module and enclave no older than these, under one of these roots."""

    roots: tuple[x509.Certificate, ...]
    measurements: frozenset[bytes]
    minimum_svn: bytes
    qe_signers: frozenset[bytes]
    minimum_qe_svn: int = 0


@dataclass(frozen=True, slots=True)
class TdxQuote:
    """The parts of a quote that are judged."""

    signed: bytes
    signature: bytes
    attestation_key: bytes
    qe_report: bytes
    qe_signature: bytes
    qe_data: bytes
    chain: str

    @property
    def body(self) -> bytes:
        return self.signed[HEADER_BYTES:]

    @property
    def svn(self) -> bytes:
        return self.body[:SVN_BYTES]

    @property
    def module_signer(self) -> bytes:
        return self.body[64:112]

    @property
    def module_attributes(self) -> bytes:
        return self.body[112:120]

    @property
    def attributes(self) -> int:
        return int.from_bytes(self.body[120:128], "little")

    @property
    def measurement(self) -> bytes:
        return self.body[136 : 136 + MEASUREMENT_BYTES]

    @property
    def report_data(self) -> bytes:
        return self.body[520 : 520 + REPORT_DATA_BYTES]


class _QuoteReader:
    """Takes a content apart from its beginning. AuthError where it is too short."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._place = 0

    def take(self, size: int) -> bytes:
        if size > len(self._content) - self._place:
            raise AuthError("The TDX quote is cut short")
        self._place += size
        return self._content[self._place - size : self._place]

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def end(self) -> None:
        if any(self._content[self._place :]):
            raise AuthError("The TDX quote has something behind its end")


def parse_quote(content: bytes) -> TdxQuote:
    """AuthError where it is not a quote of this kind."""
    reader = _QuoteReader(content)
    signed = reader.take(SIGNED_BYTES)
    version, key_type, tee = struct.unpack_from("<HHI", signed, 0)
    if (version, key_type, tee) != (_VERSION, _ECDSA_P256, _TDX) or signed[12:28] != _INTEL:
        raise AuthError("This is no TDX quote of version 4 by Intel's quoting enclave, with ECDSA and P-256")
    data = _QuoteReader(reader.take(reader.number("<I")))
    reader.end()
    signature, key = data.take(_SIGNATURE_BYTES), data.take(_SIGNATURE_BYTES)
    if data.number("<H") != _QE_DATA:
        raise AuthError("The TDX quote says nothing of the enclave that signed it")
    inner = _QuoteReader(data.take(data.number("<I")))
    data.end()
    report, report_signature = inner.take(QE_REPORT_BYTES), inner.take(_SIGNATURE_BYTES)
    qe_data = inner.take(inner.number("<H"))
    if inner.number("<H") != _PEM_CHAIN:
        raise AuthError("The TDX quote does not bring the certificates of its platform along")
    chain = inner.take(inner.number("<I"))
    inner.end()
    try:
        text = chain.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise AuthError("The certificates of the TDX quote cannot be read") from error
    return TdxQuote(signed, signature, key, report, report_signature, qe_data, text)


def verify_tdx(evidence: Evidence, report_data: bytes, rules: TdxRules, now_s: float) -> VerifiedReport:
    """AuthError with what does not fit."""
    quote = parse_quote(evidence.report)
    if evidence.certificates:
        raise AuthError("A TDX quote brings its certificates along, and needs no others")
    platform = check_chain(read_certificates(quote.chain), rules.roots, now_s)
    _check_signature(_platform_key(platform), quote.qe_signature, quote.qe_report, "enclave")
    _check_enclave(quote, rules)
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), b"\x04" + quote.attestation_key)
    except ValueError as error:
        raise AuthError("The TDX quote's key is none") from error
    _check_signature(key, quote.signature, quote.signed, "guest")
    _check_rules(quote, report_data, rules)
    return VerifiedReport(KIND, quote.measurement.hex())


def _check_enclave(quote: TdxQuote, rules: TdxRules) -> None:
    """The quoting enclave vouches for the key, and is one that will do."""
    report = quote.qe_report
    vouched = hashlib.sha256(quote.attestation_key + quote.qe_data).digest() + bytes(32)
    if report[320:384] != vouched:
        raise AuthError("The TDX quote's key is not that of its enclave")
    if int.from_bytes(report[48:56], "little") & _QE_DEBUG:
        raise AuthError("The TDX quote's enclave may be debugged")
    if report[128:160] not in rules.qe_signers:
        raise AuthError(
            f"The TDX quote's enclave is signed by {report[128:160].hex()}, who is not on the list"
        )
    if int.from_bytes(report[258:260], "little") < rules.minimum_qe_svn:
        raise AuthError("The TDX quote's enclave is too old")


def _check_rules(quote: TdxQuote, report_data: bytes, rules: TdxRules) -> None:
    if quote.report_data != report_data:
        raise AuthError("The TDX quote is not about this node's key")
    if quote.attributes & _DEBUG_BITS:
        raise AuthError("The TDX guest may be debugged: whoever runs the machine can read its memory")
    if any(quote.module_signer) or any(quote.module_attributes):
        raise AuthError("The TDX module is not Intel's, or is under test")
    if quote.measurement not in rules.measurements:
        raise AuthError(f"The TDX guest's measurement {quote.measurement.hex()} is not on the list")
    if any(have < least for have, least in zip(quote.svn, rules.minimum_svn, strict=True)):
        raise AuthError(f"The TDX module is too old: {quote.svn.hex()}")


def _platform_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    try:
        certificate.extensions.get_extension_for_oid(_PLATFORM)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError) as error:
        raise AuthError("The TDX quote's enclave is not signed for by a platform (PCK)") from error
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise AuthError("The platform's certificate of the TDX quote has no key of P-256")
    return key


def _check_signature(key: ec.EllipticCurvePublicKey, signature: bytes, signed: bytes, whose: str) -> None:
    r, s = (int.from_bytes(part, "big") for part in (signature[:32], signature[32:]))
    try:
        key.verify(encode_dss_signature(r, s), signed, ec.ECDSA(SHA256()))
    except (InvalidSignature, ValueError) as error:
        raise AuthError(f"The TDX quote's {whose} report has a wrong signature") from error

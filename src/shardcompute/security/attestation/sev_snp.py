"""AMD SEV-SNP attestation reports (1184 bytes), signed by the chip's own key (VCEK), that by ASK, that by ARK.

As the SEV Secure Nested Paging Firmware ABI Specification has it, for chips of the families 17h and 19h (Milan, Genoa
and their kin), whose security version lies in bytes 0, 1, 6 and 7; later ones have another layout and are refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from shardcompute.core.errors import AuthError
from shardcompute.security.attestation.chains import check_chain, read_certificates
from shardcompute.security.attestation.evidence import REPORT_DATA_BYTES, Evidence, VerifiedReport

KIND = "sev-snp"
REPORT_BYTES = 1184
SIGNED_BYTES = 0x2A0
MEASUREMENT_BYTES = 48
_VERSIONS = range(2, 6)
_ECDSA_P384_SHA384 = 1
_DEBUG = 1 << 19
_MIGRATION = 1 << 18
_POLICY_ONE = 1 << 17
_SIGNING_KEY = 0b11100
_COORDINATE_BYTES = 72
_FAMILIES = (0x17, 0x19)
_SPL = "1.3.6.1.4.1.3704.1.3."
_SPLS = {"bootloader": _SPL + "1", "tee": _SPL + "2", "snp": _SPL + "3", "microcode": _SPL + "8"}
_CHIP_ID = x509.ObjectIdentifier("1.3.6.1.4.1.3704.1.4")
_DER_INTEGER = 2


@dataclass(frozen=True, slots=True)
class SecurityVersion:
    """What AMD calls TCB version: the versions of the parts that can be updated."""

    bootloader: int = 0
    tee: int = 0
    snp: int = 0
    microcode: int = 0

    @classmethod
    def read(cls, content: bytes) -> SecurityVersion:
        return cls(content[0], content[1], content[6], content[7])

    def is_at_least(self, other: SecurityVersion) -> bool:
        return (
            self.bootloader >= other.bootloader
            and self.tee >= other.tee
            and self.snp >= other.snp
            and self.microcode >= other.microcode
        )


@dataclass(frozen=True, slots=True)
class SnpReport:
    """The fields that are judged."""

    guest_policy: int
    reported: SecurityVersion
    report_data: bytes
    measurement: bytes
    chip_id: bytes
    is_chip_key: bool
    vmpl: int
    signature: tuple[int, int]
    signed: bytes


@dataclass(frozen=True, slots=True)
class SnpRules:
    """What an operator asks of a report: one of these measurements, no older a version, under one of these roots."""

    roots: tuple[x509.Certificate, ...]
    measurements: frozenset[bytes]
    minimum: SecurityVersion
    highest_vmpl: int = 0


def parse_report(content: bytes) -> SnpReport:
    """AuthError where it is not a report of this kind."""
    if len(content) != REPORT_BYTES:
        raise AuthError(f"A SEV-SNP report has {REPORT_BYTES} bytes, and this has {len(content)}")
    version, _, policy = struct.unpack_from("<IIQ", content, 0)
    vmpl, algorithm = struct.unpack_from("<II", content, 0x30)
    (flags,) = struct.unpack_from("<I", content, 0x48)
    if version not in _VERSIONS:
        raise AuthError(f"SEV-SNP reports of version {version} are not known here")
    if algorithm != _ECDSA_P384_SHA384:
        raise AuthError("The SEV-SNP report is signed in another way than ECDSA with P-384")
    if version > 2 and content[0x188] not in _FAMILIES:
        raise AuthError(f"SEV-SNP reports of processors of family {content[0x188]:#x} are not known here")
    if any(content[SIGNED_BYTES + 2 * _COORDINATE_BYTES :]):
        raise AuthError("The SEV-SNP report has something behind its signature")
    parts = (
        content[SIGNED_BYTES + at : SIGNED_BYTES + at + _COORDINATE_BYTES] for at in (0, _COORDINATE_BYTES)
    )
    r, s = (int.from_bytes(part, "little") for part in parts)
    return SnpReport(
        guest_policy=policy,
        reported=SecurityVersion.read(content[0x180:0x188]),
        report_data=content[0x50 : 0x50 + REPORT_DATA_BYTES],
        measurement=content[0x90 : 0x90 + MEASUREMENT_BYTES],
        chip_id=content[0x1A0:0x1E0],
        is_chip_key=flags & _SIGNING_KEY == 0,
        vmpl=vmpl,
        signature=(r, s),
        signed=content[:SIGNED_BYTES],
    )


def verify_snp(evidence: Evidence, report_data: bytes, rules: SnpRules, now_s: float) -> VerifiedReport:
    """AuthError with what does not fit."""
    report = parse_report(evidence.report)
    chain = [each for text in evidence.certificates for each in read_certificates(text)]
    chip = check_chain(chain, rules.roots, now_s)
    _check_chip(report, chip)
    key = chip.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise AuthError("The key of the SEV-SNP report is not one of P-384")
    try:
        key.verify(encode_dss_signature(*report.signature), report.signed, ec.ECDSA(SHA384()))
    except (InvalidSignature, ValueError) as error:
        raise AuthError("The SEV-SNP report has a wrong signature") from error
    _check_rules(report, report_data, rules)
    return VerifiedReport(KIND, report.measurement.hex())


def _check_rules(report: SnpReport, report_data: bytes, rules: SnpRules) -> None:
    if report.report_data != report_data:
        raise AuthError("The SEV-SNP report is not about this node's key")
    if report.guest_policy & _DEBUG or not report.guest_policy & _POLICY_ONE:
        raise AuthError("The SEV-SNP guest may be debugged: whoever runs the machine can read its memory")
    if report.guest_policy & _MIGRATION:
        raise AuthError("The SEV-SNP guest may be moved by an agent, of which nothing is known here")
    if report.vmpl > rules.highest_vmpl:
        raise AuthError(f"The SEV-SNP report was asked for from VMPL {report.vmpl}")
    if report.measurement not in rules.measurements:
        raise AuthError(f"The SEV-SNP guest's measurement {report.measurement.hex()} is not on the list")
    if not report.reported.is_at_least(rules.minimum):
        raise AuthError(f"The SEV-SNP firmware is too old: {report.reported}")


def _check_chip(report: SnpReport, chip: x509.Certificate) -> None:
    """The certificate is of the chip that the report names, at the version that it names."""
    if not report.is_chip_key:
        raise AuthError("The SEV-SNP report is not signed by the chip's own key (VCEK)")
    certified = SecurityVersion(**{name: _integer_extension(chip, oid) for name, oid in _SPLS.items()})
    if certified != report.reported:
        raise AuthError("The SEV-SNP report is of another version than the certificate of its key")
    if _extension(chip, _CHIP_ID) != report.chip_id or not any(report.chip_id):
        raise AuthError("The SEV-SNP report is of another chip than the certificate of its key")


def _extension(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> bytes:
    try:
        value = certificate.extensions.get_extension_for_oid(oid).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError) as error:
        raise AuthError("The certificate of the SEV-SNP report's key is none of a chip (VCEK)") from error
    return value.value if isinstance(value, x509.UnrecognizedExtension) else b""


def _integer_extension(certificate: x509.Certificate, oid: str) -> int:
    content = _extension(certificate, x509.ObjectIdentifier(oid))
    if len(content) < 3 or content[0] != _DER_INTEGER or content[1] != len(content) - 2 or len(content) > 4:
        raise AuthError("The certificate of the SEV-SNP report's key has a version that cannot be read")
    return int.from_bytes(content[2:], "big", signed=True)

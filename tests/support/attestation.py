"""Made-up hardware: roots, chips and platforms of nobody, whose reports are laid out as the vendors say. No such chip
exists, and nothing here has been signed by one."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from shardcompute.security.attestation.evidence import Evidence

NOW = datetime(2026, 6, 1, tzinfo=UTC)
MEASUREMENT = bytes(range(48))
REPORT_DATA = bytes(range(64, 128))
CHIP_ID = bytes(range(100, 164))
SIGNER = bytes(range(32))
_PSS = padding.PSS(padding.MGF1(SHA384()), 48)
Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Signer:
    """A key with its certificate."""

    key: Key
    certificate: x509.Certificate

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()


def issue(
    name: str,
    key: Key,
    by: Signer | None,
    *,
    is_authority: bool = True,
    extensions: Sequence[x509.UnrecognizedExtension] = (),
    until: datetime = NOW + timedelta(days=3650),
) -> Signer:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if by is None else by.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=3650))
        .not_valid_after(until)
    )
    if is_authority:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    signer = key if by is None else by.key
    if isinstance(signer, rsa.RSAPrivateKey):
        return Signer(key, builder.sign(signer, SHA384(), rsa_padding=_PSS))
    return Signer(key, builder.sign(signer, SHA256()))


@functools.cache
def rsa_key(number: int) -> rsa.RSAPrivateKey:
    """Of few bits, for tests: making a real one takes seconds."""
    return rsa.generate_private_key(65537, 2048)


def ec_key(curve: ec.EllipticCurve) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(curve)


def _spl(number: str, value: int) -> x509.UnrecognizedExtension:
    content = bytes([2, 1, value]) if value < 128 else bytes([2, 2, 0, value])
    return x509.UnrecognizedExtension(x509.ObjectIdentifier(f"1.3.6.1.4.1.3704.1.3.{number}"), content)


@dataclass(frozen=True)
class MadeUpChip:
    """An AMD chip of nobody's: its authorities, its key, and the reports that it signs."""

    ark: Signer
    ask: Signer
    vcek: Signer

    def evidence(self, report: bytes) -> Evidence:
        return Evidence("sev-snp", report, [self.vcek.pem, self.ask.pem])


@functools.cache
def chip(
    versions: tuple[int, int, int, int] = (3, 0, 8, 200), chip_id: bytes = CHIP_ID, *, has_ids: bool = True
) -> MadeUpChip:
    ark = issue("ARK-Nowhere", rsa_key(1), None)
    ask = issue("SEV-Nowhere", rsa_key(2), ark)
    numbers = zip("1238", versions, strict=True)
    own = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.3704.1.4"), chip_id)
    extensions = [*(_spl(number, value) for number, value in numbers), own] if has_ids else []
    vcek = issue("SEV-VCEK", ec_key(ec.SECP384R1()), ask, is_authority=False, extensions=extensions)
    return MadeUpChip(ark, ask, vcek)


@dataclass(frozen=True)
class SnpFields:
    version: int = 2
    policy: int = 0x30000
    vmpl: int = 0
    algorithm: int = 1
    flags: int = 0
    tcb: tuple[int, int, int, int] = (3, 0, 8, 200)
    report_data: bytes = REPORT_DATA
    measurement: bytes = MEASUREMENT
    chip_id: bytes = CHIP_ID
    family: int = 0x19


def snp_report(fields: SnpFields, key: Key) -> bytes:
    """Laid out by the numbers of the specification, apart from what reads it."""
    report = bytearray(1184)
    struct.pack_into("<IIQ", report, 0x00, fields.version, 1, fields.policy)
    struct.pack_into("<II", report, 0x30, fields.vmpl, fields.algorithm)
    boot, tee, snp, microcode = fields.tcb
    tcb = bytes([boot, tee, 0, 0, 0, 0, snp, microcode])
    for place in (0x38, 0x180, 0x1E0, 0x1F0):
        report[place : place + 8] = tcb
    struct.pack_into("<I", report, 0x48, fields.flags)
    report[0x50:0x90] = fields.report_data
    report[0x90:0xC0] = fields.measurement
    report[0x188] = fields.family if fields.version > 2 else 0
    report[0x1A0:0x1E0] = fields.chip_id
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = decode_dss_signature(key.sign(bytes(report[:0x2A0]), ec.ECDSA(SHA384())))
    report[0x2A0 : 0x2A0 + 72] = r.to_bytes(72, "little")
    report[0x2E8 : 0x2E8 + 72] = s.to_bytes(72, "little")
    return bytes(report)


@dataclass(frozen=True)
class MadeUpPlatform:
    """An Intel platform of nobody's."""

    root: Signer
    authority: Signer
    pck: Signer
    attestation: ec.EllipticCurvePrivateKey


@functools.cache
def platform(*, is_platform: bool = True) -> MadeUpPlatform:
    root = issue("SGX Root of Nowhere", ec_key(ec.SECP256R1()), None)
    authority = issue("SGX Platform CA of Nowhere", ec_key(ec.SECP256R1()), root)
    told = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.840.113741.1.13.1"), b"\x30\x00")
    extensions = [told] if is_platform else []
    pck = issue("SGX PCK", ec_key(ec.SECP256R1()), authority, is_authority=False, extensions=extensions)
    return MadeUpPlatform(root, authority, pck, ec_key(ec.SECP256R1()))


@dataclass(frozen=True)
class TdxFields:
    version: int = 4
    key_type: int = 2
    tee: int = 0x81
    svn: bytes = bytes([5, 1, 6, *[0] * 13])
    module_signer: bytes = bytes(48)
    attributes: int = 1 << 28
    measurement: bytes = MEASUREMENT
    report_data: bytes = REPORT_DATA
    qe_attributes: int = 0x5
    qe_signer: bytes = SIGNER
    qe_svn: int = 4
    qe_data: bytes = bytes(range(32))
    vouched: bytes | None = None
    chain: str | None = field(default=None)


def tdx_quote(fields: TdxFields, made: MadeUpPlatform) -> bytes:
    header = struct.pack("<HHI", fields.version, fields.key_type, fields.tee) + bytes(4)
    header += bytes.fromhex("939a7233f79c4ca9940a0db3957f0607") + bytes(20)
    body = bytearray(584)
    body[:16] = fields.svn
    body[64:112] = fields.module_signer
    struct.pack_into("<Q", body, 120, fields.attributes)
    body[136:184] = fields.measurement
    body[520:584] = fields.report_data
    signed = header + bytes(body)
    numbers = made.attestation.public_key().public_numbers()
    key = numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")
    report = bytearray(384)
    struct.pack_into("<Q", report, 48, fields.qe_attributes)
    report[128:160] = fields.qe_signer
    struct.pack_into("<H", report, 258, fields.qe_svn)
    report[320:352] = fields.vouched or hashlib.sha256(key + fields.qe_data).digest()
    chain = (fields.chain or made.pck.pem + made.authority.pem + made.root.pem).encode() + b"\0"
    assert isinstance(made.pck.key, ec.EllipticCurvePrivateKey)
    inner = bytes(report) + _raw(made.pck.key, bytes(report))
    inner += (
        struct.pack("<H", len(fields.qe_data)) + fields.qe_data + struct.pack("<HI", 5, len(chain)) + chain
    )
    data = _raw(made.attestation, signed) + key + struct.pack("<HI", 6, len(inner)) + inner
    return signed + struct.pack("<I", len(data)) + data


def _raw(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    r, s = decode_dss_signature(key.sign(content, ec.ECDSA(SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def write_policy(folder: Path, *, measurement: bytes = MEASUREMENT, **changes: str) -> Path:
    """That takes the made-up chip and platform."""
    (folder / "ark.pem").write_text(chip().ark.pem)
    (folder / "sgx.pem").write_text(platform().root.pem)
    lines = {
        "minimum": "{ bootloader = 3, tee = 0, snp = 8, microcode = 100 }",
        "minimum_svn": '"05010600000000000000000000000000"',
        **changes,
    }
    path = folder / "policy.toml"
    path.write_text(
        f"""
[sev-snp]
roots = ["ark.pem"]
measurements = ["{measurement.hex()}"]
minimum = {lines["minimum"]}

[tdx]
roots = ["sgx.pem"]
measurements = ["{measurement.hex()}"]
minimum_svn = {lines["minimum_svn"]}
qe_signers = ["{SIGNER.hex()}"]
minimum_qe_svn = 4
"""
    )
    return path


def good_snp(report_data: bytes = REPORT_DATA) -> Evidence:
    return chip().evidence(snp_report(replace(SnpFields(), report_data=report_data), chip().vcek.key))


def good_tdx(report_data: bytes = REPORT_DATA) -> Evidence:
    return Evidence("tdx", tdx_quote(replace(TdxFields(), report_data=report_data), platform()))

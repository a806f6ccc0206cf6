"""Evidence of hardware, with chips and platforms that nobody has made: what is good passes, and each thing that is not
is refused for its own reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from shardcompute.core.errors import AuthError, SourceError, UsageError
from shardcompute.security.attestation import verifiers
from shardcompute.security.attestation.evidence import (
    MOST_EVIDENCE_BYTES,
    Evidence,
    VerifiedReport,
    decode_evidence,
    encode_evidence,
    report_data_of,
)
from shardcompute.security.attestation.policy import AttestationPolicy, PolicyTable, load_policy
from shardcompute.security.identity import NodeIdentity
from support.attestation import (
    MEASUREMENT,
    NOW,
    REPORT_DATA,
    SnpFields,
    TdxFields,
    chip,
    ec_key,
    good_snp,
    good_tdx,
    issue,
    platform,
    rsa_key,
    snp_report,
    tdx_quote,
    write_policy,
)

NOW_S = NOW.timestamp()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> AttestationPolicy:
    return load_policy(write_policy(tmp_path_factory.mktemp("policy")))


@pytest.mark.parametrize("make", [good_snp, good_tdx])
def test_good_evidence_proves_what_was_started(
    make: Callable[[], Evidence], policy: AttestationPolicy
) -> None:
    evidence = decode_evidence(encode_evidence(make()))
    found = policy.verify(evidence, REPORT_DATA, NOW_S)
    assert found == VerifiedReport(evidence.kind, MEASUREMENT.hex())


SNP: dict[str, tuple[dict[str, Any], str]] = {
    "not about this node's key": ({"report_data": bytes(64)}, "not about this node's key"),
    "debugged": ({"policy": 0x30000 | 1 << 19}, "may be debugged"),
    "moved": ({"policy": 0x30000 | 1 << 18}, "may be moved"),
    "without the bit that is always one": ({"policy": 0x10000}, "may be debugged"),
    "another measurement": ({"measurement": bytes(48)}, "is not on the list"),
    "another level": ({"vmpl": 1}, "VMPL 1"),
    "version 1": ({"version": 1}, "version 1 are not known"),
    "version 6": ({"version": 6}, "version 6 are not known"),
    "a later family": ({"version": 3, "family": 0x1A}, "family 0x1a"),
    "another algorithm": ({"algorithm": 2}, "another way than ECDSA"),
    "a key of many chips": ({"flags": 1 << 2}, "not signed by the chip's own key"),
    "another chip": ({"chip_id": bytes(range(64))}, "another chip"),
    "another version than certified": ({"tcb": (3, 0, 9, 200)}, "another version than the certificate"),
}


@pytest.mark.parametrize(("changes", "reason"), SNP.values(), ids=SNP)
def test_a_report_that_will_not_do(changes: dict[str, Any], reason: str, policy: AttestationPolicy) -> None:
    """Rightly signed, so that it is refused for what it says."""
    report = snp_report(replace(SnpFields(), **changes), chip().vcek.key)
    with pytest.raises(AuthError, match=reason):
        policy.verify(chip().evidence(report), REPORT_DATA, NOW_S)


def test_a_report_of_version_3_passes(policy: AttestationPolicy) -> None:
    report = snp_report(SnpFields(version=3), chip().vcek.key)
    assert policy.verify(chip().evidence(report), REPORT_DATA, NOW_S).kind == "sev-snp"


def test_old_firmware_is_refused(tmp_path: Path) -> None:
    for least in ("bootloader = 4", "tee = 1", "snp = 9", "microcode = 201"):
        names = {"bootloader": 3, "tee": 0, "snp": 8, "microcode": 100}
        name, _, value = least.partition(" = ")
        names[name] = int(value)
        table = ", ".join(f"{each} = {number}" for each, number in names.items())
        asked = load_policy(write_policy(tmp_path, minimum=f"{{ {table} }}"))
        with pytest.raises(AuthError, match="too old"):
            asked.verify(good_snp(), REPORT_DATA, NOW_S)


def test_chains_of_chips(policy: AttestationPolicy) -> None:
    report, made = good_snp().report, chip()
    other_root = issue("ARK-Nowhere", rsa_key(3), None)
    other = issue("SEV-Nowhere", rsa_key(4), other_root)
    chains: dict[str, list[str]] = {
        "without its certificates": [],
        "not issued by the next one": [made.vcek.pem, other_root.pem],
        "wrong signature": [made.vcek.pem, other.pem],
        "not signed under any root": [made.vcek.pem, issue("SEV-Nowhere", rsa_key(2), other_root).pem],
        "cannot be read": ["-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"],
        "one of an authority": [made.ask.pem],
    }
    for reason, chain in chains.items():
        with pytest.raises(AuthError, match=reason):
            policy.verify(Evidence("sev-snp", report, chain), REPORT_DATA, NOW_S)
    # The root may come along, or not.
    whole = Evidence("sev-snp", report, [made.vcek.pem + made.ask.pem + made.ark.pem])
    assert policy.verify(whole, REPORT_DATA, NOW_S).kind == "sev-snp"


def test_certificates_have_their_time(policy: AttestationPolicy) -> None:
    late = (NOW + timedelta(days=4000)).timestamp()
    for evidence in (good_snp(), good_tdx()):
        with pytest.raises(AuthError, match="run out"):
            policy.verify(evidence, REPORT_DATA, late)


def test_a_chip_signs_for_nobody_else(policy: AttestationPolicy) -> None:
    """A key that a chip has signed for is none: only authorities sign."""
    made = chip()
    forged = issue("SEV-VCEK", ec_key(ec.SECP384R1()), made.vcek, is_authority=False)
    report = snp_report(SnpFields(), forged.key)
    chain = [forged.pem, made.vcek.pem, made.ask.pem]
    with pytest.raises(AuthError, match="not issued by the next one"):
        policy.verify(Evidence("sev-snp", report, chain), REPORT_DATA, NOW_S)


def test_a_certificate_of_no_chip_is_refused(policy: AttestationPolicy) -> None:
    made = chip(has_ids=False)
    evidence = replace_chain(made.vcek.pem, made.ask.pem, snp_report(SnpFields(), made.vcek.key))
    asked = AttestationPolicy("", policy.verifiers)
    with pytest.raises(AuthError):
        asked.verify(evidence, REPORT_DATA, NOW_S)


def replace_chain(vcek: str, ask: str, report: bytes) -> Evidence:
    return Evidence("sev-snp", report, [vcek, ask])


TDX: dict[str, tuple[dict[str, Any], str]] = {
    "not about this node's key": ({"report_data": bytes(64)}, "not about this node's key"),
    "debugged": ({"attributes": 1}, "may be debugged"),
    "another measurement": ({"measurement": bytes(48)}, "is not on the list"),
    "another module": ({"module_signer": b"x" * 48}, "not Intel's"),
    "an old module": ({"svn": bytes([5, 0, 6, *[0] * 13])}, "too old"),
    "another version": ({"version": 3}, "no TDX quote of version 4"),
    "another key": ({"key_type": 3}, "no TDX quote of version 4"),
    "another hardware": ({"tee": 0}, "no TDX quote of version 4"),
    "an enclave under test": ({"qe_attributes": 0x7}, "enclave may be debugged"),
    "another's enclave": ({"qe_signer": bytes(32)}, "who is not on the list"),
    "an old enclave": ({"qe_svn": 3}, "enclave is too old"),
    "an enclave that vouches for another": ({"vouched": b"x" * 32}, "not that of its enclave"),
    "no certificates": ({"chain": "nothing"}, "cannot be read"),
}


@pytest.mark.parametrize(("changes", "reason"), TDX.values(), ids=TDX)
def test_a_quote_that_will_not_do(changes: dict[str, Any], reason: str, policy: AttestationPolicy) -> None:
    quote = tdx_quote(replace(TdxFields(), **changes), platform())
    with pytest.raises(AuthError, match=reason):
        policy.verify(Evidence("tdx", quote), REPORT_DATA, NOW_S)


def test_quotes_signed_by_others_are_refused(policy: AttestationPolicy) -> None:
    made = platform()
    stranger = replace(made, pck=replace(made.pck, key=ec_key(ec.SECP256R1())))
    with pytest.raises(AuthError, match="enclave report has a wrong signature"):
        policy.verify(Evidence("tdx", tdx_quote(TdxFields(), stranger)), REPORT_DATA, NOW_S)
    nobody = platform(is_platform=False)
    chain = Evidence("tdx", tdx_quote(TdxFields(), nobody))
    with pytest.raises(AuthError):
        policy.verify(chain, REPORT_DATA, NOW_S)
    known_root = issue("SGX PCK", ec_key(ec.SECP256R1()), made.authority, is_authority=False)
    unlike = replace(made, pck=known_root)
    with pytest.raises(AuthError, match="not signed for by a platform"):
        policy.verify(Evidence("tdx", tdx_quote(TdxFields(), unlike)), REPORT_DATA, NOW_S)


def test_evidence_is_bound_to_one_key(tmp_path: Path, policy: AttestationPolicy) -> None:
    one, other = (NodeIdentity.open(tmp_path / name).certificate_request() for name in ("one", "other"))
    assert len(report_data_of(one)) == 64
    assert report_data_of(one) == report_data_of(NodeIdentity.open(tmp_path / "one").certificate_request())
    for make in (good_snp, good_tdx):
        evidence = make(report_data_of(one))
        assert policy.verify(evidence, report_data_of(one), NOW_S)
        with pytest.raises(AuthError, match="not about this node's key"):
            policy.verify(evidence, report_data_of(other), NOW_S)


def test_content_that_is_no_evidence() -> None:
    for content in (b"", b"{}", b"[]", b'{"kind": "", "report": "AA=="}', b"\xff" * 10, b"[" * 10_000):
        with pytest.raises(AuthError, match="cannot be read"):
            decode_evidence(content)
    with pytest.raises(AuthError, match="more than any"):
        decode_evidence(b" " * (MOST_EVIDENCE_BYTES + 1))
    with pytest.raises(AuthError, match="cannot be read"):
        report_data_of("nonsense")


def test_kinds_that_are_not_asked_for(policy: AttestationPolicy) -> None:
    with pytest.raises(AuthError, match="'word of honour' is not taken"):
        policy.verify(Evidence("word of honour", b"x"), REPORT_DATA, NOW_S)


POLICIES = {
    "": "asks for nothing",
    "x = 1": "is not a table",
    "[[": "no TOML file",
    "[word]": "not known here",
    "[sev-snp]": "roots has to be",
    '[sev-snp]\nroots = ["ark.pem"]\nmeasurements = []': "measurements has to be",
    '[sev-snp]\nroots = ["ark.pem"]\nmeasurements = ["00"]': "48 bytes",
    f'[sev-snp]\nroots = ["ark.pem"]\nmeasurements = ["{"00" * 48}"]\nminimum = {{ snp = 1 }}': "has to name",
    f'[sev-snp]\nroots = ["ark.pem"]\nmeasurements = ["{"00" * 48}"]\nminimum = {{ snp = 999 }}': "0 to 255",
}


@pytest.mark.parametrize("content", POLICIES)
def test_policies_that_are_not_understood(content: str, tmp_path: Path) -> None:
    write_policy(tmp_path)
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=POLICIES[content]):
        load_policy(path)


def test_what_nobody_knows_in_a_policy_is_an_error(tmp_path: Path) -> None:
    path = write_policy(tmp_path)
    path.write_text(path.read_text() + "allow_debug = true\n")
    with pytest.raises(UsageError, match="allow_debug is not known"):
        load_policy(path)
    with pytest.raises(SourceError, match="cannot be read"):
        load_policy(tmp_path / "none.toml")
    (tmp_path / "ark.pem").write_text("nothing")
    with pytest.raises(UsageError, match="root cannot be read"):
        load_policy(write_policy_text(tmp_path))


def write_policy_text(folder: Path) -> Path:
    path = folder / "again.toml"
    path.write_text('[sev-snp]\nroots = ["ark.pem"]\n')
    return path


def test_a_policy_is_told_by_its_roots_too(tmp_path: Path) -> None:
    first = load_policy(write_policy(tmp_path)).digest
    assert load_policy(write_policy(tmp_path)).digest == first
    (tmp_path / "ark.pem").write_text(issue("ARK-Nowhere", rsa_key(3), None).pem)
    assert load_policy(tmp_path / "policy.toml").digest != first


def test_other_packages_bring_kinds_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class EntryPoint:
        name = "seal"

        def load(self) -> Callable[[PolicyTable], verifiers.Verify]:
            return open_seal

    def open_seal(table: PolicyTable) -> verifiers.Verify:
        words = table.strings("words")

        def verify(evidence: Evidence, report_data: bytes, now_s: float) -> VerifiedReport:
            if evidence.report.decode() not in words:
                raise AuthError("not the word")
            return VerifiedReport("seal", evidence.report.hex())

        return verify

    monkeypatch.setattr(verifiers, "entry_points", lambda group: [EntryPoint()])
    path = tmp_path / "seal.toml"
    path.write_text('[seal]\nwords = ["open"]\n')
    asked = load_policy(path)
    assert asked.verify(Evidence("seal", b"open"), b"", NOW_S).kind == "seal"
    with pytest.raises(AuthError, match="not the word"):
        asked.verify(Evidence("seal", b"shut"), b"", NOW_S)

"""Reports that were changed in any byte, cut short or made longer: refused, or the very same report."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.core.errors import AuthError
from shardcompute.security.attestation.chains import read_certificates
from shardcompute.security.attestation.evidence import Evidence, decode_evidence, encode_evidence
from shardcompute.security.attestation.policy import AttestationPolicy, load_policy
from shardcompute.security.attestation.sev_snp import REPORT_BYTES, parse_report
from shardcompute.security.attestation.tdx import SIGNED_BYTES, parse_quote
from support.attestation import NOW, REPORT_DATA, good_snp, good_tdx, write_policy

NOW_S = NOW.timestamp()
SNP, TDX = good_snp(), good_tdx()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> AttestationPolicy:
    return load_policy(write_policy(tmp_path_factory.mktemp("policy")))


def is_taken(policy: AttestationPolicy, evidence: Evidence) -> bool:
    try:
        policy.verify(evidence, REPORT_DATA, NOW_S)
    except AuthError:
        return False
    return True


def test_every_byte_of_a_report_counts(policy: AttestationPolicy) -> None:
    evidence = SNP
    chance = random.Random(1)
    for place in range(REPORT_BYTES):
        report = bytearray(evidence.report)
        report[place] ^= 1 << chance.randrange(8)
        assert not is_taken(policy, msgspec.structs.replace(evidence, report=bytes(report))), place


def test_every_byte_of_a_quote_counts(policy: AttestationPolicy) -> None:
    """But for spaces and line ends around the certificates, which are the same certificates then."""
    chance = random.Random(2)
    quote = parse_quote(TDX.report)
    behind = len(TDX.report) - len(quote.chain) - 1
    for place in range(len(TDX.report)):
        report = bytearray(TDX.report)
        report[place] ^= 1 << chance.randrange(8)
        if is_taken(policy, msgspec.structs.replace(TDX, report=bytes(report))):
            assert place >= behind
            # The root is the operator's, whatever comes along.
            leaf, issuer, *_ = read_certificates(parse_quote(bytes(report)).chain)
            assert [leaf, issuer] == read_certificates(quote.chain)[:2]


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=2000), kind=st.sampled_from(["sev-snp", "tdx"]))
def test_any_bytes_are_refused(content: bytes, kind: str, policy: AttestationPolicy) -> None:
    if content:
        assert not is_taken(policy, Evidence(kind, content))


@settings(max_examples=120, deadline=None)
@given(chance=st.randoms(use_true_random=False), is_snp=st.booleans())
def test_reports_cut_spliced_and_grown(
    chance: random.Random, is_snp: bool, policy: AttestationPolicy
) -> None:
    evidence = SNP if is_snp else TDX
    # Of a quote, within what is signed: text around certificates does not count.
    report, place = evidence.report, chance.randrange(REPORT_BYTES if is_snp else SIGNED_BYTES)
    other = TDX.report if is_snp else SNP.report
    changed = chance.choice(
        [
            report[:place],
            report[place + 1 :],
            report[:place] + other,
            report + b"x",
            report[:place] + b"\1" + report[place:],
        ]
    )
    assert not changed or not is_taken(policy, msgspec.structs.replace(evidence, report=changed))


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=1400))
def test_parsers_raise_nothing_else(content: bytes) -> None:
    for parse in (parse_report, parse_quote):
        for each in (content, content.ljust(REPORT_BYTES, b"\0")):
            try:
                parse(each)
            except AuthError:
                continue


@settings(max_examples=100, deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_mutated_files_of_evidence(chance: random.Random, policy: AttestationPolicy) -> None:
    content = bytearray(encode_evidence(SNP))
    content[chance.randrange(len(content))] = chance.randrange(256)
    try:
        evidence = decode_evidence(bytes(content))
    except AuthError:
        return
    assert not is_taken(policy, evidence) or evidence.report == SNP.report

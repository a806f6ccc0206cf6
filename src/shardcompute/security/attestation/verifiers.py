"""Verifiers of evidence by kind: those that are built in, and those that other packages bring.

A package adds a kind by an entry point of the group `shardcompute.evidence`, whose name is the kind and whose object is
an `OpenVerifier`: given the policy's table for that kind, it gives the function that judges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeAlias

from cryptography import x509

from shardcompute.core.errors import AuthError, UsageError
from shardcompute.security.attestation import sev_snp, tdx
from shardcompute.security.attestation.chains import read_certificates
from shardcompute.security.attestation.evidence import Evidence, VerifiedReport

if TYPE_CHECKING:
    from shardcompute.security.attestation.policy import PolicyTable

GROUP = "shardcompute.evidence"
Verify: TypeAlias = Callable[[Evidence, bytes, float], VerifiedReport]
"""What evidence proves of the node with this report data, at this time. Raises AuthError where it does not."""
OpenVerifier: TypeAlias = "Callable[[PolicyTable], Verify]"


def find_verifier(kind: str) -> OpenVerifier:
    """UsageError where nobody knows this kind."""
    built_in = _BUILT_IN.get(kind)
    if built_in is not None:
        return built_in
    found = [each for each in entry_points(group=GROUP) if each.name == kind]
    if len(found) != 1:
        raise UsageError(
            f"evidence of kind {kind!r} is not known here",
            hint=f"use {' or '.join(_BUILT_IN)}, or install the one package that verifies it",
        )
    loaded: Any = found[0].load()
    opened: OpenVerifier = loaded
    return opened


def _open_snp(table: PolicyTable) -> Verify:
    roots, measurements = _roots(table), table.digests("measurements", sev_snp.MEASUREMENT_BYTES)
    minimum = table.numbers("minimum")
    names = [each.name for each in fields(sev_snp.SecurityVersion)]
    if sorted(minimum) != sorted(names):
        raise UsageError(f"[sev-snp] minimum has to name {', '.join(names)}", hint="see docs/attestation.md")
    rules = sev_snp.SnpRules(roots, measurements, sev_snp.SecurityVersion(**minimum))
    return lambda evidence, report_data, now_s: sev_snp.verify_snp(evidence, report_data, rules, now_s)


def _open_tdx(table: PolicyTable) -> Verify:
    rules = tdx.TdxRules(
        roots=_roots(table),
        measurements=table.digests("measurements", tdx.MEASUREMENT_BYTES),
        minimum_svn=table.bytes_of("minimum_svn", tdx.SVN_BYTES),
        qe_signers=table.digests("qe_signers", tdx.SIGNER_BYTES),
        minimum_qe_svn=table.number("minimum_qe_svn", 0),
    )
    return lambda evidence, report_data, now_s: tdx.verify_tdx(evidence, report_data, rules, now_s)


def _roots(table: PolicyTable) -> tuple[x509.Certificate, ...]:
    try:
        return tuple(each for text in table.files("roots") for each in read_certificates(text))
    except AuthError as error:
        raise UsageError(
            f"a root cannot be read: {error.message}", hint="give certificates in PEM"
        ) from error


_BUILT_IN: dict[str, OpenVerifier] = {sev_snp.KIND: _open_snp, tdx.KIND: _open_tdx}

"""Attestation policy: a TOML file in which an operator says what evidence machines have to show, by kind.

[sev-snp]
roots = ["ark-milan.pem"]                  # files beside this one
measurements = ["9f3c…"]                   # 48 bytes each
minimum = { bootloader = 3, tee = 0, snp = 8, microcode = 115 }

[tdx]
roots = ["intel-sgx-root.pem"]
measurements = ["71ab…"]                   # MRTD, 48 bytes each
minimum_svn = "05010600000000000000000000000000"
qe_signers = ["dc9e…"]                     # MRSIGNER of quoting enclaves, 32 bytes each
minimum_qe_svn = 4
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcompute.core.errors import AuthError, SourceError, UsageError
from shardcompute.security.attestation.evidence import Evidence, VerifiedReport
from shardcompute.security.attestation.verifiers import Verify, find_verifier

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AttestationPolicy:
    """What is asked for, ready to judge. `digest` tells policies apart."""

    digest: str
    verifiers: Mapping[str, Verify]

    def verify(self, evidence: Evidence, report_data: bytes, now_s: float) -> VerifiedReport:
        """What the evidence proves of the node with this report data. AuthError where that is not enough."""
        verify = self.verifiers.get(evidence.kind)
        if verify is None:
            kinds = " or ".join(sorted(self.verifiers))
            raise AuthError(f"Evidence of kind {evidence.kind!r} is not taken here", hint=f"show {kinds}")
        try:
            return verify(evidence, report_data, now_s)
        except AuthError:
            raise
        except Exception as error:
            # Certificates of strangers fail in as many ways as libraries know: whatever cannot be judged is refused.
            raise AuthError(f"The evidence cannot be judged: {error}") from error


def load_policy(path: Path) -> AttestationPolicy:
    """UsageError where it asks for something that is not understood, or for nothing."""
    content = _read(path)
    try:
        tables: dict[str, Any] = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML file: {error}", hint="see docs/attestation.md") from error
    if not tables:
        raise UsageError(f"{path} asks for nothing", hint="give it a table such as [sev-snp]")
    digest = hashlib.sha256(content)
    verifiers: dict[str, Verify] = {}
    for kind, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {kind} is not a table", hint="write [sev-snp] or [tdx]")
        rules = PolicyTable(path, kind, table, digest)
        verifiers[kind] = find_verifier(kind)(rules)
        rules.finish()
    return AttestationPolicy(digest.hexdigest(), verifiers)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}", hint="check the name") from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{path} is far too long for a policy", hint="see docs/attestation.md")
    return content


class PolicyTable:
    """One kind's rules, read field by field: what nobody asked for is an error (`finish`)."""

    def __init__(self, path: Path, kind: str, table: Mapping[str, Any], digest: hashlib._Hash) -> None:
        self._path = path
        self._kind = kind
        self._left = dict(table)
        self._digest = digest

    def strings(self, name: str) -> tuple[str, ...]:
        """At least one."""
        values = self._left.pop(name, None)
        if not isinstance(values, list) or not values or not all(isinstance(each, str) for each in values):
            raise self._wrong(f"{name} has to be a list of texts")
        return tuple(values)

    def digests(self, name: str, size: int) -> frozenset[bytes]:
        """At least one number of `size` bytes, in hexadecimal."""
        return frozenset(self._bytes(name, each, size) for each in self.strings(name))

    def bytes_of(self, name: str, size: int) -> bytes:
        return self._bytes(name, self._left.pop(name, None), size)

    def number(self, name: str, default: int) -> int:
        value = self._left.pop(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise self._wrong(f"{name} has to be a number")
        return value

    def numbers(self, name: str) -> dict[str, int]:
        values = self._left.pop(name, None)
        if not isinstance(values, dict) or not all(
            isinstance(each, int) and 0 <= each < 256 for each in values.values()
        ):
            raise self._wrong(f"{name} has to be a table of numbers from 0 to 255")
        return values

    def files(self, name: str) -> list[str]:
        """The content of files that lie beside the policy; it is part of what tells policies apart."""
        found = []
        for each in self.strings(name):
            content = _read(self._path.parent / each)
            self._digest.update(hashlib.sha256(content).digest())
            try:
                found.append(content.decode("ascii"))
            except UnicodeDecodeError as error:
                raise self._wrong(f"{each} is no file of certificates in PEM") from error
        return found

    def finish(self) -> None:
        if self._left:
            raise self._wrong(f"{', '.join(sorted(self._left))} is not known")

    def _bytes(self, name: str, value: object, size: int) -> bytes:
        try:
            content = bytes.fromhex(value) if isinstance(value, str) else b""
        except ValueError:
            content = b""
        if len(content) != size:
            raise self._wrong(f"{name} has to be {size} bytes in hexadecimal")
        return content

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"{self._path}: [{self._kind}] {what}", hint="see docs/attestation.md")

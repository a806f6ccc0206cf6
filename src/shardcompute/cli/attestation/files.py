"""Files of attestation: evidence that a worker shows, and the policy by which a cluster judges it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardcompute.core.errors import SourceError, UsageError

if TYPE_CHECKING:
    from shardcompute.security.attestation.policy import AttestationPolicy


def read_evidence_file(path: Path) -> bytes:
    """As it is sent. AuthError where it is none."""
    from shardcompute.security.attestation.evidence import MOST_EVIDENCE_BYTES, decode_evidence

    content = read_file(path, MOST_EVIDENCE_BYTES)
    decode_evidence(content)
    return content


def read_file(path: Path, most_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}", hint="check the name") from error
    if len(content) > most_bytes:
        raise UsageError(f"{path} is far too long", hint=f"at most {most_bytes} bytes are read of it")
    return content


def attestation_policy(path: Path | None, *, has_own_workers: bool) -> AttestationPolicy | None:
    """What a cluster asks of workers; None: nothing. Workers that it starts itself would have to show it, too."""
    if path is None:
        return None
    from shardcompute.security.attestation.policy import load_policy

    if has_own_workers:
        raise UsageError(
            "--require-attested takes no workers that show nothing, and those of `up` do not",
            hint="add --no-workers, and join attested machines with --evidence",
        )
    return load_policy(path)

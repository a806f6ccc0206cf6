"""`shardcompute evidence …`: what a machine shows of its hardware, made and checked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.attestation.files import read_evidence_file, read_file
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.worker import WorkerFolder, worker_folder
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.security.identity import NodeIdentity

app = typer.Typer(
    help="Evidence of a machine's hardware (AMD SEV-SNP, Intel TDX): make it, and check it.",
    no_args_is_help=True,
)
EvidencePath = Annotated[Path, typer.Argument(metavar="FILE", help="Evidence, as `evidence pack` wrote it.")]
_MOST_REPORT_BYTES = 16 << 10


@app.command()
def data(*, data_dir: WorkerFolder = None) -> None:
    """Print the 64 bytes (in hexadecimal) that this machine's hardware has to sign along with its report.

    They are a digest of the public key of the worker in this folder, which is made if there is none. Ask for a report
    with them inside the guest, by the vendor's tools: as `--report-data` or REPORTDATA.
    """
    from shardcompute.security.attestation.evidence import report_data_of

    identity = _identity(data_dir)
    open_screen().write(report_data_of(identity.certificate_request()).hex() + "\n")


@app.command()
def pack(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="The report or quote, as it was given.")],
    *,
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help="sev-snp, tdx, or another one's kind.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write the evidence.")],
    certificates: Annotated[
        list[Path] | None,
        typer.Option(
            "--certificates",
            metavar="PEM",
            help="Certificates of who signed it: VCEK and ASK for sev-snp; tdx brings them along. May be repeated.",
        ),
    ] = None,
) -> None:
    """Put a report and its certificates into one file, for `join --evidence`."""
    from shardcompute.security.attestation.evidence import (
        MOST_EVIDENCE_BYTES,
        Evidence,
        decode_evidence,
        encode_evidence,
    )
    from shardcompute.security.private_files import replace_private

    texts = [read_file(each, MOST_EVIDENCE_BYTES).decode("ascii", "replace") for each in certificates or ()]
    content = encode_evidence(Evidence(kind, read_file(report, _MOST_REPORT_BYTES), texts))
    decode_evidence(content)
    replace_private(out, content)
    open_screen().say(f"written to {out}; join with: shardcompute join TOKEN --evidence {out}")


@app.command()
def check(
    file: EvidencePath,
    *,
    policy: Annotated[
        Path,
        typer.Option("--policy", metavar="TOML", help="What a cluster asks for; see docs/attestation.md."),
    ],
    any_key: Annotated[
        bool,
        typer.Option("--any-key", help="Whichever key it is about, not that of the worker in this folder."),
    ] = False,
    data_dir: WorkerFolder = None,
) -> None:
    """Check evidence as a cluster with this policy would, and say what it proves.

    The exit code is 10 where it would not do.
    """
    from shardcompute.security.attestation.evidence import decode_evidence, report_data_of
    from shardcompute.security.attestation.policy import load_policy

    evidence = decode_evidence(read_evidence_file(file))
    judged = load_policy(policy)
    expected = _claimed_data(evidence.kind, evidence.report) if any_key else b""
    if not any_key:
        expected = report_data_of(_identity(data_dir).certificate_request())
    found = judged.verify(evidence, expected, time.time())
    open_screen().say(f"good: {found.kind}, measurement {found.measurement}")


def _claimed_data(kind: str, report: bytes) -> bytes:
    from shardcompute.security.attestation import sev_snp, tdx

    if kind == sev_snp.KIND:
        return sev_snp.parse_report(report).report_data
    if kind == tdx.KIND:
        return tdx.parse_quote(report).report_data
    raise UsageError(
        f"which key evidence of kind {kind!r} is about is not known here", hint="leave out --any-key"
    )


def _identity(data_dir: Path | None) -> NodeIdentity:
    from shardcompute.security.identity import NodeIdentity
    from shardcompute.security.private_files import open_private_folder

    folder = worker_folder(load_settings(), data_dir)
    open_private_folder(folder)
    return NodeIdentity.open(folder)

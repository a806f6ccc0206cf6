"""`shardcompute receipt …`: what machines signed for of an answer, fetched and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.cluster import ClusterFolder
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options
from shardcompute.cli.options.trust import AuthorityFile, AuthorityFingerprint, content_of, trusted_authority
from shardcompute.core.errors import SourceError
from shardcompute.core.units import count_of

if TYPE_CHECKING:
    from shardcompute.security.receipts import Receipt, ReceiptVerdict

app = typer.Typer(
    help="Fetch and check receipts: who signed for having computed an answer from what.", no_args_is_help=True
)
ReceiptPath = Annotated[Path, typer.Argument(metavar="FILE", help="A receipt, as `run --receipt` wrote it.")]


@app.command()
def verify(
    file: ReceiptPath,
    *,
    authority: AuthorityFile = None,
    fingerprint: AuthorityFingerprint = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a receipt that has rows which nobody signed for.")
    ] = False,
    data_dir: ClusterFolder = None,
    json: Json = False,
) -> None:
    """Check a receipt, without the cluster and without a network.

    Trusted is the authority that --authority or --fingerprint names, or else that of the cluster on this machine. Where
    something does not fit, the first such field is named and the exit code is 1.
    """
    from shardcompute.security.receipts import ReceiptError, read_receipt, verify_receipt
    from shardcompute.security.receipts.trust import authority_by_fingerprint

    screen = open_screen()
    receipt = read_receipt(content_of(file))
    try:
        if fingerprint is not None:
            trusted = authority_by_fingerprint(receipt, fingerprint)
        else:
            trusted = trusted_authority(authority, data_dir)
        verdict = verify_receipt(receipt, trusted, is_strict=strict)
    except ReceiptError as error:
        if json:
            screen.write_json({"is_valid": False, "field": error.field, "reason": error.reason})
        screen.say(f"{file} does not fit: {error.message}", "red")
        raise typer.Exit(1) from error
    if json:
        screen.write_json(_as_json(receipt, verdict))
    else:
        for line in _lines(receipt, verdict):
            screen.write(f"{line}\n")


@app.command()
@with_options
def fetch(
    receipt_id: Annotated[
        str, typer.Argument(metavar="ID", help="As the header x-shardcompute-receipt of an answer has it.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    *,
    location: ClusterLocation,
) -> None:
    """Write a receipt that a cluster has kept into a file.

    It takes the key that asked for the answer, or an operator's.
    """
    with location.connect() as client:
        content = client.receipt(receipt_id)
    try:
        file.write_bytes(content)
    except OSError as error:
        raise SourceError(
            f"{file} cannot be written: {error.strerror}", hint="choose another file"
        ) from error
    open_screen().say(f"{file}: check it with shardcompute receipt verify {file}")


def _lines(receipt: Receipt, verdict: ReceiptVerdict) -> list[str]:
    answer = len(receipt.tokens) - receipt.prompt_tokens
    claims = [each.header.claim for each in receipt.transcripts]
    lines = [
        f"{receipt.id}: {count_of(answer, 'token')} of {receipt.model} "
        f"after {count_of(receipt.prompt_tokens, 'token')} of prompt, in cluster {receipt.cluster}",
        f"  authority   {verdict.fingerprint}",
        f"  driver      {receipt.driver}",
    ]
    lines += dict.fromkeys(
        f"  layers {claim.start}–{claim.stop - 1:<4} {claim.node}, {claim.form} {claim.fingerprint[:12]}, "
        f"{claim.exactness}, release {claim.version}"
        for claim in sorted(claims, key=lambda each: (each.start, each.stop))
    )
    for run in receipt.runs:
        rows = (
            f"rows {run.start}–{run.stop - 1}" if run.start < run.stop else "no rows: the chain had changed,"
        )
        lines.append(f"  epoch {run.epoch:<6} {rows} by {', '.join(run.nodes)}")
    if receipt.reused_rows:
        lines.append(f"  not signed  rows 0–{receipt.reused_rows - 1}: known from an earlier answer")
    if receipt.given_tokens > receipt.prompt_tokens:
        count = receipt.given_tokens - receipt.prompt_tokens
        lines.append(
            f"  not signed  the first {count_of(count, 'token')} of the answer: of a driver that was lost"
        )
    for each in verdict.unsigned:
        lines.append(
            f"  not signed  rows {each.start}–{each.stop - 1} by {each.node}, which left in epoch {each.epoch}"
        )
    lines.append(
        f"verified: {count_of(verdict.rows, 'row')}, {count_of(verdict.picked, 'picked token')}, "
        f"{count_of(verdict.compared, 'digest')} compared. It says who signed for what, not that it was computed "
        "rightly."
    )
    return lines


def _as_json(receipt: Receipt, verdict: ReceiptVerdict) -> dict[str, object]:
    return {
        "is_valid": True,
        "id": receipt.id,
        "cluster": receipt.cluster,
        "model": receipt.model,
        "fingerprint": verdict.fingerprint,
        "nodes": list(verdict.nodes),
        "epochs": list(verdict.epochs),
        "rows": verdict.rows,
        "picked": verdict.picked,
        "compared": verdict.compared,
        "unsigned": [
            {"node": each.node, "epoch": each.epoch, "start": each.start, "stop": each.stop}
            for each in verdict.unsigned
        ],
    }

"""`shardcompute ledger …`: what a cluster's ledger comes to, all of it as a file, and whether such a file fits."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.options.cluster import ClusterFolder
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options
from shardcompute.cli.options.trust import AuthorityFile, AuthorityFingerprint, content_of, trusted_authority
from shardcompute.core.errors import SourceError, UsageError
from shardcompute.core.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardcompute.node.cluster.ledger.views import LedgerView
    from shardcompute.trust.ledger import Contribution, LedgerHeader, SignedEntries

app = typer.Typer(
    help="Look at, export and check the ledger: who was there, who signed for which work, what audits found.",
    no_args_is_help=True,
)
_HEADINGS = ("MACHINE", "NOW", "UPTIME", "TOKENS", "× LAYERS", "NOT CREDITED", "AUDITS", "STEPS", "STORED")
LedgerPath = Annotated[Path, typer.Argument(metavar="FILE", help="A ledger, as `ledger export` wrote it.")]


@app.command()
@with_options
def show(
    *,
    cost: Annotated[
        list[str] | None,
        typer.Option(
            "--cost",
            metavar="MACHINE=PRICE",
            help="What a machine costs an hour, by name or id, for its cost per million tokens; may be repeated.",
        ),
    ] = None,
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """What every machine has contributed, by the ledger of a running cluster.

    Tokens, and these times layers, are credited where a stage signed for them in a receipt that fits and no audit
    contradicts it. Work without a receipt is in none of these: `up --receipts` asks for one with every answer. Steps
    and stored bytes are what machines report.
    """
    screen = open_screen()
    with at.connect() as client:
        view = client.ledger()
    prices = _prices(cost or (), view.machines)
    if json:
        costs = {
            each.node: each.cost_per_million_tokens(prices[each.node])
            for each in view.machines
            if each.node in prices
        }
        screen.write_json({**dataclasses.asdict(view), "cost_per_million_tokens": costs})
        return
    _show(screen, view, prices)


@app.command()
@with_options
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    *,
    receipt: Annotated[
        str | None,
        typer.Option(
            "--receipt", metavar="ID", help="Only the proof that this receipt, of a while ago, is in it."
        ),
    ] = None,
    at: ClusterLocation,
) -> None:
    """Write the whole ledger of a running cluster into a file that anybody can check."""
    with at.connect() as client:
        content = client.ledger_export() if receipt is None else client.ledger_proof(receipt)
    try:
        file.write_bytes(content)
    except OSError as error:
        raise SourceError(
            f"{file} cannot be written: {error.strerror}", hint="choose another file"
        ) from error
    more = "" if receipt is None else " --receipt FILE, with the file of the receipt"
    open_screen().say(f"{file}: check it with shardcompute ledger verify {file}{more}")


@app.command()
def verify(
    file: LedgerPath,
    *,
    seen: Annotated[
        Path | None,
        typer.Option(
            "--seen",
            metavar="JSON",
            help="What a member has seen (ledger-seen.json in its folder), from which the file must go on.",
        ),
    ] = None,
    receipt: Annotated[
        Path | None,
        typer.Option(
            "--receipt",
            metavar="JSON",
            help="A receipt, of which FILE is to prove that the ledger tells of it.",
        ),
    ] = None,
    authority: AuthorityFile = None,
    fingerprint: AuthorityFingerprint = None,
    data_dir: ClusterFolder = None,
    json: Json = False,
) -> None:
    """Check a ledger, without the cluster and without a network.

    Trusted is the authority that --authority or --fingerprint names, or else that of the cluster on this machine. Where
    something does not fit, the first such thing is named and the exit code is 1. A copy that was cut off at some
    moment in the past fits, too: --seen tells it from a whole one.
    """
    from shardcompute.trust.ledger import LedgerError

    screen = open_screen()
    if seen is not None and receipt is not None:
        raise UsageError("--seen is for a whole ledger, --receipt for a proof", hint="give one of the two")
    trusts = partial(_check_authority, authority=authority, fingerprint=fingerprint, data_dir=data_dir)
    try:
        if receipt is not None:
            _verify_proof(screen, file, receipt, trusts, is_json=json)
            return
        whole = _replayed(file, trusts)
        if seen is not None:
            _check_seen(whole, seen)
    except LedgerError as error:
        if json:
            screen.write_json({"is_valid": False, "place": error.place, "reason": error.reason})
        screen.say(f"{file} does not fit: {error}", "red")
        raise typer.Exit(1) from error
    machines = whole.accounts.contributions()
    if json:
        screen.write_json(
            {
                "is_valid": True,
                "cluster": whole.head.cluster,
                "log": whole.head.log,
                "size": whole.head.size,
                "root": whole.head.root,
                "signed_s": whole.head.signed_s,
                "receipts": whole.accounts.receipts,
                "machines": [dataclasses.asdict(each) for each in machines],
            }
        )
        return
    _write_machines(screen, machines, {})
    screen.say(
        f"verified: {_entries(whole.head.size)} of {whole.head.log} in cluster {whole.head.cluster}, root "
        f"{whole.head.root}. It says what the coordinator wrote down and when, not that nothing was left out."
    )


def _verify_proof(
    screen: Screen, file: Path, receipt: Path, trusts: Callable[[LedgerHeader], None], *, is_json: bool
) -> None:
    from shardcompute.security.authority import is_signed_by_authority
    from shardcompute.trust.ledger.proofs import check_proof, read_proof

    proof = read_proof(content_of(file))
    trusts(proof.header)
    entry = check_proof(proof, content_of(receipt), is_signed_by_authority)
    if is_json:
        screen.write_json({"is_valid": True, "entry": entry.number, "root": proof.head.root})
    else:
        screen.write(
            f"verified: {receipt} is among the {count_of(entry.count, 'receipt')} of entry {entry.number} of the "
            f"ledger of {proof.head.log}, under root {proof.head.root}\n"
        )


def _replayed(file: Path, trusts: Callable[[LedgerHeader], None]) -> SignedEntries:
    from shardcompute.security.authority import is_signed_by_authority
    from shardcompute.trust.ledger import replay_ledger
    from shardcompute.trust.ledger.records import MOST_LINE_BYTES

    if not file.is_file():
        content_of(file)
    with file.open("rb") as lines:
        bounded = iter(lambda: lines.readline(MOST_LINE_BYTES + 2), b"")
        return replay_ledger(bounded, is_signed_by_authority, trusts)


def _check_authority(
    header: LedgerHeader, authority: Path | None, fingerprint: str | None, data_dir: Path | None
) -> None:
    """LedgerError where the file is of another cluster than is trusted."""
    from shardcompute.core.errors import AuthError
    from shardcompute.security.receipts.trust import authority_fingerprint, canonical_pem, parse_fingerprint
    from shardcompute.trust.ledger import LedgerError

    place = "header.authority"
    wanted = parse_fingerprint(fingerprint) if fingerprint is not None else None
    trusted = "" if wanted is not None else trusted_authority(authority, data_dir)
    try:
        found = authority_fingerprint(header.authority)
        is_canonical = canonical_pem(header.authority) == header.authority
    except AuthError as error:
        raise LedgerError(place, "this is no certificate") from error
    if not is_canonical:
        raise LedgerError(place, "it is not written as certificates are")
    if found != (wanted or authority_fingerprint(trusted)):
        raise LedgerError(
            place, f"another cluster's authority than the one you trust: its fingerprint is {found}"
        )


def _check_seen(whole: SignedEntries, seen: Path) -> None:
    import msgspec

    from shardcompute.security.authority import is_signed_by_authority
    from shardcompute.trust.ledger import LedgerError, SeenLedger
    from shardcompute.trust.ledger.following import judge_copy
    from shardcompute.trust.ledger.records import head_bytes

    try:
        known = msgspec.json.decode(content_of(seen), type=SeenLedger).heads.get(whole.head.log)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{seen} does not say what a member has seen: {error}", hint="give its ledger-seen.json"
        ) from error
    if known is None:
        raise UsageError(f"{seen} knows no ledger of {whole.head.log}", hint="ask another member")
    if not is_signed_by_authority(whole.header.authority, bytes.fromhex(known.signature), head_bytes(known)):
        raise UsageError(f"the head in {seen} is not signed by this authority", hint="ask another member")
    doubt = judge_copy(known, whole.head, whole.tree)
    if doubt is not None:
        raise LedgerError(doubt.kind, doubt.reason)


def _prices(given: Sequence[str], machines: Sequence[Contribution]) -> dict[str, float]:
    """By node; UsageError for a machine that the ledger does not name, or a price that is none."""
    prices: dict[str, float] = {}
    for each in given:
        name, _, text = each.rpartition("=")
        nodes = [machine.node for machine in machines if name and name in (machine.name, machine.node)]
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if not nodes or not 0.0 <= price < 1e9:
            raise UsageError(
                f"{each[:80]!r} is no price of a machine", hint="give --cost NAME=PRICE, such as desk=0.12"
            )
        prices |= dict.fromkeys(nodes, price)
    return prices


def _show(screen: Screen, view: LedgerView, prices: Mapping[str, float]) -> None:
    _write_machines(screen, view.machines, prices)
    if view.log:
        screen.say(
            f"{_entries(view.size)}, {format_bytes(view.size_bytes)}, {count_of(view.receipts, 'receipt')}; "
            f"root {view.root}"
        )
    if view.problem:
        screen.say(f"nothing is added at present: {view.problem}", "red")
    for node, reason in sorted(view.doubts.items()):
        screen.say(f"{node} doubts this ledger: {reason}", "red")


def _write_machines(screen: Screen, machines: Sequence[Contribution], prices: Mapping[str, float]) -> None:
    if not machines:
        screen.say("no machine is on record yet")
        return
    headings = (*_HEADINGS, "COST/M") if prices else _HEADINGS

    def row(each: Contribution) -> list[str]:
        audits = f"{each.audits_passed}" + (f", {each.audits_against} against" if each.audits_against else "")
        cells = [
            each.name or each.node,
            each.standing or "-",
            _hours(each.uptime_s),
            str(each.tokens),
            str(each.token_layers),
            str(each.uncredited_token_layers),
            audits,
            str(each.steps),
            format_bytes(each.stored_bytes),
        ]
        cost = each.cost_per_million_tokens(prices[each.node]) if each.node in prices else None
        return [*cells, "-" if cost is None else f"{cost:.2f}"] if prices else cells

    screen.write_table(headings, [row(each) for each in machines])


def _hours(seconds: int) -> str:
    return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"

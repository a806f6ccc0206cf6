"""`shardcompute audit`: who changed what in a cluster, and whether the log of it is whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.options.cluster import cluster_folder
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options
from shardcompute.core.errors import SourceError
from shardcompute.core.settings import load_settings
from shardcompute.core.units import count_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardcompute.node.telemetry.audit import AuditEntry, AuditPage

_PAGE = 1000


@with_options
def audit(
    *,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="The last N entries.")
    ] = 100,
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """Who changed what: keys, tokens, models, machines, starts, and attempts that were refused.

    Each entry holds the hash of the one before it; the whole chain is checked, and it is an error if entries were
    changed or are missing. Of a cluster that does not run, its folder is read.
    """
    screen = open_screen()
    address = at.find()
    if address is None:
        from shardcompute.node.telemetry.audit import AuditLog

        folder = cluster_folder(load_settings(), at.data_dir)
        found = _gather(lambda before, count: AuditLog(folder).page(before=before, limit=count), limit)
    else:
        with address.connect() as client:
            found = _gather(lambda before, count: client.audit(before=before, limit=count), limit)
    _show(screen, found, is_json=json)
    if found.problem:
        raise SourceError(
            f"the audit log is not whole: {found.problem}",
            hint="compare it with a copy; from here on it cannot be relied on",
        )


def _gather(ask: Callable[[int, int], AuditPage], limit: int) -> AuditPage:
    from dataclasses import replace

    page = ask(0, min(limit, _PAGE))
    entries = list(page.data)
    following = page.next
    while following is not None and len(entries) < limit:
        more = ask(following, min(limit - len(entries), _PAGE))
        entries += more.data
        following = more.next
    return replace(page, data=tuple(entries))


def _show(screen: Screen, page: AuditPage, *, is_json: bool) -> None:
    import msgspec

    for entry in reversed(page.data):
        if is_json:
            screen.write_json(msgspec.to_builtins(entry))
        else:
            screen.write(f"{_line(entry)}\n")
    if not is_json and not page.problem:
        checked = count_of(page.checked, "line")
        screen.say(f"{checked} checked: the log is whole" if page.checked else "nothing was changed yet")


def _line(entry: AuditEntry) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at_s))
    detail = " ".join(f"{name}={value}" for name, value in entry.detail.items() if value)
    parts = (
        when,
        entry.who,
        entry.action,
        entry.target,
        detail,
        "" if entry.result == "done" else entry.result,
    )
    return "  ".join(part for part in parts if part)

"""`shardcompute events`, `usage` and `audit`: what happened in a cluster, what was asked of it, who changed what."""

from __future__ import annotations

import dataclasses
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.format import parse_duration
from shardcompute.cli.options.cluster import cluster_folder
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options
from shardcompute.core.errors import SourceError
from shardcompute.core.settings import load_settings
from shardcompute.core.units import count_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardcompute.cluster_client import ClusterClient
    from shardcompute.node.telemetry.audit import AuditEntry, AuditPage
    from shardcompute.node.telemetry.history_store import EventView
    from shardcompute.node.telemetry.usage import UsageView

_PAGE = 1000


class UsageSpan(StrEnum):
    HOUR = "hour"
    DAY = "day"
    ALL = "all"


Since = Annotated[
    float,
    typer.Option(
        "--since", metavar="TIME", parser=parse_duration, help="How far back, such as 30m, 1h, 7d or 2w."
    ),
]


@with_options
def events(
    *,
    since: Since = "1d",  # type: ignore[assignment]
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="The last N of them.")
    ] = 200,
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """What happened in a cluster, oldest first: who came and went, what was fetched, moved and repaired.

    Kept by the first machine, also across restarts. With --json one object per line. `status --watch` shows what
    happens now.
    """
    screen = open_screen()
    with at.connect() as client:
        found, problem = _events_since(client, time.time() - since, limit)
    _warn(screen, problem)
    for event in reversed(found):
        if json:
            screen.write_json(dataclasses.asdict(event))
        else:
            screen.write(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(event.at_s))}  {event.text}\n")
    if not found and not json:
        screen.say("nothing happened in that time")


@with_options
def usage(
    *,
    since: Since = "7d",  # type: ignore[assignment]
    by: Annotated[
        UsageSpan,
        typer.Option(
            "--by", metavar="|".join(UsageSpan), help="Sums of each hour, each day, or of all of it."
        ),
    ] = UsageSpan.ALL,
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """Tokens by API key and model, from the history, which outlives a restart."""
    from shardcompute.node.telemetry.history_store import DAY_S
    from shardcompute.node.telemetry.usage import HOUR_S

    screen = open_screen()
    with at.connect() as client:
        found, problem = _usage_since(client, time.time() - since, DAY_S if by is UsageSpan.DAY else HOUR_S)
    _warn(screen, problem)
    rows = _summed(found) if by is UsageSpan.ALL else sorted(found, key=lambda each: (each.start_s, each.key))
    headings = (*(() if by is UsageSpan.ALL else ("FROM",)), "KEY", "MODEL", "REQUESTS", "PROMPT", "ANSWER")

    def row(each: UsageView) -> tuple[str, ...]:
        start = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.start_s))
        counts = (each.requests, each.prompt_tokens, each.generated_tokens)
        return (*(() if by is UsageSpan.ALL else (start,)), each.key or "-", each.model, *map(str, counts))

    screen.write_records(rows, headings, row, is_json=json, nothing="nothing was asked in that time")


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
        found = _gather_audit(lambda before, count: AuditLog(folder).page(before=before, limit=count), limit)
    else:
        with address.connect() as client:
            found = _gather_audit(lambda before, count: client.audit(before=before, limit=count), limit)
    _show_audit(screen, found, is_json=json)
    if found.problem:
        raise SourceError(
            f"the audit log is not whole: {found.problem}",
            hint="compare it with a copy; from here on it cannot be relied on",
        )


def _gather_audit(ask: Callable[[int, int], AuditPage], limit: int) -> AuditPage:
    page = ask(0, min(limit, _PAGE))
    entries = list(page.data)
    following = page.next
    while following is not None and len(entries) < limit:
        more = ask(following, min(limit - len(entries), _PAGE))
        entries += more.data
        following = more.next
    return dataclasses.replace(page, data=tuple(entries))


def _show_audit(screen: Screen, page: AuditPage, *, is_json: bool) -> None:
    import msgspec

    for entry in reversed(page.data):
        if is_json:
            screen.write_json(msgspec.to_builtins(entry))
        else:
            screen.write(f"{_audit_line(entry)}\n")
    if not is_json and not page.problem:
        checked = count_of(page.checked, "line")
        screen.say(f"{checked} checked: the log is whole" if page.checked else "nothing was changed yet")


def _audit_line(entry: AuditEntry) -> str:
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


def _events_since(client: ClusterClient, since_s: float, limit: int) -> tuple[list[EventView], str]:
    """Newest first, and what is wrong with the history."""
    from shardcompute.node.telemetry.history_store import HistoryRange

    found: list[EventView] = []
    before: int | None = 0
    problem = ""
    while before is not None and len(found) < limit:
        wanted = HistoryRange(since_s=since_s, before=before, limit=min(_PAGE, limit - len(found)))
        page = client.event_history(wanted)
        found += page.data
        before, problem = page.next, page.problem
    return found, problem


def _usage_since(client: ClusterClient, since_s: float, span_s: int) -> tuple[list[UsageView], str]:
    from shardcompute.node.telemetry.history_store import HistoryRange

    found: list[UsageView] = []
    before: int | None = 0
    problem = ""
    while before is not None:
        page = client.usage_history(HistoryRange(since_s=since_s, before=before, limit=_PAGE), span_s=span_s)
        found += page.data
        before, problem = page.next, page.problem
    return found, problem


def _summed(found: list[UsageView]) -> list[UsageView]:
    from shardcompute.node.telemetry.usage import add_usage

    sums: dict[tuple[str, str], UsageView] = {}
    for each in reversed(found):
        pair = (each.key, each.model)
        whole = dataclasses.replace(each, span_s=0)
        sums[pair] = add_usage(sums[pair], whole) if pair in sums else whole
    return [sums[pair] for pair in sorted(sums)]


def _warn(screen: Screen, problem: str) -> None:
    if problem:
        screen.say(problem, "yellow")

"""`shardcompute events` and `usage`: what happened in a cluster and what was asked of it, from its history."""

from __future__ import annotations

import dataclasses
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.format import parse_duration
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient
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

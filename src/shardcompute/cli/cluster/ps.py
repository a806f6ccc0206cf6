"""`shardcompute ps`: what a cluster is answering."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import open_screen
from shardcompute.cli.format import format_duration, parse_duration
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient
    from shardcompute.node.telemetry.request_log import RequestView


@with_options
def ps(
    *,
    since: Annotated[
        float | None,
        typer.Option(
            "--since",
            metavar="TIME",
            parser=parse_duration,
            help="Those that ended within this time, such as 1h or 7d, from the history, which outlives a restart.",
        ),
    ] = None,
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """The requests that a cluster is answering, and the last ones that it answered."""
    from shardcompute.cli.cluster.text import mixed_chains

    screen = open_screen()
    with at.connect() as client:
        requests = client.requests() if since is None else list(_ended(client, time.time() - since))
        mixed = [] if json else mixed_chains(client.state())
    headings = ("ID", "MODEL", "CHAIN", "STATE", "PROMPT", "ANSWER", "TIME", "SPEED")
    screen.write_records(requests, headings, _row, is_json=json, nothing="nothing has been asked yet")
    for line in mixed:
        screen.say(line, "yellow")


def _ended(client: ClusterClient, since_s: float) -> Iterator[RequestView]:
    from shardcompute.node.telemetry.history_store import HistoryRange

    before: int | None = 0
    while before is not None:
        page = client.request_history(HistoryRange(since_s=since_s, before=before, limit=1000))
        yield from page.data
        before = page.next


def _row(request: RequestView) -> tuple[str, ...]:
    from shardcompute.core.units import format_rate

    how = request.error or (request.finish if request.state == "done" else "")
    return (
        request.id,
        request.model,
        request.chain,
        f"{request.state} ({how})" if how else request.state,
        str(request.prompt_tokens),
        str(request.generated_tokens),
        format_duration(request.elapsed_s),
        format_rate(request.tokens_per_s) if request.tokens_per_s else "-",
    )

"""`shardcompute ps`: what a cluster is answering."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import open_screen
from shardcompute.cli.format import format_duration
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options

if TYPE_CHECKING:
    from shardcompute.node.telemetry.request_log import RequestView


@with_options
def ps(*, json: Json = False, at: ClusterLocation) -> None:
    """The requests that a cluster is answering, and the last ones that it answered."""
    screen = open_screen()
    with at.connect() as client:
        requests = client.requests()
    headings = ("ID", "MODEL", "CHAIN", "STATE", "PROMPT", "ANSWER", "TIME", "SPEED")
    screen.write_records(requests, headings, _row, is_json=json, nothing="nothing has been asked yet")


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

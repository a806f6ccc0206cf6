"""`shardcompute drain`: empty a node and let it leave."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.cluster.completion import complete_nodes
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.records import with_options
from shardcompute.cli.progress import waiting


@with_options
def drain(
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE",
            help="Its name, its id, or the beginning of its id.",
            autocompletion=complete_nodes,
        ),
    ],
    at: ClusterLocation,
) -> None:
    """Move everything off a machine without interrupting anybody, then let it leave.

    Waits until it has left. Ctrl-C stops the waiting, not the moving.
    """
    from shardcompute.cli.cluster.following import follow_drain

    screen = open_screen()
    with at.connect() as client:
        asked = client.drain_node(node)
        with waiting(screen, f"emptying {asked.name}") as progress:
            status = follow_drain(client.watch(), asked.id, progress)
    if status == "lost":
        screen.say(f"{asked.name} was lost before it was empty; what it held is being moved", "yellow")
    else:
        screen.say(f"{asked.name} is empty and has left")

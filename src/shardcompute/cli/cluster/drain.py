"""`shardcompute drain`: empty a node and let it leave."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.cluster.access import ApiKey, DataDir, Url, open_cluster
from shardcompute.cli.cluster.completion import complete_nodes
from shardcompute.cli.console import open_screen
from shardcompute.cli.progress import waiting


def drain(
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE",
            help="Its name, its id, or the beginning of its id.",
            autocompletion=complete_nodes,
        ),
    ],
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Move everything off a machine without interrupting anybody, then let it leave.

    Waits until it has left. Ctrl-C stops the waiting, not the moving.
    """
    from shardcompute.cli.cluster.following import follow_drain

    screen = open_screen()
    with open_cluster(url, api_key, data_dir) as client:
        asked = client.drain_node(node)
        with waiting(screen, f"emptying {asked.name}") as progress:
            status = follow_drain(client.watch(), asked.id, progress)
    if status == "lost":
        screen.say(f"{asked.name} was lost before it was empty; what it held is being moved", "yellow")
    else:
        screen.say(f"{asked.name} is empty and has left")

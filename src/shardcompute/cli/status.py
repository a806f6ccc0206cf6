"""`shardcompute status`: a cluster on one screen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster_access import ApiKey, DataDir, Url, open_cluster
from shardcompute.cli.console import Screen, open_screen, without_controls
from shardcompute.cli.options import Json

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient
    from shardcompute.node.views import ClusterView


def status(
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on showing it until Ctrl-C.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """What a cluster serves, from which machines, and how busy it is.

    Every chain is drawn as a row that is cut where its layers are. With --json --watch every change is a line.
    """
    screen = open_screen()

    def show(view: ClusterView) -> None:
        if json:
            screen.write_json(dataclasses.asdict(view))
        else:
            screen.write("".join(f"{line}\n" for line in _lines(view, screen)))

    with open_cluster(url, api_key, data_dir) as client:
        if not watch:
            show(client.state())
        elif screen.out.is_terminal and not json:
            _redraw(client, screen)
        else:
            _follow(client, show)


def _lines(view: ClusterView, screen: Screen) -> list[str]:
    from shardcompute.cli.cluster_text import describe_cluster

    return describe_cluster(view, min(screen.out.width, 120))


def _follow(client: ClusterClient, show: Callable[[ClusterView], None]) -> None:
    try:
        for view in client.watch():
            show(view)
    except KeyboardInterrupt:
        return


def _redraw(client: ClusterClient, screen: Screen) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=screen.out, auto_refresh=False, vertical_overflow="crop") as live:
        _follow(
            client,
            lambda view: live.update(
                Text(without_controls("\n".join(_lines(view, screen))), no_wrap=True), refresh=True
            ),
        )

"""`shardcompute status`: a cluster on one screen."""

from __future__ import annotations

import dataclasses

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.output import Json, Watch
from shardcompute.cli.options.records import with_options


@with_options
def status(
    *,
    json: Json = False,
    watch: Watch = False,
    at: ClusterLocation,
) -> None:
    """What a cluster serves, from which machines, and how busy it is.

    Every chain is drawn as a row that is cut where its layers are. On a terminal it fits one screen: what does not,
    is told in fewer words. With --watch also what happened last; with --json --watch every change is a line.
    """
    from shardcompute.cli.cluster import watching
    from shardcompute.cli.cluster.text import describe_cluster, describe_watched

    screen = open_screen()
    picture = watching.Drawing(describe_watched if watch else describe_cluster, dataclasses.asdict)
    with at.connect() as client:
        if watch:
            watching.watch(client, picture, screen, is_json=json)
        else:
            watching.show_once(client.state(), picture, screen, is_json=json)

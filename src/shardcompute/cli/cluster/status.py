"""`shardcompute status`: a cluster on one screen."""

from __future__ import annotations

import dataclasses

from shardcompute.cli.cluster.access import ApiKey, DataDir, Url, open_cluster
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.common import Json, Watch


def status(
    json: Json = False,
    watch: Watch = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """What a cluster serves, from which machines, and how busy it is.

    Every chain is drawn as a row that is cut where its layers are. On a terminal it fits one screen: what does not,
    is told in fewer words. With --json --watch every change is a line.
    """
    from shardcompute.cli.cluster import watching
    from shardcompute.cli.cluster.text import describe_cluster

    screen = open_screen()
    picture = watching.Picture(describe_cluster, dataclasses.asdict)
    with open_cluster(url, api_key, data_dir) as client:
        if watch:
            watching.watch(client, picture, screen, is_json=json)
        else:
            watching.show_once(client.state(), picture, screen, is_json=json)

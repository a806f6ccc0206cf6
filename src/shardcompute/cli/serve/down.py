"""`shardcompute down`: stop what was started from a folder."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options.cluster import ClusterFolder, cluster_folder
from shardcompute.core.settings import load_settings


def down(
    data_dir: ClusterFolder = None,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="How long to wait before using force.")
    ] = 20.0,
) -> None:
    """Stop the cluster that was started from this folder, or the worker or driver that runs from it.

    Requests that are being answered get a few seconds to end. A process that does not stop in time is killed.
    """
    from shardcompute.node.process.pidfile import (
        CLUSTER_FILE,
        DRIVER_FILE,
        PLACES_FILE,
        WORKER_FILE,
        read_running,
        stop_process,
    )

    screen = open_screen()
    folder = cluster_folder(load_settings(), data_dir)
    is_found = False
    # Who keeps workers running comes before those whom it would start again.
    for file in (CLUSTER_FILE, PLACES_FILE, WORKER_FILE, DRIVER_FILE):
        running = read_running(folder / file)
        if running is None:
            continue
        is_found = True
        screen.say(f"stopping pid {running.pid}" + (f" at {running.api_url}" if running.api_url else ""))
        forced = stop_process(running, folder, grace)
        if forced:
            screen.say(f"killed after {grace:g} s: pid {', '.join(map(str, forced))}", "yellow")
    screen.say("stopped" if is_found else f"nothing is running from {folder}")

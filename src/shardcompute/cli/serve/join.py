"""`shardcompute join`: become a worker of somebody's cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options.engine import check_device
from shardcompute.cli.options.records import with_options
from shardcompute.cli.options.worker import WorkerArguments, WorkerFolder, worker_folder
from shardcompute.cli.serve.places import choose_for, join_places, serve_places
from shardcompute.core.settings import load_settings


@with_options
def join(
    token: Annotated[
        str, typer.Argument(metavar="TOKEN", help="The token that `shardcompute up` prints; starts with sc1.")
    ],
    *,
    data_dir: WorkerFolder = None,
    arguments: WorkerArguments,
) -> None:
    """Join a cluster with a token and serve as one of its workers until Ctrl-C.

    Computes on the GPUs of this machine, each of which is a worker, or on its CPU if it has none; --device chooses.
    The token is needed once: later, `shardcompute worker` with the same folder goes back to the same cluster.
    """
    from shardcompute.node.process.pidfile import PLACES_FILE, WORKER_FILE, check_free
    from shardcompute.security.tokens import parse_token

    screen = open_screen()
    parsed = parse_token(token)
    folder = worker_folder(load_settings(), data_dir)
    check_device(arguments.device, arguments.backend)
    for file in (PLACES_FILE, WORKER_FILE):
        check_free(folder / file)
    places = join_places(folder, choose_for(arguments), parsed)
    ids = ", ".join(member.credentials.identity.node_id for member in places.members)
    screen.say(f"joined {parsed.cluster} as {ids}")
    serve_places(places, arguments, screen)

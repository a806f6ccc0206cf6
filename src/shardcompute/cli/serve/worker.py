"""`shardcompute worker`: serve as a worker of a cluster that was joined before."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options.engine import check_device
from shardcompute.cli.options.records import with_options
from shardcompute.cli.options.worker import WorkerArguments, WorkerFolder, given_token, worker_folder
from shardcompute.cli.serve.places import (
    are_all_joined,
    choose_for,
    join_places,
    open_places,
    serve_places,
    serving_of,
)
from shardcompute.cli.serve.worker_process import run_worker
from shardcompute.core.phases import note_imports
from shardcompute.core.settings import load_settings


@with_options
def worker(
    *,
    data_dir: WorkerFolder = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            help="Join with this token if nothing has been joined yet; - reads it from standard input.",
        ),
    ] = None,
    arguments: WorkerArguments,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Serve as a worker until Ctrl-C, in a cluster that was joined from this folder before.

    Finds its coordinator by itself, waits for it while it is away, and keeps the weights that it has fetched. Computes
    where `join` would, as far as those devices have joined.
    """
    from shardcompute.security.tokens import parse_token

    note_imports()
    token = given_token(token)
    check_device(arguments.device, arguments.backend)
    screen, folder = open_screen(), worker_folder(load_settings(), data_dir)
    chosen = choose_for(arguments)
    if token is not None and not are_all_joined(folder, chosen):
        places = join_places(folder, chosen, parse_token(token))
    else:
        places = open_places(folder, chosen, screen.say)
    if supervised:
        serving = serving_of(arguments)
        run_worker(folder, serving, chosen, places.members[0], screen, is_supervised=True)
    serve_places(places, arguments, screen)

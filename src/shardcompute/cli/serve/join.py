"""`shardcompute join`: become a worker of somebody's cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options import cluster as swarm_options
from shardcompute.cli.options import common as options
from shardcompute.cli.options.common import Backend
from shardcompute.cli.serve.shaping import Shape
from shardcompute.cli.serve.worker import Advertise, Host, Name, Port, WorkerPlan, run_worker
from shardcompute.core.settings import load_settings


def join(
    token: Annotated[
        str, typer.Argument(metavar="TOKEN", help="The token that `shardcompute up` prints; starts with sc1.")
    ],
    data_dir: swarm_options.WorkerFolder = None,
    host: Host = None,
    port: Port = 0,
    advertise: Advertise = None,
    name: Name = None,
    max_memory: swarm_options.MaxMemory = None,
    threads: options.Threads = None,
    backend: options.BackendName = Backend.ONNX,
    device: options.Device = "cpu",
    shape: Shape = None,
) -> None:
    """Join a cluster with a token and serve as one of its workers until Ctrl-C.

    The token is needed once: later, `shardcompute worker` with the same folder goes back to the same cluster.
    """
    from shardcompute.node.enrolment.stored import join_from
    from shardcompute.node.process.pidfile import WORKER_FILE, check_free
    from shardcompute.security.tokens import parse_token

    screen = open_screen()
    parsed = parse_token(token)
    folder = swarm_options.worker_folder(load_settings(), data_dir)
    plan = WorkerPlan(folder, host, port, advertise, name, max_memory, threads, backend, device, shape)
    check_free(folder / WORKER_FILE)
    member = join_from(folder, parsed)
    screen.say(f"joined {parsed.cluster} as {member.credentials.identity.node_id}")
    run_worker(plan, member, screen)

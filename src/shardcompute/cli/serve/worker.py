"""`shardcompute worker`: serve as a worker of a cluster that was joined before."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.exits import show_error
from shardcompute.cli.options import cluster as swarm_options
from shardcompute.cli.options import common as options
from shardcompute.cli.options.common import Backend, check_device
from shardcompute.cli.serve.addresses import address_towards, check_ports, is_any_address
from shardcompute.cli.serve.shaping import Shape, open_transports
from shardcompute.cli.serve.stopping import exit_at_once, stop_requested, stop_with_parent
from shardcompute.core.errors import AuthError
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.node.enrolment.stored import EnrolledNode
    from shardcompute.node.worker.worker import Worker, WorkerOptions

_LOOK_S = 0.5

Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address to listen on, by default the one that this machine uses towards the coordinator.",
    ),
]
Port = Annotated[
    int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to listen on; 0 for any free one.")
]
Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise", metavar="HOST", help="Name or address under which other nodes reach this worker."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="What people call this worker, by default the machine's name."
    ),
]


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """How a worker is to take part; None: chosen from what the machine is."""

    folder: Path
    host: str | None
    port: int
    advertise: str | None
    name: str | None
    max_memory_bytes: int | None
    threads: int | None
    backend: Backend
    device: str
    shape: str | None = None

    def __post_init__(self) -> None:
        check_device(self.device, self.backend)

    def options(self, member: EnrolledNode) -> WorkerOptions:
        from shardcompute.node.local.service import default_threads
        from shardcompute.node.worker.worker import WorkerOptions

        own = address_towards(member.control_urls[0])
        host = self.host or own
        return WorkerOptions(
            folder=self.folder,
            host=host,
            port=self.port,
            advertise=self.advertise or (own if is_any_address(host) else host),
            name=self.name or "",
            max_memory_bytes=self.max_memory_bytes,
            threads=self.threads or load_settings().threads or default_threads(),
            backend=self.backend.value,
            device=self.device,
            transports=open_transports(self.shape),
        )


def worker(
    data_dir: swarm_options.WorkerFolder = None,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="TOKEN", help="Join with this token if nothing has been joined yet."),
    ] = None,
    host: Host = None,
    port: Port = 0,
    advertise: Advertise = None,
    name: Name = None,
    max_memory: swarm_options.MaxMemory = None,
    threads: options.Threads = None,
    backend: options.BackendName = Backend.ONNX,
    device: options.Device = "cpu",
    shape: Shape = None,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Serve as a worker until Ctrl-C, in a cluster that was joined from this folder before.

    Finds its coordinator by itself, waits for it while it is away, and keeps the weights that it has fetched.
    """
    from shardcompute.node.enrolment.stored import MEMBER_FILE, join_from, open_enrolled
    from shardcompute.security.tokens import parse_token

    folder = swarm_options.worker_folder(load_settings(), data_dir)
    plan = WorkerPlan(folder, host, port, advertise, name, max_memory, threads, backend, device, shape)
    is_new = token is not None and not (folder / MEMBER_FILE).exists()
    member = join_from(folder, parse_token(token)) if is_new and token is not None else open_enrolled(folder)
    run_worker(plan, member, open_screen(), is_supervised=supervised)


def run_worker(
    plan: WorkerPlan, member: EnrolledNode, screen: Screen, *, is_supervised: bool = False
) -> NoReturn:
    """Until a signal, the coordinator or (`is_supervised`) the end of our parent asks to stop."""
    from shardcompute.node.process.log_files import logging_to_file, logging_to_stderr
    from shardcompute.node.process.pidfile import WORKER_FILE, claim

    with ExitStack() as stack:
        stop = stack.enter_context(stop_requested())
        stack.enter_context(claim(plan.folder / WORKER_FILE, plan.name or ""))
        stack.enter_context(logging_to_stderr(is_brief=not is_supervised))
        if is_supervised:
            stop_with_parent(stop)
        else:
            stack.enter_context(logging_to_file(plan.folder, "worker"))
        options = plan.options(member)
        if options.port:
            check_ports([(options.host, options.port)])
        if not is_supervised:
            screen.say(f"a worker of {member.credentials.own.cluster}; Ctrl-C stops it")
        code = _serve(member, options, stop, screen)
    exit_at_once(code)


def _serve(member: EnrolledNode, options: WorkerOptions, stop: Event, screen: Screen) -> int:
    """The exit code: 0 unless the coordinator will not have us any more."""
    from shardcompute.node.driver.host import DriverHost
    from shardcompute.node.worker.worker import Worker

    with closing(Worker(member.credentials, list(member.control_urls), options, DriverHost)) as serving:
        while not stop.wait(_LOOK_S):
            if serving.refusal:
                refused = AuthError(
                    f"the coordinator refuses this worker: {serving.refusal}",
                    hint="ask for a new token and join again",
                )
                show_error(screen, refused)
                return refused.exit_code
            if serving.has_left:
                screen.say("the coordinator has released this worker")
                return 0
        _take_leave(serving, screen)
    screen.say("stopped")
    return 0


def _take_leave(serving: Worker, screen: Screen) -> None:
    """Until others have taken over, or for a few seconds; another Ctrl-C ends that."""
    try:
        screen.say("leaving the cluster; Ctrl-C again leaves at once")
        serving.leave()
    except KeyboardInterrupt:
        serving.leave(patience_s=0.0)

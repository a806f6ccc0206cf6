"""A worker in this process: from its folder until a signal, the coordinator, or the end of its parent stops it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from shardcompute.cli.console import Screen
from shardcompute.cli.exits import show_error
from shardcompute.cli.options.worker import WorkerArguments
from shardcompute.cli.progress import status_line
from shardcompute.cli.serve import story
from shardcompute.cli.serve.addresses import check_ports, is_loopback, node_addresses
from shardcompute.cli.serve.shaping import open_transports
from shardcompute.cli.serve.stopping import exit_at_once, stop_requested, stop_with_parent
from shardcompute.core.errors import AuthError
from shardcompute.core.phases import log_phases, phase
from shardcompute.core.settings import check_download_rate, load_settings

if TYPE_CHECKING:
    from shardcompute.backends.device_choice import ChosenDevices
    from shardcompute.node.enrolment.stored import EnrolledNode
    from shardcompute.node.worker.worker import Worker, WorkerOptions

_LOOK_S = 0.5


def run_worker(
    folder: Path,
    arguments: WorkerArguments,
    chosen: ChosenDevices,
    member: EnrolledNode,
    screen: Screen,
    *,
    is_supervised: bool = False,
    tell: Callable[[str], None] | None = None,
) -> NoReturn:
    """Until a signal, the coordinator or (`is_supervised`) the end of our parent asks to stop. `tell` hears the story
    of the worker; by default the screen does, unless it is supervised."""
    from shardcompute.node.process.log_files import logging_to_file, logging_to_stderr
    from shardcompute.node.process.pidfile import WORKER_FILE, claim

    with ExitStack() as stack:
        stop = stack.enter_context(stop_requested())
        stack.enter_context(claim(folder / WORKER_FILE, arguments.name or ""))
        stack.enter_context(logging_to_stderr(is_brief=not is_supervised))
        if is_supervised:
            stop_with_parent(stop)
        else:
            stack.enter_context(logging_to_file(folder, "worker"))
        log_phases()
        options = _worker_options(folder, arguments, chosen, member)
        if options.port:
            check_ports([(options.host, options.port)])
        if not is_supervised:
            for line in chosen.describe():
                screen.say(line)
            screen.say(f"a worker of {member.credentials.own.cluster}; Ctrl-C stops it")
        telling = tell or (None if is_supervised else screen.say)
        code = _serve(member, options, stop, screen, telling)
    exit_at_once(code)


def _worker_options(
    folder: Path, arguments: WorkerArguments, chosen: ChosenDevices, member: EnrolledNode
) -> WorkerOptions:
    from shardcompute.node.local.service import default_threads
    from shardcompute.node.worker.memory.promise import check_promise, measure_process_bytes
    from shardcompute.node.worker.worker import WorkerOptions

    device, settings = chosen.devices[0], load_settings()
    check_download_rate(arguments.download_rate)
    # A GPU's own memory has no process in it.
    process_bytes = measure_process_bytes(device.backend) if device.is_host_memory else 0
    if arguments.max_memory is not None:
        check_promise(arguments.max_memory, process_bytes)
    host, advertise = node_addresses(member.control_urls[0], arguments.host, arguments.advertise)
    return WorkerOptions(
        folder=folder,
        host=host,
        port=arguments.port,
        advertise=advertise,
        name=arguments.name or "",
        max_memory_bytes=arguments.max_memory,
        process_bytes=process_bytes,
        threads=arguments.threads or settings.threads or default_threads(),
        device=device,
        unused=chosen.unused,
        transports=open_transports(arguments.shape),
        # The coordinator's own driver is as near, and shares no process with what computes.
        may_host=not _is_beside(member.control_urls[0], advertise or host),
        # Whoever shapes links wants to see what goes over them.
        reads_originals=not arguments.shape,
        sources=replace(settings, download_rate=arguments.download_rate or settings.download_rate),
    )


def _is_beside(control_url: str, own_host: str) -> bool:
    """Whether the coordinator is on this machine."""
    host = urlsplit(control_url).hostname or ""
    return is_loopback(host) or host == own_host


def _serve(
    member: EnrolledNode,
    options: WorkerOptions,
    stop: Event,
    screen: Screen,
    tell: Callable[[str], None] | None,
) -> int:
    """The exit code: 0 unless the coordinator will not have us any more. `tell`: people watch."""
    with phase("imports of the worker"):
        from shardcompute.node.driver.hosted_server import DriverHost
        from shardcompute.node.worker.worker import Worker

    with (
        closing(Worker(member.credentials, list(member.control_urls), options, DriverHost)) as serving,
        status_line(screen if tell == screen.say else None) as show,
    ):
        first = serving.view()
        seen = replace(first, is_registered=False, was_registered=False, loading=(), held=(), problem="")
        if tell is not None:
            tell(story.opening(first))
        while not stop.wait(_LOOK_S):
            if tell is not None:
                now = serving.view()
                for line in story.next_lines(seen, now):
                    tell(line)
                show(story.activity_line(now))
                seen = now
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

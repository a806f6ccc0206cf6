"""A worker in this process: from its folder until a signal, the coordinator, or the end of its parent stops it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from shardcompute.cli.console import Screen
from shardcompute.cli.failures import show_error
from shardcompute.cli.progress import status_line
from shardcompute.cli.serve import story
from shardcompute.cli.serve.addresses import check_ports, is_loopback, node_addresses
from shardcompute.cli.serve.shaping import open_transports
from shardcompute.cli.stopping import exit_at_once, stop_requested, stop_with_parent
from shardcompute.core.errors import AuthError
from shardcompute.core.phases import log_phases, phase
from shardcompute.core.settings import check_download_rate, load_settings
from shardcompute.node.worker.conditions.policy import WorkConditions
from shardcompute.node.worker.power.terms import PowerTerms

if TYPE_CHECKING:
    from shardcompute.backends.device_choice import ChosenDevices
    from shardcompute.node.enrolment.stored import EnrolledNode
    from shardcompute.node.worker.worker import Worker, WorkerOptions

_LOOK_S = 0.5
STORY = "story: "
"""Begins lines of a child that are for whoever started its parent."""


@dataclass(frozen=True, slots=True)
class WorkerServing:
    """How a worker is to serve; None: chosen from what the machine is."""

    host: str | None = None
    port: int = 0
    advertise: str | None = None
    name: str | None = None
    max_memory: int | None = None
    max_download: int | None = None
    max_upload: int | None = None
    conditions: WorkConditions = field(default_factory=WorkConditions)
    no_seed: bool = False
    power: PowerTerms = field(default_factory=PowerTerms)
    threads: int | None = None
    shape: str | None = None


def tell_parent(line: str) -> None:
    sys.stderr.write(f"{STORY}{line}\n")
    sys.stderr.flush()


def run_worker(
    folder: Path,
    serving: WorkerServing,
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
        stack.enter_context(claim(folder / WORKER_FILE, serving.name or ""))
        stack.enter_context(logging_to_stderr(is_brief=not is_supervised))
        if is_supervised:
            stop_with_parent(stop)
        else:
            stack.enter_context(logging_to_file(folder, "worker"))
        log_phases()
        options = _worker_options(folder, serving, chosen, member)
        if options.port:
            check_ports([(options.host, options.port)])
        if not is_supervised:
            for line in chosen.describe():
                screen.say(line)
            screen.say(f"a worker of {member.credentials.own.cluster}; Ctrl-C stops it")
        _say_unsaid(serving.conditions, screen)
        telling = tell or (None if is_supervised else screen.say)
        code = _serve(member, options, stop, screen, telling)
    exit_at_once(code)


def _say_unsaid(conditions: WorkConditions, screen: Screen) -> None:
    if conditions.has_any:
        from shardcompute.node.worker.conditions.watch import unsaid_here

        for line in unsaid_here(conditions):
            screen.say(line, "yellow")


def _worker_options(
    folder: Path, serving: WorkerServing, chosen: ChosenDevices, member: EnrolledNode
) -> WorkerOptions:
    from shardcompute.backends.processor import default_threads
    from shardcompute.node.discovery.again import coordinator_finder, holder_finder
    from shardcompute.node.enrolment.stored import authority_of
    from shardcompute.node.weights.seeding import seed_room
    from shardcompute.node.worker.memory.promise import check_promise, measure_process_bytes
    from shardcompute.node.worker.worker import WorkerOptions

    device, settings = chosen.devices[0], load_settings()
    check_download_rate(serving.max_download)
    check_download_rate(serving.max_upload)
    # A GPU's own memory has no process in it.
    process_bytes = measure_process_bytes(device.backend) if device.is_host_memory else 0
    if serving.max_memory is not None:
        check_promise(serving.max_memory, process_bytes)
    host, advertise = node_addresses(member.control_urls, serving.host, serving.advertise)
    is_beside = _is_beside(member.control_urls[0], advertise or host)
    return WorkerOptions(
        folder=folder,
        host=host,
        port=serving.port,
        advertise=advertise,
        name=serving.name or "",
        max_memory_bytes=serving.max_memory,
        process_bytes=process_bytes,
        threads=serving.threads or settings.threads or default_threads(),
        device=device,
        unused=chosen.unused,
        transports=open_transports(serving.shape),
        # The coordinator's own driver is as near, and shares no process with what computes.
        may_host=not is_beside,
        # Whoever shapes links wants to see what goes over them.
        reads_originals=not serving.shape,
        sources=replace(settings, download_rate=serving.max_download or settings.download_rate),
        follows_address=serving.host is None and serving.advertise is None,
        find_again=coordinator_finder(
            authority_of(member.credentials), member.credentials.authority_pem, settings.dht
        ),
        find_holders=holder_finder(member.credentials.authority_pem, settings.dht),
        max_upload=serving.max_upload,
        conditions=serving.conditions,
        power=serving.power,
        # Beside the coordinator the disk that weights come from is as near.
        seed_bytes=0 if serving.no_seed or is_beside else seed_room(folder),
    )


def _is_beside(control_url: str, own_host: str) -> bool:
    """Whether the coordinator is on this machine."""
    host = urlsplit(control_url).hostname or ""
    return is_loopback(host) or host == own_host.strip("[]")


def _serve(
    member: EnrolledNode,
    options: WorkerOptions,
    stop: Event,
    screen: Screen,
    tell: Callable[[str], None] | None,
) -> int:
    """The exit code: 0 unless the coordinator will not have us any more. `tell`: people watch."""
    with phase("imports of the worker"):
        from shardcompute.node.worker.worker import HostDrivers, Worker

        host_drivers: HostDrivers | None = None
        if options.may_host:
            from shardcompute.node.driver.hosted_server import DriverHost

            host_drivers = DriverHost

    with (
        closing(Worker(member.credentials, list(member.control_urls), options, host_drivers)) as worker,
        status_line(screen if tell == screen.say else None) as show,
    ):
        first = worker.view()
        seen = replace(first, is_registered=False, was_registered=False, loading=(), held=(), problem="")
        if tell is not None:
            tell(story.opening(first))
        while not stop.wait(_LOOK_S):
            if tell is not None:
                now = worker.view()
                for line in story.next_lines(seen, now):
                    tell(line)
                show(story.activity_line(now))
                seen = now
            if worker.refusal:
                refused = AuthError(
                    f"the coordinator refuses this worker: {worker.refusal}",
                    hint="ask for a new token and join again",
                )
                show_error(screen, refused)
                return refused.exit_code
            if worker.has_left:
                screen.say("the coordinator has released this worker")
                return 0
        _take_leave(worker, screen)
    screen.say("stopped")
    return 0


def _take_leave(worker: Worker, screen: Screen) -> None:
    """Until others have taken over, or for a few seconds; another Ctrl-C ends that."""
    try:
        screen.say("leaving the cluster; Ctrl-C again leaves at once")
        worker.leave()
    except KeyboardInterrupt:
        worker.leave(patience_s=0.0)

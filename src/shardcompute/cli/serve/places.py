"""Places of one machine: the devices on which `join` and `worker` compute, each a node with a folder of its own.

One place is a worker in this process, from the folder that was given. Several are child processes that are kept alive,
and taken along when this one goes: the first from that folder, the others from `places` in it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardcompute.cli.console import Screen
from shardcompute.cli.options.worker import WorkerArguments
from shardcompute.cli.serve.worker_process import STORY, WorkerServing, run_worker
from shardcompute.cli.stopping import exit_at_once, stop_requested
from shardcompute.core.settings import load_settings
from shardcompute.core.units import count_of
from shardcompute.node.worker.conditions.policy import WorkConditions
from shardcompute.node.worker.power.terms import PowerTerms

if TYPE_CHECKING:
    from shardcompute.backends.device_choice import ChosenDevices
    from shardcompute.node.enrolment.stored import EnrolledNode
    from shardcompute.node.process.local_workers import LocalWorker
    from shardcompute.node.process.supervisor import Program
    from shardcompute.security.tokens import JoinToken

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class EnrolledPlaces:
    """Devices that have joined, each with its folder and who it is in the cluster."""

    chosen: ChosenDevices
    folders: tuple[Path, ...]
    members: tuple[EnrolledNode, ...]


def choose_for(arguments: WorkerArguments) -> ChosenDevices:
    """What whoever started us has found, or what is found now."""
    from shardcompute.backends.device_choice import choose_devices
    from shardcompute.node.process.local_workers import decode_found

    if arguments.found is not None:
        return decode_found(arguments.found)
    return choose_devices(arguments.device, arguments.backend.value)


def join_places(
    folder: Path, chosen: ChosenDevices, token: JoinToken, through: str = "", evidence: bytes = b""
) -> EnrolledPlaces:
    """Join the token's cluster with every device that was chosen; the token is used once."""
    from shardcompute.node.enrolment.stored import join_all_from

    folders = _folders(folder, chosen)
    joined = join_all_from(folders, token, through=through, evidence=evidence)
    return EnrolledPlaces(chosen, folders, tuple(joined))


def open_places(folder: Path, chosen: ChosenDevices, say: Callable[[str], None]) -> EnrolledPlaces:
    """Those that have joined before. UsageError if the first has not; what is not used for that is said."""
    from shardcompute.node.enrolment.stored import MEMBER_FILE, open_enrolled

    folders = _folders(folder, chosen)
    known = [each == folder or (each / MEMBER_FILE).exists() for each in folders]
    for device, is_known in zip(chosen.devices, known, strict=True):
        if not is_known:
            say(
                f"{device.name} ({device.label}) is not used: it has not joined; shardcompute join TOKEN lets it in"
            )
    devices = tuple(device for device, is_known in zip(chosen.devices, known, strict=True) if is_known)
    kept = tuple(each for each, is_known in zip(folders, known, strict=True) if is_known)
    return EnrolledPlaces(replace(chosen, devices=devices), kept, tuple(map(open_enrolled, kept)))


def are_all_joined(folder: Path, chosen: ChosenDevices) -> bool:
    from shardcompute.node.enrolment.stored import MEMBER_FILE

    return all((each / MEMBER_FILE).exists() for each in _folders(folder, chosen))


def serving_of(arguments: WorkerArguments) -> WorkerServing:
    return WorkerServing(
        host=arguments.host,
        port=arguments.port,
        advertise=arguments.advertise,
        name=arguments.name,
        max_memory=arguments.max_memory,
        max_download=arguments.max_download,
        max_upload=arguments.max_upload,
        conditions=WorkConditions(
            only_when_idle=arguments.only_when_idle,
            only_on_mains=arguments.only_on_mains,
            not_metered=arguments.not_metered,
        ),
        no_seed=arguments.no_seed,
        power=PowerTerms(arguments.watts, arguments.price_hour),
        threads=arguments.threads,
        shape=arguments.shape,
    )


def serve_places(places: EnrolledPlaces, arguments: WorkerArguments, screen: Screen) -> NoReturn:
    """Serve as workers until a signal or the coordinator asks to stop."""
    if len(places.members) == 1:
        run_worker(places.folders[0], serving_of(arguments), places.chosen, places.members[0], screen)
    for line in places.chosen.describe():
        screen.say(line)
    exit_at_once(_supervise(places, arguments, screen))


def _supervise(places: EnrolledPlaces, arguments: WorkerArguments, screen: Screen) -> int:
    """The exit code: 0 unless no worker could serve."""
    from shardcompute.node.process.local_workers import PLACES_FOLDER, share_machine
    from shardcompute.node.process.log_files import logging_to_file, logging_to_stderr
    from shardcompute.node.process.pidfile import PLACES_FILE, claim
    from shardcompute.node.process.supervisor import Program, Supervisor

    folder = places.folders[0]
    shared = share_machine(
        places.chosen,
        count=len(places.members),
        threads=arguments.threads or load_settings().threads,
        max_memory_bytes=arguments.max_memory,
        title=arguments.name or "",
        power=PowerTerms(arguments.watts, arguments.price_hour),
    )
    programs = [
        Program(worker.name, _command(worker, place, number, arguments))
        for number, (worker, place) in enumerate(zip(shared.each, places.folders, strict=True))
    ]
    titles = {worker.name: worker.title for worker in shared.each}

    def hear(program: Program, line: str) -> None:
        if line.startswith(STORY):
            screen.say(f"{titles[program.name]}: {line.removeprefix(STORY)}")

    with ExitStack() as stack:
        stop = stack.enter_context(stop_requested())
        stack.enter_context(claim(folder / PLACES_FILE, arguments.name or ""))
        stack.enter_context(logging_to_stderr(is_brief=True))
        stack.enter_context(logging_to_file(folder, PLACES_FOLDER))
        cluster = places.members[0].credentials.own.cluster
        screen.say(
            f"{count_of(shared.count, 'worker')} of {cluster}: {', '.join(titles.values())}; Ctrl-C stops them"
        )
        supervisor = stack.enter_context(Supervisor(programs, folder, say=screen.say, hear=hear))
        while not supervisor.has_ended and not stop.wait(_LOOK_S):
            pass
        if not supervisor.has_ended:
            screen.say("leaving the cluster; Ctrl-C again leaves at once")
            supervisor.stop()
            screen.say("stopped")
            return 0
        codes = supervisor.codes()
    return min(codes.values(), default=0)


def _command(worker: LocalWorker, folder: Path, number: int, arguments: WorkerArguments) -> tuple[str, ...]:
    """Starts one of several workers. Of a port that was chosen, each has the next."""
    optional = (
        ("--host", arguments.host),
        ("--advertise", arguments.advertise),
        ("--port", str(arguments.port + number) if arguments.port else None),
        ("--shape", arguments.shape),
        ("--max-download", _text(arguments.max_download)),
        ("--max-upload", _text(arguments.max_upload)),
    )
    given = [part for name, value in optional if value is not None for part in (name, value)]
    flags = (
        ("--only-when-idle", arguments.only_when_idle),
        ("--only-on-mains", arguments.only_on_mains),
        ("--not-metered", arguments.not_metered),
        ("--no-seed", arguments.no_seed),
    )
    return (*worker.command(folder), "--told", *given, *(name for name, is_set in flags if is_set))


def _text(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else str(size_bytes)


def _folders(folder: Path, chosen: ChosenDevices) -> tuple[Path, ...]:
    from shardcompute.node.process.local_workers import PLACES_FOLDER, folder_name

    return (folder, *(folder / PLACES_FOLDER / folder_name(device) for device in chosen.devices[1:]))

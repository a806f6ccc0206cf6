"""`shardcompute launch ssh|slurm|ray`: start workers on machines that one already manages, and end them again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import open_screen
from shardcompute.cli.launch.invitation import (
    LaunchOutcome,
    Program,
    Stop,
    WorkerOptions,
    invite,
    parse_options,
    report,
    say_outcome,
)
from shardcompute.cli.options.records import with_options
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings
from shardcompute.core.units import count_of

app = typer.Typer(help="Start workers on machines that you already manage.", no_args_is_help=True)
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=5, max=3600, help="How long each machine may take."),
]


@app.command()
@with_options
def ssh(
    hosts: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Machines, one in a line: [user@]host[:port], perhaps with max-memory=8G and the like.",
        ),
    ],
    *,
    program: Program = "shardcompute",
    worker_options: WorkerOptions = "",
    folder: Annotated[
        str,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="Folder of the workers on those machines, below the home folder.",
        ),
    ] = ".local/share/shardcompute/launched",
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, max=64, help="Machines at the same time.")
    ] = 16,
    timeout: Timeout = 120.0,
    ssh_config: Annotated[
        Path | None,
        typer.Option(
            "--ssh-config", metavar="FILE", help="Configuration of ssh, if it is not the usual one."
        ),
    ] = None,
    stop: Stop = False,
    at: ClusterLocation,
) -> None:
    """Start a worker on every machine of a file, over ssh.

    Uses this system's ssh with your keys and agent; nothing is asked on the way, so a machine that wants a password or
    is not known fails. ShardCompute has to be installed there in this release. A machine on which the worker runs
    already is left alone.
    """
    from shardcompute.cli.launch.hosts import read_hosts
    from shardcompute.cli.launch.ssh_host import SshLauncher

    screen, listed = open_screen(), read_hosts(hosts)
    launcher = SshLauncher(program, folder, tuple(parse_options(worker_options)), ssh_config, timeout)
    token = "" if stop else invite(at, len(listed)).token
    say, outcomes = say_outcome(screen), list[LaunchOutcome]()
    screen.say(f"{'stopping' if stop else 'starting'} workers on {count_of(len(listed), 'machine')}")
    with ThreadPoolExecutor(min(parallel, len(listed))) as threads:
        begun = [
            threads.submit(launcher.stop, host) if stop else threads.submit(launcher.start, host, token)
            for host in listed
        ]
        for each in as_completed(begun):
            outcomes.append(each.result())
            say(outcomes[-1])
    report(outcomes, screen, "stopped" if stop else "started")


@app.command()
@with_options
def slurm(
    *,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=1024, help="Nodes, each of them a worker.")
    ] = 1,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            "--sbatch", metavar="OPTION", help="Option of sbatch, such as --partition=gpu; may be repeated."
        ),
    ] = None,
    program: Program = "shardcompute",
    worker_options: WorkerOptions = "",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="Folder of the workers, which all nodes share; by default `launched/slurm` in the data folder.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job's script and do nothing.")
    ] = False,
    stop: Stop = False,
    at: ClusterLocation,
) -> None:
    """Submit a Slurm job whose tasks are workers, one on each node.

    They join when Slurm starts the job; the token is good for an hour. Nodes have to reach the coordinator, which
    therefore listens beyond loopback.
    """
    from shardcompute.cli.launch.slurm_job import SlurmJob, stop_jobs

    screen = open_screen()
    place = (folder or load_settings().data_dir / "launched" / "slurm").absolute()
    if stop:
        jobs = stop_jobs(place)
        screen.say(f"ended job {', '.join(jobs)}" if jobs else f"no job was submitted from {place}")
        return
    options = tuple(parse_options(worker_options))
    job = SlurmJob(place, nodes, program, options, tuple(sbatch or ()))
    if dry_run:
        screen.write(job.script())
        return
    number = job.submit(invite(at, nodes).token)
    screen.say(
        f"job {number} is to start workers on {count_of(nodes, 'node')}; squeue --job {number} tells when"
    )
    screen.say(f"its log is in {place}; shardcompute launch slurm --stop ends it")


@app.command()
@with_options
def ray(
    *,
    address: Annotated[
        str,
        typer.Option("--address", metavar="ADDRESS", help="The Ray cluster; auto: the one of this machine."),
    ] = "auto",
    cpus: Annotated[
        float,
        typer.Option(
            "--cpus", metavar="N", min=0, help="Processors that Ray is to set aside for each worker."
        ),
    ] = 1.0,
    worker_options: WorkerOptions = "",
    folder: Annotated[
        str,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="Folder of the workers on the nodes; by default a new one for each.",
        ),
    ] = "",
    timeout: Timeout = 120.0,
    stop: Stop = False,
    at: ClusterLocation,
) -> None:
    """Start a worker on every node of a Ray cluster, each kept by a detached actor.

    ShardCompute and Ray have to be installed on the nodes in the releases that are used here.
    """
    from shardcompute.cli.launch.ray_workers import (
        alive_nodes,
        connect,
        import_ray,
        start_workers,
        stop_workers,
    )

    screen, options = open_screen(), parse_options(worker_options)
    library = import_ray()
    connect(library, address)
    say, outcomes = say_outcome(screen), list[LaunchOutcome]()
    try:
        if stop:
            found = stop_workers(library)
        else:
            count = len(alive_nodes(library))
            if not count:
                raise UsageError("the Ray cluster has no nodes", hint="start it, or give --address")
            token = invite(at, count).token
            found = start_workers(library, token, options, folder=folder, cpus=cpus, timeout_s=timeout)
        for each in found:
            outcomes.append(each)
            say(each)
    finally:
        library.shutdown()
    report(outcomes, screen, "stopped" if stop else "started")

"""A Slurm job whose tasks are workers, one on each node, from a folder that all nodes share."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcompute.core.errors import CapacityError, SourceError, UsageError
from shardcompute.core.fields import shorten
from shardcompute.security.private_files import open_private_folder, replace_private

TOKEN_FILE = "token"
SCRIPT_FILE = "workers.sbatch"
_JOBS_FILE = "jobs"
_TIMEOUT_S = 60.0
_DIRECTIVE = re.compile(r"--[a-z][a-z-]*(?:=[A-Za-z0-9_.,:@/%+*\[\]-]+)?")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """`directives` are options of sbatch (`--partition=gpu`); `folder` is on a file system that all nodes share."""

    folder: Path
    nodes: int
    program: str = "shardcompute"
    options: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for each in self.directives:
            if not _DIRECTIVE.fullmatch(each):
                raise UsageError(
                    f"{each[:80]!r} is no option of sbatch", hint="write it like --partition=gpu"
                )

    def script(self) -> str:
        """The token is read from a file that only its owner can read, so that it is in no job's description."""
        token, place = shlex.quote(str(self.folder / TOKEN_FILE)), str(self.folder / "nodes")
        worker = (
            f"umask 077; exec {shlex.join([self.program, 'worker', '--token', '-'])} "
            f'--data-dir {shlex.quote(place)}/"$SLURMD_NODENAME" {shlex.join(self.options)} < {token}'
        )
        return "\n".join(
            [
                "#!/bin/sh",
                "#SBATCH --job-name=shardcompute",
                f"#SBATCH --nodes={self.nodes}",
                "#SBATCH --ntasks-per-node=1",
                # A path may hold what Slurm would take for its own patterns.
                f"#SBATCH --output={str(self.folder).replace('%', '%%')}/slurm-%j.log",
                *(f"#SBATCH {each}" for each in self.directives),
                # One worker that ends is no reason to end the others.
                f"exec srun --kill-on-bad-exit=0 --no-kill /bin/sh -c {shlex.quote(worker)}",
                "",
            ]
        )

    def submit(self, token: str, sbatch: str = "sbatch") -> str:
        """The job's id."""
        open_private_folder(self.folder)
        replace_private(self.folder / TOKEN_FILE, f"{token}\n".encode())
        script = self.folder / SCRIPT_FILE
        replace_private(script, self.script().encode())
        said = _run([sbatch, "--parsable", str(script)])
        job = said.strip().partition(";")[0]
        if not re.fullmatch(r"[0-9]+(?:_[0-9]+)?", job):
            raise SourceError(f"sbatch answered {shorten(said, 200)!r}, which is no job", hint="see its log")
        with (self.folder / _JOBS_FILE).open("a", encoding="ascii") as file:
            file.write(f"{job}\n")
        return job


def stop_jobs(folder: Path, scancel: str = "scancel") -> list[str]:
    """End the jobs that were submitted from this folder; their ids."""
    path = folder / _JOBS_FILE
    jobs = path.read_text(encoding="ascii").split() if path.exists() else []
    if jobs:
        _run([scancel, *jobs])
        path.unlink()
    (folder / TOKEN_FILE).unlink(missing_ok=True)
    return jobs


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no {command[0]} here", hint="run this on a machine from which you submit Slurm jobs"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CapacityError(
            f"{command[0]} did not answer within {_TIMEOUT_S:g} s", hint="look after Slurm, then try again"
        ) from error
    if done.returncode:
        raise CapacityError(
            f"{command[0]} refused: {shorten(done.stderr.strip() or done.stdout.strip(), 300)}",
            hint="--sbatch passes on what it wants, such as --account=NAME",
        )
    return done.stdout

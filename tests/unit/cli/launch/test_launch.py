"""Launchers: what host files may say, what is run where, what goes wrong in words; with stand-ins for ssh and Slurm."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardcompute.cli.launch.hosts import LaunchHost, parse_hosts, read_hosts
from shardcompute.cli.launch.invitation import parse_options
from shardcompute.cli.launch.ray_workers import WorkerKeeper
from shardcompute.cli.launch.slurm_job import SlurmJob
from shardcompute.cli.launch.ssh_host import SshLauncher
from shardcompute.core.errors import CapacityError, SourceError, UsageError
from shardcompute.security import parse_token
from shardcompute.version import VERSION

from ..cluster_lab import HERE, Lab

Cli = Callable[..., Any]
TOKEN = "sc1.secret"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="launches from POSIX systems")


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home on another machine, reached by an ssh that runs there what it is told."""
    home = tmp_path / "far"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    script = 'for last; do :; done\nprintf "%s\\n" "$@" > "$HOME/arguments"\nexec /bin/sh -c "$last"'
    program(tmp_path / "bin" / "ssh", script)
    return home


def install(far: Path, *, version: str = VERSION, worker: str = "") -> str:
    worker = (
        worker
        or 'read token; echo "$token" > "$HOME/token"; echo "a worker of home; Ctrl-C stops it"; exec sleep 60'
    )
    script = f"""case "$1" in
  --version) echo "shardcompute {version}" ;;
  worker) echo "$@" > "$HOME/started"; echo $$ > "$HOME/pid"; {worker} ;;
  down) kill "$(cat "$HOME/pid")"; echo stopped ;;
esac"""
    return str(program(far / "opt" / "shardcompute", script))


def has_ended(pid: int) -> bool:
    """Nobody may be there to reap it."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or bool(process.wait(30)) or True
    except psutil.NoSuchProcess:
        return True


def launcher(far: Path, **options: Any) -> SshLauncher:
    return SshLauncher(client=str(far.parent / "bin" / "ssh"), **{"timeout_s": 30.0, **options})


def test_a_worker_is_started_and_ended(far: Path) -> None:
    name = install(far)
    started = launcher(far, program=name, options=("--device", "cpu"))
    host = LaunchHost("ada@attic", 2222, ("--name", "it's"))
    outcome = started.start(host, TOKEN)
    assert (outcome.host, outcome.error) == ("ada@attic:2222", "")
    assert (far / "token").read_text().strip() == TOKEN
    folder = far / ".local/share/shardcompute/launched"
    told = (far / "started").read_text()
    assert told.strip() == f"worker --token - --data-dir {folder} --device cpu --name it's"
    given = (far / "arguments").read_text()
    assert TOKEN not in given, "nobody sees it in a list of processes"
    assert "BatchMode=yes" in given
    assert "-p\n2222\nada@attic\n" in given
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert started.stop(host).text == "stopped"
    assert has_ended(int((far / "pid").read_text()))


@pytest.mark.parametrize(
    ("version", "worker", "said"),
    [
        ("0.0.9", "", "has release 0.0.9"),
        (VERSION, "echo error: the token is used up; exit 4", "error: the token is used up"),
        (VERSION, "exec sleep 60", "did not serve within 1 s"),
    ],
)
def test_what_goes_wrong_on_the_other_machine(far: Path, version: str, worker: str, said: str) -> None:
    name = install(far, version=version, worker=worker)
    timeout_s = 11.0 if "serve" in said else 60.0
    outcome = launcher(far, program=name, timeout_s=timeout_s).start(LaunchHost("attic"), TOKEN)
    assert said in outcome.error
    if "release" in said:
        assert not (far / "started").exists(), "it was not given the token"
    elif "serve" in said:
        subprocess.run(["kill", (far / "pid").read_text().strip()], check=False)


def test_a_machine_without_the_program(far: Path) -> None:
    outcome = launcher(far, program="no-such-program").start(LaunchHost("attic"), TOKEN)
    assert "has no no-such-program: install it there" in outcome.error


def test_a_machine_that_cannot_be_reached(far: Path) -> None:
    program(far.parent / "bin" / "ssh", 'echo "Permission denied (publickey)." >&2; exit 255')
    outcome = launcher(far).start(LaunchHost("attic"), TOKEN)
    assert outcome.error == "cannot be reached by ssh: Permission denied (publickey)."


def test_a_machine_that_says_nothing(far: Path) -> None:
    program(far.parent / "bin" / "ssh", "exec sleep 60")
    assert launcher(far, timeout_s=0.3).stop(LaunchHost("attic")).error == "did not answer within 0.3 s"


def test_host_files() -> None:
    found = parse_hosts(
        "# lab\ngpu1\n\nada@10.0.0.7:2222 name=attic max-memory=16G # loud\n[fe80::1]:22\n", "f"
    )
    assert found == [
        LaunchHost("gpu1"),
        LaunchHost("ada@10.0.0.7", 2222, ("--name", "attic", "--max-memory", "16G")),
        LaunchHost("[fe80::1]", 22),
    ]
    for line, said in (
        ("-oProxyCommand=evil", "is no host"),
        ("ada@-evil", "is no host"),
        ("a;rm", "is no host"),
        ("a:99999", "is no host"),
        ("a token=x", "is no option"),
        ("a name=$(rm)", "is no option"),
        ("a\na", "is there twice"),
        ("# nobody", "names 0 hosts"),
    ):
        with pytest.raises(UsageError, match=said):
            parse_hosts(line, "f")
    with pytest.raises(SourceError, match="cannot be read"):
        read_hosts(Path("/nowhere/hosts"))


def test_options_for_workers() -> None:
    assert parse_options("--max-memory 8G --name 'a b'") == ["--max-memory", "8G", "--name", "a b"]
    for text, said in (("--token x", "no option to pass on"), ("'", "cannot be read")):
        with pytest.raises(UsageError, match=said):
            parse_options(text)


def test_launch_says_how_each_machine_fares(
    cli: Cli, lab: Lab, far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = install(far)
    script = 'for last; do :; done\ncase "$*" in *lost*) exit 255 ;; esac\nexec /bin/sh -c "$last"'
    program(tmp_path / "bin" / "ssh", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("good\nlost\n")
    result = cli("launch", "ssh", str(hosts), "--program", name, *HERE)
    assert result.exit_code != 0
    assert "good: a worker runs" in result.stderr
    assert "lost: cannot be reached by ssh" in result.stderr
    assert "1 machine failed: lost" in result.stderr
    [token] = lab.admin.tokens()
    assert (token.roles, token.max_uses) == (("worker",), 2)
    assert parse_token((far / "token").read_text().strip()).token_id == token.id
    hosts.write_text("good\n")
    assert "1 machine stopped" in cli("launch", "ssh", str(hosts), "--program", name, "--stop").stderr


# Slurm


def test_a_job_is_submitted_and_ended(
    cli: Cli, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(
        tmp_path / "bin" / "sbatch",
        f'cp "$2" {tmp_path}/submitted; echo "$@" > {tmp_path}/asked; echo "77;c"',
    )
    program(tmp_path / "bin" / "scancel", f'echo "$@" > {tmp_path}/ended')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    folder = tmp_path / "shared folder"
    options = ("--nodes", "3", "--sbatch=--partition=gpu", "--folder", str(folder), "--program", "/opt/sc")
    result = cli("launch", "slurm", *options, *HERE)
    assert result.exit_code == 0, result.stderr
    assert "job 77" in result.stderr
    script = (tmp_path / "submitted").read_text()
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    token = (folder / "token").read_text().strip()
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert token not in script
    assert lab.admin.tokens()[0].max_uses == 3
    # The script is one that a shell can run: with a stand-in for srun, each node starts its worker.
    program(tmp_path / "bin" / "srun", 'while [ "$1" != /bin/sh ]; do shift; done; exec "$@"')
    program(tmp_path / "bin" / "fake", f'echo "$@" > {tmp_path}/started; cat > {tmp_path}/read')
    environment = {**os.environ, "SLURMD_NODENAME": "node7"}
    runnable = script.replace("/opt/sc", str(tmp_path / "bin" / "fake"))
    subprocess.run(["sh", "-c", runnable], env=environment, check=True, timeout=30)
    assert (tmp_path / "read").read_text().strip() == token
    assert (tmp_path / "started").read_text().strip() == f"worker --token - --data-dir {folder}/nodes/node7"
    assert "ended job 77" in cli("launch", "slurm", "--folder", str(folder), "--stop").stderr
    assert (tmp_path / "ended").read_text().strip() == "77"
    assert not (folder / "token").exists()


def test_slurm_that_refuses(tmp_path: Path) -> None:
    job = SlurmJob(tmp_path / "f", 1)
    with pytest.raises(UsageError, match="there is no no-sbatch here"):
        job.submit(TOKEN, sbatch="no-sbatch")
    refusing = program(tmp_path / "sbatch", "echo invalid account >&2; exit 1")
    with pytest.raises(CapacityError, match="invalid account"):
        job.submit(TOKEN, sbatch=str(refusing))
    with pytest.raises(UsageError, match="is no option of sbatch"):
        SlurmJob(tmp_path, 1, directives=("--x\n#SBATCH y",))


def test_a_ray_node_of_another_release_starts_nothing(tmp_path: Path) -> None:
    said = WorkerKeeper().start("0.0.0", "sc1.token", [], str(tmp_path / "place"), 1.0)
    assert "release" in said
    assert not (tmp_path / "place").exists()

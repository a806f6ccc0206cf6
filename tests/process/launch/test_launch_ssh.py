"""`launch ssh` against a real sshd on loopback: a worker joins, serves, and is ended again."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.swarm.processes import run, started

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None,
    reason="needs an sshd (Debian: openssh-server) and ssh",
)


@contextmanager
def sshd(folder: Path) -> Iterator[tuple[int, Path]]:
    """The port of a server that lets this user in with one key, and a configuration of ssh that has it."""
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=30
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host_key = (folder / "host.pub").read_text().split()[:2]
    (folder / "known").write_text(f"[127.0.0.1]:{port} {' '.join(host_key)}\n")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/user.pub\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n"
        "  StrictHostKeyChecking yes\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it locks itself in before anybody is let in
    assert SSHD is not None
    server = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL
    )
    try:
        deadline_s = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline_s:
                    pytest.skip(f"sshd does not start here (code {server.poll()})")
                time.sleep(0.05)
        yield port, folder / "ssh_config"
    finally:
        server.terminate()
        server.wait(30)


def test_a_worker_over_ssh(smollm2_gguf: Path, tmp_path: Path) -> None:
    program = tmp_path / "shardcompute"
    source = os.environ.get("PYTHONPATH", "")
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{source}" exec {sys.executable} -m shardcompute "$@"\n')
    program.chmod(0o755)
    hosts, folder = tmp_path / "hosts.txt", tmp_path / "far"
    cluster = tmp_path / "cluster"
    common = ("--port", "0", "--cluster-port", "0", "--join-port", "0", "--data-dir", cluster)
    with sshd(tmp_path / "ssh") as (port, config), started("coordinator", smollm2_gguf, *common) as head:
        head.wait_for(r"the API listens at (http://\S+)")
        hosts.write_text(f"{getpass.getuser()}@127.0.0.1:{port} name=attic threads=1\n127.0.0.1:1\n")
        options = ("--program", program, "--folder", folder, "--ssh-config", config, "--data-dir", cluster)
        first = run("launch", "ssh", hosts, *options)
        assert "a worker runs, pid" in first.stderr, first.stderr
        assert "127.0.0.1:1: cannot be reached by ssh" in first.stderr
        assert first.returncode != 0, "one of the two failed"
        try:
            head.wait_for(r"is ready at (http://\S+)")
            assert "attic" in run("nodes", "--data-dir", cluster).stdout
        finally:
            hosts.write_text(f"{getpass.getuser()}@127.0.0.1:{port}\n")
            ended = run("launch", "ssh", hosts, *options, "--stop")
        assert ended.returncode == 0, ended.stderr
        assert "1 machine stopped" in ended.stderr
        assert not (folder / "worker.json").exists()

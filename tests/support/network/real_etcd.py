"""A real etcd of three members on loopback, from the distribution's package, as long as a block lasts."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardcompute.core.errors import StoreError
from shardcompute.node.coordinator.shared.etcd import EtcdAddress, EtcdClient
from support.network.lab_links import wait_until

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed (etcd-server of Debian)"
)
_READY_S = 30.0


@dataclass
class RealEtcd:
    """Members by number; each has a folder and two ports of its own."""

    folder: Path
    ports: list[tuple[int, int]]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{client}" for client, _ in self.ports)

    def client(self) -> EtcdClient:
        return EtcdClient(EtcdAddress.parse(self.url))

    def start(self, number: int) -> None:
        client, peer = self.ports[number]
        members = ",".join(f"m{n}=http://127.0.0.1:{peer}" for n, (_, peer) in enumerate(self.ports))
        log = (self.folder / f"m{number}.log").open("ab")
        self.processes[number] = subprocess.Popen(
            [
                "etcd",
                *("--name", f"m{number}", "--data-dir", str(self.folder / f"m{number}")),
                *("--listen-client-urls", f"http://127.0.0.1:{client}"),
                *("--advertise-client-urls", f"http://127.0.0.1:{client}"),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-cluster", members, "--initial-cluster-state", "new"),
                # A test's disk is slow at times, and what it holds is worth nothing.
                "--unsafe-no-fsync",
            ],
            stdout=log,
            stderr=log,
        )
        log.close()

    def kill(self, number: int) -> None:
        process = self.processes.pop(number)
        process.kill()
        process.wait()

    def wait_ready(self) -> None:
        client = self.client()

        def answers() -> bool:
            with contextlib.suppress(StoreError):
                client.write([], [])
                return True
            return False

        wait_until(answers, "the store answers", _READY_S)
        client.close()

    def close(self) -> None:
        for number in list(self.processes):
            self.kill(number)


@contextlib.contextmanager
def real_etcd(folder: Path, members: int = 3) -> Iterator[RealEtcd]:
    folder.mkdir(parents=True, exist_ok=True)
    store = RealEtcd(folder, _free_ports(members))
    with contextlib.closing(store):
        for number in range(members):
            store.start(number)
        store.wait_ready()
        yield store


def _free_ports(members: int) -> list[tuple[int, int]]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2 * members)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    return list(zip(ports[::2], ports[1::2], strict=True))

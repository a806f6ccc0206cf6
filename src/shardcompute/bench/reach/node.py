"""One process of `bench reach`: the coordinator with its relay on the public host, or a node in a home.

It is told what to do by lines of JSON on its standard input, and answers each with a line. It ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardcompute.core.errors import ShardComputeError
from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.driver.standalone import StandaloneDriver, StandaloneOptions
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.node.reach.cluster_relays import RelayOptions
from shardcompute.security.names import Role
from shardcompute.security.tokens import parse_token
from shardcompute.wire import Link, Ping
from shardcompute.wire.control import TensorBytes

_PINGS = 20
_LOAD_BYTES = 1 << 20
_TIMEOUT_S = 30.0
Answering = Callable[[dict[str, Any]], dict[str, Any]]


class ReachNode(StandaloneDriver):
    """A node without a model, which dials others."""

    @property
    def url(self) -> str:
        return self._endpoint.url

    @property
    def is_ready(self) -> bool:
        reach = self._endpoint.reach
        return self._control.is_registered and reach is not None and reach.relays.is_measured.is_set()

    def measure(self, url: str, node: str, loads: int) -> dict[str, Any]:
        """Dial a node; how long that took, on which rung, the round trip, and bytes a second."""
        began_s = time.perf_counter()
        with self._endpoint.dial(url, "probe", node) as link:
            linked_s = time.perf_counter() - began_s
            rtts = [_timed(link, Ping(number, 0.0)) for number in range(_PINGS)]
            body = bytes(_LOAD_BYTES)
            began_s = time.perf_counter()
            for number in range(loads):
                _timed(link, TensorBytes(number, _LOAD_BYTES), memoryview(body))
            took_s = time.perf_counter() - began_s
            sent = link.stats.bytes_sent
            return {
                "rung": link.stats.rung,
                "linked_s": linked_s,
                "rtt_s": min(rtts),
                "bytes_per_s": loads * _LOAD_BYTES / took_s if loads else 0.0,
                "sent": sent,
            }


def _timed(link: Link, message: Ping | TensorBytes, *body: memoryview) -> float:
    began_s = time.perf_counter()
    link.send(message, body)
    link.receive(_TIMEOUT_S)
    return time.perf_counter() - began_s


@contextlib.contextmanager
def public_host(folder: Path, hosts: Sequence[str]) -> Iterator[Answering]:
    """The coordinator, reached at these; its relay is at the port of the web."""
    options = ClusterOptions(
        folder,
        host=hosts[0] if len(hosts) == 1 else "::",
        advertise=hosts[0],
        also_at=tuple(hosts[1:]),
        relays=RelayOptions(443),
    )
    with Cluster(options) as cluster:

        def answer(asked: dict[str, Any]) -> dict[str, Any]:
            view = cluster.relay_view()
            token = cluster.access.create_token() if asked.get("token") else ""
            return {"token": token, "relayed": 0 if view is None else view.spliced_bytes}

        yield answer


@contextlib.contextmanager
def home_host(folder: Path, host: str, token: str, through: str, advertise: str) -> Iterator[Answering]:
    credentials, urls = join_cluster(parse_token(token), folder, Role.DRIVER, through)
    options = StandaloneOptions(host, 0, advertise, folder.name, follows_address=not advertise)
    with contextlib.closing(ReachNode(credentials, urls, options)) as node:
        node.start()

        def answer(asked: dict[str, Any]) -> dict[str, Any]:
            if "dial" in asked:
                return node.measure(asked["url"], asked["dial"], asked["loads"])
            deadline = time.monotonic() + _TIMEOUT_S
            while not node.is_ready and time.monotonic() < deadline:
                time.sleep(0.02)
            return {"node": node.node, "url": node.url, "is_ready": node.is_ready}

        yield answer


def main(arguments: list[str]) -> None:
    setup = json.loads(arguments[0])
    logging.basicConfig(level=logging.INFO, filename=f"{setup['folder']}.log")
    folder = Path(setup["folder"])
    opened = (
        public_host(folder, setup["hosts"])
        if setup["is_public"]
        else home_host(folder, setup["host"], setup["token"], setup["through"], setup["advertise"])
    )
    with opened as answer:
        for line in sys.stdin:
            try:
                said = answer(json.loads(line))
            except ShardComputeError as error:
                said = {"error": str(error)}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

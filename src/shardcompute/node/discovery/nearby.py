"""Clusters nearby: announced and found by multicast DNS (DNS-SD), through the package `zeroconf`.

    with announced(NearbyCluster("home", fingerprint, ("192.168.1.5",), 7421, 7420)):
        …
    for cluster in find_nearby(2.0):
        print(cluster.name, cluster.join_addresses)

An announcement says a cluster's name, the beginning of its authority's fingerprint, addresses and ports; nothing of
models, machines or users. Anybody in the network can announce anything: what is found is bounded in number and size,
made fit to be shown, and only says where to ask. `zeroconf` comes with the extra `discovery`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardcompute.core.errors import BackendError, LinkError, UsageError
from shardcompute.core.sockets.hosts import bracketed
from shardcompute.security.names import check_cluster_name

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

log = logging.getLogger(__name__)
SERVICE = "_shardcompute._tcp.local."
_VERSION = "1"
_MOST_CLUSTERS = 32
_MOST_ADDRESSES = 8
_SHOWN_FINGERPRINT = 32
_LOOKUP_MS = 1000


@dataclass(frozen=True, slots=True)
class NearbyCluster:
    """A cluster as it announces itself: `fingerprint` is the beginning of its authority's, `hosts` are addresses."""

    name: str
    fingerprint: str
    hosts: tuple[str, ...]
    join_port: int
    link_port: int

    @property
    def join_addresses(self) -> tuple[str, ...]:
        """Where machines join, as join tokens write it."""
        return tuple(f"{bracketed(host)}:{self.join_port}" for host in self.hosts)

    @property
    def control_urls(self) -> tuple[str, ...]:
        """Where members find the coordinator."""
        return tuple(f"tcp://{bracketed(host)}:{self.link_port}" for host in self.hosts)

    def is_of(self, fingerprint: str) -> bool:
        """Whether it says to be the cluster with this authority. Only its certificate proves that."""
        return fingerprint.startswith(self.fingerprint)


@contextlib.contextmanager
def announced(cluster: NearbyCluster, *, interfaces: Sequence[str] | None = None) -> Iterator[None]:
    """Announce a cluster while the block runs, on these interfaces (None: on all). LinkError where that cannot be."""
    zeroconf = _import_zeroconf()
    info = zeroconf.ServiceInfo(
        SERVICE,
        f"{cluster.name} {cluster.fingerprint[:8]}.{SERVICE}",
        port=cluster.join_port,
        properties={
            "v": _VERSION,
            "name": cluster.name,
            "fp": cluster.fingerprint[:_SHOWN_FINGERPRINT],
            "link": str(cluster.link_port),
        },
        server=f"shardcompute-{cluster.fingerprint[:16]}.local.",
        parsed_addresses=list(cluster.hosts),
    )
    with _opened(interfaces) as daemon:
        try:
            daemon.register_service(info, cooperating_responders=True)
        except (OSError, zeroconf.Error) as error:
            raise LinkError(
                f"this cluster cannot be announced: {error!r}", hint="start with --no-announce"
            ) from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError, zeroconf.Error):
                daemon.unregister_service(info)


def find_nearby(
    timeout_s: float,
    *,
    interfaces: Sequence[str] | None = None,
    is_wanted: Callable[[NearbyCluster], bool] = lambda cluster: True,
    first_only: bool = False,
) -> tuple[NearbyCluster, ...]:
    """The clusters that answer within this time, by name; with `first_only`, as soon as one that is wanted did."""
    zeroconf = _import_zeroconf()
    names: dict[str, None] = {}
    changed = threading.Condition()

    def heard(*, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        with changed:
            if len(names) < _MOST_CLUSTERS:
                names[name] = None
                changed.notify_all()

    found: dict[str, NearbyCluster] = {}
    deadline_s = time.monotonic() + timeout_s
    with _opened(interfaces) as daemon:
        browser = zeroconf.ServiceBrowser(daemon, SERVICE, handlers=[heard])
        try:
            asked: set[str] = set()
            while (left_s := deadline_s - time.monotonic()) > 0 and not (found and first_only):
                with changed:
                    changed.wait_for(lambda: len(names) > len(asked), left_s)
                    new = [name for name in names if name not in asked]
                for name in new:
                    asked.add(name)
                    cluster = _look_up(daemon, name, min(_LOOKUP_MS, int(1000 * timeout_s)))
                    if cluster is not None and is_wanted(cluster):
                        found[name] = cluster
        finally:
            browser.cancel()
    return tuple(sorted(found.values(), key=lambda each: (each.name, each.fingerprint)))


def read_announcement(
    properties: Mapping[bytes, bytes | None], hosts: Sequence[str], port: int | None
) -> NearbyCluster | None:
    """What somebody announced, if a cluster of ours could have: strangers may send anything."""
    try:
        values = {key.decode("ascii"): (value or b"").decode("ascii") for key, value in properties.items()}
        addresses = tuple(dict.fromkeys(str(ipaddress.ip_address(host)) for host in hosts))
        fingerprint, link = values["fp"], values["link"]
        if values["v"] != _VERSION or len(fingerprint) != _SHOWN_FINGERPRINT or not addresses:
            return None
        bytes.fromhex(fingerprint)
        name = check_cluster_name(values["name"])
        link_port = int(link) if link.isdigit() and len(link) <= 5 else 0
    except (KeyError, ValueError, UsageError):
        return None
    if port is None or not (0 < port < 65_536 and 0 < link_port < 65_536):
        return None
    return NearbyCluster(name, fingerprint.lower(), addresses[:_MOST_ADDRESSES], port, link_port)


def own_addresses() -> tuple[str, ...]:
    """Addresses of this machine that others in its networks can dial: no loopback, no IPv6 of one link alone."""
    import psutil

    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(each.address)
                if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                    found.append(address)
    ordered = sorted(dict.fromkeys(found), key=lambda each: (each.version, each))
    return tuple(str(each) for each in ordered)[:_MOST_ADDRESSES]


def _look_up(daemon: Zeroconf, name: str, timeout_ms: int) -> NearbyCluster | None:
    zeroconf = _import_zeroconf()
    try:
        info: ServiceInfo | None = daemon.get_service_info(SERVICE, name, timeout=timeout_ms)
        if info is None:
            return None
        return read_announcement(info.properties, info.parsed_addresses(), info.port)
    except (OSError, ValueError, zeroconf.Error):
        return None


@contextlib.contextmanager
def _opened(interfaces: Sequence[str] | None) -> Iterator[Zeroconf]:
    zeroconf = _import_zeroconf()
    try:
        daemon = zeroconf.Zeroconf(
            interfaces=zeroconf.InterfaceChoice.All if interfaces is None else list(interfaces)
        )
    except OSError as error:
        raise LinkError(
            f"multicast cannot be used here: {error.strerror or error}",
            hint="check the network, or join with a token",
        ) from error
    try:
        yield daemon
    finally:
        daemon.close()


def _import_zeroconf() -> Any:
    try:
        import zeroconf
    except ImportError as error:
        raise BackendError(
            "clusters nearby are found with the package zeroconf, which is not installed",
            hint="pip install 'shardcompute[discovery]'; or give the cluster's address: shardcompute join --at HOST",
        ) from error
    return zeroconf

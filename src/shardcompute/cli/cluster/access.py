"""Cluster discovery for commands: the one on this machine, or the one at --url."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from shardcompute.cli.options.cluster import cluster_folder
from shardcompute.cli.options.keys import ClientKeyFile, client_key
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient

_WHERE = "Where"

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="HTTP address of a cluster; by default the cluster on this machine.",
        rich_help_panel=_WHERE,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        help="Folder of the cluster on this machine, if it is not the usual one.",
        rich_help_panel=_WHERE,
    ),
]


TlsPin = Annotated[
    str | None,
    typer.Option(
        "--tls-pin",
        metavar="PIN",
        help="Key of an HTTPS server that no known authority vouches for, as it says it when it starts: sha256//…",
        rich_help_panel=_WHERE,
    ),
]


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """`is_here`: it runs on this machine, so that both mean the same by a path."""

    url: str
    api_key: str | None
    is_here: bool
    tls_pin: str | None = None
    tls_certificate: str | None = None

    def connect(self, timeout_s: float = 600.0) -> ClusterClient:
        from shardcompute.cluster_client import ClusterClient

        return ClusterClient(
            self.url,
            api_key=self.api_key,
            timeout_s=timeout_s,
            tls_pin=self.tls_pin,
            tls_certificate=self.tls_certificate,
        )


@dataclass(frozen=True, slots=True)
class ClusterLocation:
    """The cluster that a command is to talk to, as its options name it."""

    url: Url = None
    api_key_file: ClientKeyFile = None
    data_dir: DataDir = None
    tls_pin: TlsPin = None

    def find(self) -> ClusterAddress | None:
        """None where no --url is given and no cluster answers from the folder.

        For the cluster on this machine the local secret is used, which its folder holds for its owner alone.
        """
        from shardcompute.node.process.pidfile import CLUSTER_FILE, read_running
        from shardcompute.security.local_secret import read_local_secret

        settings = load_settings()
        if self.url is not None:
            if self.data_dir is not None:
                raise UsageError("--url and --data-dir name two clusters", hint="give one of them")
            key = client_key(self.api_key_file, settings)
            return ClusterAddress(_check_url(self.url), key, is_here=False, tls_pin=self.tls_pin)
        if self.tls_pin is not None:
            raise UsageError(
                "--tls-pin is for a server at --url", hint="the cluster on this machine is known without it"
            )
        folder = cluster_folder(settings, self.data_dir)
        running = read_running(folder / CLUSTER_FILE)
        if running is None or not running.api_url:
            return None
        given = self.api_key_file
        key = read_local_secret(folder) if given is None else client_key(given, settings)
        certificate = running.api_certificate or None
        return ClusterAddress(running.api_url, key, is_here=True, tls_certificate=certificate)

    def require(self) -> ClusterAddress:
        address = self.find()
        if address is None:
            raise UsageError(
                "no cluster runs on this machine, or it is still starting",
                hint="start one with: shardcompute up; or give --url",
            )
        return address

    def connect(self) -> ClusterClient:
        return self.require().connect()


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise UsageError(f"{url!r} is not an HTTP address", hint="write it like http://192.168.1.5:8000")
    return url.rstrip("/").removesuffix("/v1")

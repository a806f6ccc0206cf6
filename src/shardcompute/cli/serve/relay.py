"""`shardcompute relay`: splices links between members that cannot dial each other, on a machine that both reach."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.format import parse_size
from shardcompute.cli.options.cluster import RELAY_PORT, ClusterFolder, cluster_folder
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings

_RATE = 64 << 20


def relay(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="The cluster's public key, which `shardcompute relay --show-key` prints at the coordinator.",
        ),
    ] = "",
    *,
    host: Annotated[
        str | None,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to listen on, by default all, of IPv6 and IPv4."
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            help="Port to listen on; 443 suits networks that let only the web out. 0 for any free one.",
        ),
    ] = RELAY_PORT,
    links: Annotated[
        int, typer.Option("--links", metavar="N", min=1, help="The most links at a time.")
    ] = 256,
    links_per_member: Annotated[
        int, typer.Option("--links-per-member", metavar="N", min=1, help="The most links of one node.")
    ] = 64,
    rate: Annotated[
        int | None,
        typer.Option(
            "--rate",
            metavar="SIZE",
            parser=parse_size,
            help="The most bytes a second of one node, such as 8M; by default 64M.",
        ),
    ] = None,
    show_key: Annotated[
        bool,
        typer.Option("--show-key", help="Print the public key of the cluster on this machine, and stop."),
    ] = False,
    data_dir: ClusterFolder = None,
) -> None:
    """Pass on bytes between members of a cluster that cannot dial each other, until Ctrl-C.

    It admits whoever shows a ticket that the cluster's coordinator has signed, and sees ciphertext only. The cluster
    is told of it with `--relay tcp://HOST:PORT`. Needs no model, no certificate and little memory.
    """
    screen = open_screen()
    if show_key:
        screen.write(_own_key(cluster_folder(load_settings(), data_dir)) + "\n")
        return
    if not key:
        raise UsageError(
            "a relay needs the public key of the cluster whose members it admits",
            hint="run at the coordinator: shardcompute relay --show-key",
        )
    from shardcompute.cli.stopping import stop_requested
    from shardcompute.core.sockets.hosts import bracketed
    from shardcompute.core.sockets.listening import any_host
    from shardcompute.relay.door_tls import throwaway_server_context
    from shardcompute.relay.server import RelayLimits, RelayServer
    from shardcompute.relay.tickets import parse_cluster_key

    limits = RelayLimits(links=links, links_per_member=links_per_member, bytes_per_s=float(rate or _RATE))
    cluster_key, host = parse_cluster_key(key), host or any_host()
    with (
        stop_requested() as stop,
        RelayServer(host, port, cluster_key, limits=limits, tls=throwaway_server_context()) as server,
    ):
        screen.say(
            f"a relay at tcp://{bracketed(host)}:{server.port}, wss:// on the same port; Ctrl-C stops it"
        )
        stop.wait()
    screen.say("stopped")


def _own_key(folder: Path) -> str:
    from shardcompute.relay.tickets import cluster_key_text
    from shardcompute.security.authority import ClusterAuthority

    try:
        return cluster_key_text(ClusterAuthority.load(folder / "authority"))
    except FileNotFoundError:
        raise UsageError(
            f"there is no cluster in {folder}", hint="run it where the coordinator runs, or name --data-dir"
        ) from None

"""`shardcompute join`: become a worker of somebody's cluster, with a token or with a code that the cluster shows."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.attestation.files import read_evidence_file
from shardcompute.cli.console import Screen, has_terminal_input, open_screen, standard_input
from shardcompute.cli.options.cluster import JOIN_PORT
from shardcompute.cli.options.engine import check_device
from shardcompute.cli.options.records import with_options
from shardcompute.cli.options.worker import Through, WorkerArguments, WorkerFolder, worker_folder
from shardcompute.cli.progress import waiting
from shardcompute.cli.serve.places import choose_for, join_places, serve_places
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.node.discovery.nearby import NearbyCluster
    from shardcompute.security.tokens import JoinToken

_LOOK_S = 3.0
_PAIRING = "Without a token"


@with_options
def join(
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOKEN]",
            help="The token that `shardcompute up` prints; starts with sc1. Without one, this machine is paired with a "
            "cluster nearby, by the code that it shows.",
        ),
    ] = None,
    *,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Which of the clusters nearby; asked for where there are several.",
            rich_help_panel=_PAIRING,
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="HOST[:PORT]",
            help=f"Where the cluster is, if it does not announce itself; port {JOIN_PORT} unless named.",
            rich_help_panel=_PAIRING,
        ),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            "--code",
            metavar="CODE",
            help="The code that the cluster's page or `shardcompute pair` shows; asked for by default.",
            rich_help_panel=_PAIRING,
        ),
    ] = None,
    through: Through = None,
    evidence: Annotated[
        Path | None,
        typer.Option(
            "--evidence",
            metavar="FILE",
            help="Evidence of this machine's hardware, for clusters that ask for it; see `shardcompute evidence`.",
        ),
    ] = None,
    data_dir: WorkerFolder = None,
    arguments: WorkerArguments,
) -> None:
    """Join a cluster with a token, or with a code that it shows, and serve as one of its workers until Ctrl-C.

    Computes on the GPUs of this machine, each of which is a worker, or on its CPU if it has none; --device chooses.
    The token is needed once: later, `shardcompute worker` with the same folder goes back to the same cluster.
    """
    from shardcompute.node.process.pidfile import PLACES_FILE, WORKER_FILE, check_free
    from shardcompute.security.tokens import parse_token

    screen = open_screen()
    if token is not None and (cluster or at or code):
        raise UsageError("a token names its cluster itself", hint="leave out --cluster, --at and --code")
    parsed = None if token is None else parse_token(token)
    folder = worker_folder(load_settings(), data_dir)
    check_device(arguments.device, arguments.backend)
    for file in (PLACES_FILE, WORKER_FILE):
        check_free(folder / file)
    if parsed is None:
        parsed = _pair(_addresses(screen, cluster, at), code, arguments.name, screen)
    shown = b"" if evidence is None else read_evidence_file(evidence)
    places = join_places(folder, choose_for(arguments), parsed, through or "", shown)
    ids = ", ".join(member.credentials.identity.node_id for member in places.members)
    probation = ", on probation: it gets a few layers, which others compute again" if parsed.is_public else ""
    screen.say(f"joined {parsed.cluster} as {ids}{probation}")
    serve_places(places, arguments, screen)


def _addresses(screen: Screen, name: str | None, at: str | None) -> tuple[str, ...]:
    """Where the cluster that is meant lets machines join."""
    if at is not None:
        if name is not None:
            raise UsageError("--at and --cluster name two clusters", hint="give one of them")
        return (_with_port(at),)
    from shardcompute.node.discovery.nearby import find_nearby

    with waiting(screen, "looking for clusters nearby"):
        found = find_nearby(_LOOK_S)
    chosen = _choose([each for each in found if name in (None, each.name)], screen)
    screen.say(f"pairing with {_described(chosen)}")
    return chosen.join_addresses


def _choose(found: Sequence[NearbyCluster], screen: Screen) -> NearbyCluster:
    if not found:
        raise UsageError(
            "no such cluster announces itself nearby",
            hint="it must be started with --host 0.0.0.0; give its address with --at HOST, or a token",
        )
    if len(found) == 1:
        return found[0]
    screen.say("clusters nearby:")
    for number, each in enumerate(found, 1):
        screen.say(f"  {number}  {_described(each)}")
    _need_terminal("several clusters are nearby", "choose one with --cluster NAME or --at HOST")
    answer = screen.ask("which of them? ").strip()
    if not (answer.isascii() and answer.isdigit() and 1 <= int(answer[:3]) <= len(found)):
        raise UsageError("none of them was chosen", hint=f"answer with a number from 1 to {len(found)}")
    return found[int(answer) - 1]


def _described(cluster: NearbyCluster) -> str:
    return f"{cluster.name} at {cluster.hosts[0]} ({cluster.fingerprint[:8]})"


def _pair(addresses: Sequence[str], code: str | None, name: str | None, screen: Screen) -> JoinToken:
    """A token for the code, from the first address at which anybody answers."""
    from shardcompute.node.enrolment.pairing_client import pair

    if code is None:
        _need_terminal(
            "the code is missing", "give it with --code; the cluster's page and shardcompute pair show one"
        )
        code = screen.ask("code that the cluster's page or `shardcompute pair` shows: ")
    return pair(addresses[0], code, name or platform.node(), others=addresses[1:])


def _need_terminal(problem: str, hint: str) -> None:
    if not has_terminal_input(standard_input()):
        raise UsageError(problem, hint=hint)


def _with_port(at: str) -> str:
    """`[::1]:80` and `host:80` have one; `::1`, `[::1]` and `host` get the usual one."""
    head, _, tail = at.rpartition(":")
    if head and tail.isdigit() and (":" not in head or head.endswith("]")):
        return at
    host = f"[{at}]" if ":" in at and not at.startswith("[") else at
    return f"{host}:{JOIN_PORT}"

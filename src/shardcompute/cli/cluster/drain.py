"""`shardcompute drain`, `revoke` and `pardon`: empty a node and let it leave, throw it out, or let it work again."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.cluster.completion import complete_nodes
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.records import with_options
from shardcompute.cli.progress import waiting

NodeName = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="Its name, its id, or the beginning of its id.",
        autocompletion=complete_nodes,
    ),
]


@with_options
def revoke(node: NodeName, at: ClusterLocation) -> None:
    """Throw a machine out for good: its certificate is refused everywhere, at once.

    The join tokens that it used are revoked with it, because it knows them. API keys are not: see `key list`.
    """
    screen = open_screen()
    with at.connect() as client:
        gone = client.revoke_node(node)
    screen.say(f"{gone.node.name} ({gone.node.id}) is thrown out; its certificate is refused from now on")
    if gone.node.status_reason:
        screen.say(gone.node.status_reason, "dim")
    for token in gone.revoked_tokens:
        screen.say(f"nobody joins with token {token} any more: this machine had used it")


@with_options
def pardon(node: NodeName, at: ClusterLocation) -> None:
    """Let a machine work again that audits have put in quarantine. It begins anew, and is audited as the new are."""
    with at.connect() as client:
        pardoned = client.pardon_node(node)
    open_screen().say(f"{pardoned.name} ({pardoned.id}) may work again")


@with_options
def drain(node: NodeName, at: ClusterLocation) -> None:
    """Move everything off a machine without interrupting anybody, then let it leave.

    Waits until it has left. Ctrl-C stops the waiting, not the moving.
    """
    from shardcompute.cli.cluster.following import follow_drain

    screen = open_screen()
    with at.connect() as client:
        asked = client.drain_node(node)
        with waiting(screen, f"emptying {asked.name}") as progress:
            status = follow_drain(client.watch(), asked.id, progress)
    if status == "lost":
        screen.say(f"{asked.name} was lost before it was empty; what it held is being moved", "yellow")
    else:
        screen.say(f"{asked.name} is empty and has left")

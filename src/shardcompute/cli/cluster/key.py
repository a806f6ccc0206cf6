"""`shardcompute key …`: what clients of the HTTP API identify themselves with."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import open_screen
from shardcompute.cli.format import format_duration
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options

if TYPE_CHECKING:
    from shardcompute.node.admin.views import KeyView

app = typer.Typer(help="Make, list and revoke the API keys of clients.", no_args_is_help=True)


@app.command()
@with_options
def create(
    *,
    label: Annotated[
        str, typer.Argument(metavar="LABEL", help="Whom or what it is for, as list will tell it.")
    ] = "",
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """Make a key and print it. It is shown this once."""
    screen = open_screen()
    with at.connect() as client:
        made = client.create_key(label)
    if json:
        screen.write_json(dataclasses.asdict(made))
        return
    screen.say(
        f"key {made.id}{f' for {made.label}' if made.label else ''}; clients send it as their API key:"
    )
    screen.say("")
    screen.write(f"{made.key}\n")


@app.command("list")
@with_options
def list_keys(*, json: Json = False, at: ClusterLocation) -> None:
    """All keys; what they open with is not among what is known of them."""
    screen = open_screen()
    with at.connect() as client:
        keys = client.keys()
    screen.write_records(
        keys,
        ("ID", "LABEL", "STATE", "CREATED"),
        partial(_row, now_s=time.time()),
        is_json=json,
        nothing="there is no key; shardcompute key create makes one",
    )


@app.command()
@with_options
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as list tells it.")],
    at: ClusterLocation,
) -> None:
    """Refuse a key from now on."""
    screen = open_screen()
    with at.connect() as client:
        client.revoke_key(key)
    screen.say(f"key {key} is refused from now on")


def _row(key: KeyView, now_s: float) -> tuple[str, ...]:
    age = f"{format_duration(max(0.0, now_s - key.created_at_s))} ago"
    return key.id, key.label or "-", "revoked" if key.is_revoked else "good", age

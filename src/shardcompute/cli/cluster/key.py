"""`shardcompute key …`: what clients of the HTTP API identify themselves with."""

from __future__ import annotations

import dataclasses
import time
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import open_screen
from shardcompute.cli.format import format_duration, parse_duration
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options
from shardcompute.core.units import count_of

if TYPE_CHECKING:
    from shardcompute.node.admin.views import KeyView

app = typer.Typer(help="Make, list and revoke the API keys of clients.", no_args_is_help=True)


class KeyPurpose(StrEnum):
    """What a key is for."""

    USE = "use"
    OBSERVE = "observe"
    OPERATE = "operate"


@app.command()
@with_options
def create(
    *,
    label: Annotated[
        str, typer.Argument(metavar="LABEL", help="Whom or what it is for, as list will tell it.")
    ] = "",
    role: Annotated[
        KeyPurpose,
        typer.Option(
            "--role",
            help="use: ask models; observe: see the cluster and its metrics, too; operate: everything, as commands "
            "on the coordinator's machine may.",
        ),
    ] = KeyPurpose.USE,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--models",
            metavar="NAME",
            help="For role use: a model that it may ask, by its whole name; may be repeated. By default all.",
        ),
    ] = None,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(
            "--requests-per-minute", metavar="N", min=1, help="For role use; by default any number."
        ),
    ] = None,
    tokens_per_day: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-day",
            metavar="N",
            min=1,
            help="For role use: tokens of prompts and answers from 00:00 to 24:00 UTC; by default any number.",
        ),
    ] = None,
    expires: Annotated[
        float | None,
        typer.Option(
            "--expires",
            metavar="TIME",
            parser=parse_duration,
            help="How long it is good for, such as 8h or 30d; by default until it is revoked.",
        ),
    ] = None,
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """Make a key and print it. It is shown this once, and kept as a hash."""
    screen = open_screen()
    with at.connect() as client:
        made = client.create_key(
            label,
            role=role.value,
            models=models or None,
            requests_per_minute=requests_per_minute,
            tokens_per_day=tokens_per_day,
            expires_s=expires,
        )
    if json:
        screen.write_json(dataclasses.asdict(made))
        return
    life = "" if expires is None else f", good for {format_duration(expires)}"
    screen.say(
        f"key {made.id} of role {made.role}{f' for {made.label}' if made.label else ''}{life}; "
        "clients send it as their API key:"
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
        ("ID", "LABEL", "ROLE", "STATE", "CREATED", "EXPIRES", "LIMITS"),
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
    return key.id, key.label or "-", key.role, _state(key, now_s), age, _expiry(key, now_s), _limits(key)


def _state(key: KeyView, now_s: float) -> str:
    if key.is_revoked:
        return "revoked"
    return "good" if key.expires_at_s is None or now_s < key.expires_at_s else "expired"


def _expiry(key: KeyView, now_s: float) -> str:
    if key.expires_at_s is None:
        return "never"
    left_s = key.expires_at_s - now_s
    return f"in {format_duration(left_s)}" if left_s > 0 else f"{format_duration(-left_s)} ago"


def _limits(key: KeyView) -> str:
    told = [
        "" if key.models is None else " or ".join(key.models),
        "" if key.requests_per_minute is None else f"{count_of(key.requests_per_minute, 'request')} a minute",
        "" if key.tokens_per_day is None else f"{key.tokens_per_day} tokens a day",
    ]
    return ", ".join(each for each in told if each) or "-"

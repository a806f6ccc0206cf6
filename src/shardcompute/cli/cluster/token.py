"""`shardcompute token …` and `pair`: what machines join with."""

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
from shardcompute.core.errors import UsageError
from shardcompute.core.units import count_of

if TYPE_CHECKING:
    from shardcompute.node.admin.views import TokenView

_ANY = "any"


def _parse_uses(text: str) -> int:
    """How many machines; 0 for any number of them."""
    if text == _ANY:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) < 2**31):
        raise UsageError(f"{text!r} is no number of machines", hint="write 1 or more, or any")
    return int(text)


app = typer.Typer(help="Make, list and revoke the tokens that machines join with.", no_args_is_help=True)


class TokenRole(StrEnum):
    """What a machine becomes that joins."""

    WORKER = "worker"
    DRIVER = "driver"


@app.command()
@with_options
def create(
    *,
    expires: Annotated[
        float,
        typer.Option(
            "--expires",
            metavar="TIME",
            parser=parse_duration,
            help="How long it is good for, such as 30m, 1h or 7d.",
        ),
    ] = "1d",  # type: ignore[assignment] # Typer gives defaults to the parser, too
    uses: Annotated[
        int | None,
        typer.Option(
            "--uses",
            metavar="N",
            parser=_parse_uses,
            help="Machines that may join with it; any for any number.",
        ),
    ] = "8",  # type: ignore[assignment] # as above
    role: Annotated[
        TokenRole | None,
        typer.Option("--role", help="What machines may be that join with it; by default either."),
    ] = None,
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """Make a token and print it. It is shown this once."""
    screen = open_screen()
    with at.connect() as client:
        token = client.create_token(
            expires_s=expires, max_uses=uses or None, role=None if role is None else role.value
        )
    if json:
        screen.write_json(dataclasses.asdict(token))
        return
    machines = "any number of machines" if token.max_uses is None else count_of(token.max_uses, "machine")
    screen.say(f"token {token.id}, good for {format_duration(expires)} and {machines}; on each of them run:")
    screen.say("")
    command = "driver" if role is TokenRole.DRIVER else "join"
    screen.write(f"shardcompute {command} {token.token}\n")


@with_options
def pair(*, json: Json = False, at: ClusterLocation) -> None:
    """Show a code with which one machine nearby joins: run `shardcompute join` there and type it.

    It is good once and for five minutes, and for nothing after a wrong one was tried or another was made.
    """
    screen = open_screen()
    with at.connect() as client:
        made = client.open_pairing()
    if json:
        screen.write_json(dataclasses.asdict(made))
        return
    life = format_duration(made.life_s)
    screen.say(f"on the other machine run shardcompute join, and type this code there within {life}:")
    screen.say("")
    screen.write(f"{made.code}\n")


@app.command("list")
@with_options
def list_tokens(*, json: Json = False, at: ClusterLocation) -> None:
    """All tokens; what they open with is not among what is known of them."""
    screen = open_screen()
    with at.connect() as client:
        tokens = client.tokens()
    screen.write_records(
        tokens,
        ("ID", "STATE", "FOR", "USES", "EXPIRES"),
        partial(_row, now_s=time.time()),
        is_json=json,
        nothing="there is no token; shardcompute token create makes one",
    )


@app.command()
@with_options
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="The token's id, as list tells it.")],
    at: ClusterLocation,
) -> None:
    """Let nobody join with a token any more. Machines that did stay."""
    screen = open_screen()
    with at.connect() as client:
        client.revoke_token(token)
    screen.say(f"nobody joins with token {token} any more")


def _row(token: TokenView, now_s: float) -> tuple[str, ...]:
    left_s = token.expires_at_s - now_s
    return (
        token.id,
        token.state,
        " or ".join(sorted(token.roles)),
        f"{len(token.used_by)} of {'any' if token.max_uses is None else token.max_uses}",
        f"in {format_duration(left_s)}" if left_s > 0 else f"{format_duration(-left_s)} ago",
    )

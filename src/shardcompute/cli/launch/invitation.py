"""What launchers share: a token for so many machines, the worker's options, and words for what came of each host."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import Screen
from shardcompute.core.errors import CapacityError, UsageError
from shardcompute.core.units import count_of

TOKEN_LIFE_S = 3600.0
READY = "a worker of |workers of "
"""What a worker says once it serves, as a pattern for grep -E."""
_OPTIONS = ("--max-memory", "--device", "--backend", "--threads", "--host", "--port", "--advertise", "--name")

Program = Annotated[
    str,
    typer.Option(
        "--program", metavar="PATH", help="The program on those machines, where it is not in their PATH."
    ),
]
WorkerOptions = Annotated[
    str,
    typer.Option(
        "--worker-options",
        metavar="TEXT",
        help="Options of `shardcompute worker` for all of them, such as '--max-memory 8G --device cpu'.",
    ),
]
Stop = Annotated[bool, typer.Option("--stop", help="End the workers that this command has started before.")]


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """Of one host; `error` "": all is well."""

    host: str
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Invitation:
    cluster: str
    token: str


def invite(at: ClusterLocation, machines: int) -> Invitation:
    """A token for so many workers, good for an hour."""
    from shardcompute.security.tokens import parse_token

    with at.connect() as client:
        made = client.create_token(expires_s=TOKEN_LIFE_S, max_uses=machines, role="worker")
    return Invitation(parse_token(made.token).cluster, made.token)


def parse_options(text: str) -> list[str]:
    """Options of a worker, as words; UsageError for those that a launcher does not pass on."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--worker-options cannot be read: {error}", hint="close all quotes") from error
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in _OPTIONS:
            raise UsageError(
                f"{word} is no option to pass on to workers", hint=f"these are: {', '.join(_OPTIONS)}"
            )
    return words


def report(outcomes: Sequence[LaunchOutcome], screen: Screen, done: str) -> None:
    """How many did, and CapacityError if any did not."""
    failed = [each for each in outcomes if each.error]
    good = len(outcomes) - len(failed)
    screen.say(f"{count_of(good, 'machine')} {done}" + (f", {len(failed)} failed" if failed else ""))
    if failed:
        names = ", ".join(each.host for each in failed[:8])
        raise CapacityError(
            f"{count_of(len(failed), 'machine')} failed: {names}{', …' if len(failed) > 8 else ''}",
            hint="see above why; those that run go on, and the same command tries the others again",
        )


def say_outcome(screen: Screen) -> Callable[[LaunchOutcome], None]:
    def say(outcome: LaunchOutcome) -> None:
        screen.say(f"{outcome.host}: {outcome.error or outcome.text}", "red" if outcome.error else "")

    return say

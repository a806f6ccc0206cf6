"""Entry point: the program's commands, put together.

Of a command line that names a command only that one is imported: what the others need costs a start most of its time
and a worker some of its memory. Help, completion and unknown names get all of them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module, metadata
from typing import Annotated

import typer

from shardcompute.cli.exits import GuardedGroup

_DEBUG = "--debug"
_COMMANDS = {
    "run": "chat.run:run",
    "up": "serve.up:up",
    "join": "serve.join:join",
    "worker": "serve.worker:worker",
    "coordinator": "serve.coordinator:coordinator",
    "driver": "serve.driver:driver",
    "relay": "serve.relay:relay",
    "down": "serve.down:down",
    "logs": "tools.logs:logs",
    "doctor": "tools.doctor:doctor",
    "chat": "chat.chat:chat",
    "status": "cluster.status:status",
    "page": "cluster.page:page",
    "pair": "cluster.token:pair",
    "nodes": "cluster.nodes:nodes",
    "ps": "cluster.ps:ps",
    "events": "tools.history:events",
    "usage": "tools.history:usage",
    "audit": "tools.history:audit",
    "plan": "cluster.plan:plan",
    "load": "cluster.load:load",
    "unload": "cluster.load:unload",
    "drain": "cluster.drain:drain",
    "revoke": "cluster.drain:revoke",
    "pardon": "cluster.drain:pardon",
    "pull": "models.store:pull",
    "list": "models.store:list_models",
    "show": "models.show:show",
    "rm": "models.store:rm",
    "distill": "models.distill:distill",
    "finetune": "models.finetune:finetune",
    "backup": "tools.backup:backup",
    "restore": "tools.backup:restore",
    "sim": "simulation.sim:sim",
    "completion": "tools.completion:completion",
}
_GROUPS = {
    "token": "cluster.token:app",
    "key": "cluster.key:app",
    "service": "service.service:app",
    "launch": "launch.commands:app",
    "draft-head": "models.draft_head:app",
    "receipt": "chat.receipt:app",
    "ledger": "ledger.commands:app",
    "evidence": "attestation.commands:app",
    "zk": "zk.commands:app",
    "bench": "bench.commands:app",
}
"""Where each lies in this package, in the order of the help: commands, and groups of them."""
_CALLED = {"service": ("up", "join", "worker", "driver")}
"""Commands that others call."""


def build_app(names: Iterable[str] = (*_COMMANDS, *_GROUPS)) -> typer.Typer:
    """The program with these commands; by default with all."""
    app = typer.Typer(
        name="shardcompute",
        cls=GuardedGroup,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name in names:
        module, _, attribute = (_COMMANDS | _GROUPS)[name].partition(":")
        found = getattr(import_module(f"shardcompute.cli.{module}"), attribute)
        if name in _GROUPS:
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"shardcompute {metadata.version('shardcompute')}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show tracebacks of errors.")] = False,
) -> None:
    """Serve one language model from many small machines."""


def build_for(arguments: Sequence[str]) -> typer.Typer:
    """The program with as many commands as this command line needs."""
    first = next((word for word in arguments if word != _DEBUG), "")
    return build_app([first, *_CALLED.get(first, ())]) if first in (_COMMANDS | _GROUPS) else build_app()


def main() -> None:
    # Whatever is made from here on, everybody else on this machine may at most read it.
    os.umask(os.umask(0o077) | 0o002)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            # A terminal that lacks a character shows a question mark rather than ending the answer.
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    build_for(sys.argv[1:])(prog_name="shardcompute")

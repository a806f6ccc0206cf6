"""Entry point: the program's commands, put together."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from shardcompute.cli.chat.chat import chat
from shardcompute.cli.chat.run import run
from shardcompute.cli.cluster import key, token
from shardcompute.cli.cluster.drain import drain, revoke
from shardcompute.cli.cluster.load import load, unload
from shardcompute.cli.cluster.nodes import nodes
from shardcompute.cli.cluster.page import page
from shardcompute.cli.cluster.plan import plan
from shardcompute.cli.cluster.ps import ps
from shardcompute.cli.cluster.status import status
from shardcompute.cli.exits import GuardedGroup
from shardcompute.cli.models import draft_head
from shardcompute.cli.models.show import show
from shardcompute.cli.models.store import list_models, pull, rm
from shardcompute.cli.serve.coordinator import coordinator
from shardcompute.cli.serve.down import down
from shardcompute.cli.serve.driver import driver
from shardcompute.cli.serve.join import join
from shardcompute.cli.serve.up import up
from shardcompute.cli.serve.worker import worker
from shardcompute.cli.service import service
from shardcompute.cli.tools import bench
from shardcompute.cli.tools.completion import completion
from shardcompute.cli.tools.doctor import doctor
from shardcompute.cli.tools.history import events, usage
from shardcompute.cli.tools.logs import logs

app = typer.Typer(
    name="shardcompute",
    cls=GuardedGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"shardcompute {metadata.version('shardcompute')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Serve one language model from many small machines."""


for command in (run, up, join, worker, coordinator, driver, down, logs, doctor):
    app.command()(command)
for command in (chat, status, page, nodes, ps, events, usage, plan, load, unload, drain, revoke):
    app.command()(command)
app.add_typer(token.app, name="token")
app.add_typer(key.app, name="key")
app.command()(pull)
app.command("list")(list_models)
app.command()(show)
app.command()(rm)
app.add_typer(service.app, name="service")
app.command()(completion)
app.add_typer(draft_head.app, name="draft-head")
app.add_typer(bench.app, name="bench")


def main() -> None:
    # Whatever is made from here on, everybody else on this machine may at most read it.
    os.umask(os.umask(0o077) | 0o002)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            # A terminal that lacks a character shows a question mark rather than ending the answer.
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="shardcompute")

"""The commands that talk to a running cluster, mounted together."""

from __future__ import annotations

import typer

from shardcompute.cli import key, token
from shardcompute.cli.drain import drain
from shardcompute.cli.load import load, unload
from shardcompute.cli.nodes import nodes
from shardcompute.cli.plan import plan
from shardcompute.cli.ps import ps
from shardcompute.cli.status import status
from shardcompute.cli.talk import chat


def mount_cluster_commands(app: typer.Typer) -> None:
    for command in (chat, status, nodes, ps, plan, load, unload, drain):
        app.command()(command)
    app.add_typer(token.app, name="token")
    app.add_typer(key.app, name="key")

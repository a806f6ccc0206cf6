"""The commands that talk to a running cluster, mounted together."""

from __future__ import annotations

import typer

from shardcompute.cli.chat.chat import chat
from shardcompute.cli.cluster import key, token
from shardcompute.cli.cluster.drain import drain
from shardcompute.cli.cluster.load import load, unload
from shardcompute.cli.cluster.nodes import nodes
from shardcompute.cli.cluster.plan import plan
from shardcompute.cli.cluster.ps import ps
from shardcompute.cli.cluster.status import status


def mount_cluster_commands(app: typer.Typer) -> None:
    for command in (chat, status, nodes, ps, plan, load, unload, drain):
        app.command()(command)
    app.add_typer(token.app, name="token")
    app.add_typer(key.app, name="key")

"""`shardcompute nodes`: the machines of a cluster."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster_access import ApiKey, DataDir, Url, open_cluster
from shardcompute.cli.console import open_screen
from shardcompute.cli.options import Json
from shardcompute.core.errors import UsageError

if TYPE_CHECKING:
    from shardcompute.node.views import NodeView

_ID_SHOWN = 12


def nodes(
    json: Json = False,
    map: Annotated[bool, typer.Option("--map", help="Draw which layers are where.")] = False,
    everyone: Annotated[bool, typer.Option("--all", help="List nodes that have left, too.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """The machines of a cluster: how they are, what they offer, which layers they hold."""
    from shardcompute.cli.cluster_text import draw_map

    if json and map:
        raise UsageError("--map is for people, --json for programs", hint="give one of the two")
    screen = open_screen()
    with open_cluster(url, api_key, data_dir) as client:
        view = client.state()
    if map:
        screen.write("".join(f"{line}\n" for line in draw_map(view)))
        return
    listed = [node for node in view.nodes if everyone or node.status != "gone"]
    if json:
        screen.write_json([dataclasses.asdict(node) for node in listed])
    elif not listed:
        screen.say("no machine has joined yet; shardcompute token create makes a token to join with")
    else:
        screen.write_table(
            ("NAME", "ID", "STATUS", "DEVICE", "MEMORY", "LAYERS"), [_row(node) for node in listed]
        )
        for node in listed:
            for failure in node.failures:
                screen.say(f"{node.name} could not load {failure.model}: {failure.reason}", "yellow")


def _row(node: NodeView) -> tuple[str, ...]:
    from shardcompute.cli.cluster_text import describe_layers
    from shardcompute.control.words import count_of, format_bytes

    reason = f" ({node.status_reason})" if node.status_reason else ""
    standby = " standby" if node.is_standby else ""
    return (
        node.name,
        node.id[:_ID_SHOWN],
        f"{node.status}{standby}{reason}",
        f"{node.device}, {count_of(node.threads, 'thread')}",
        "-"
        if node.role == "driver"
        else f"{format_bytes(node.used_bytes)} of {format_bytes(node.memory_bytes)}",
        describe_layers(node),
    )

"""`shardcompute nodes`: the machines of a cluster."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.output import Json, Watch
from shardcompute.cli.options.records import with_options
from shardcompute.core.errors import UsageError
from shardcompute.core.units import format_bytes

if TYPE_CHECKING:
    from shardcompute.cli.cluster.watching import Drawing
    from shardcompute.node.admin.views import ClusterView, NodeView

_MAP_WIDTH = 80


@with_options
def nodes(
    *,
    json: Json = False,
    map: Annotated[
        bool, typer.Option("--map", help="Draw which layers are where, and what slows a chain down.")
    ] = False,
    links: Annotated[
        bool,
        typer.Option("--links", help="List the links between them: the way, round trip and speed of each."),
    ] = False,
    everyone: Annotated[bool, typer.Option("--all", help="List nodes that have left, too.")] = False,
    watch: Watch = False,
    at: ClusterLocation,
) -> None:
    """The machines of a cluster: how they are, what they offer, which layers they hold.

    With --map every chain is a row of blocks, each as wide as the layers that its machine holds. With --json --watch
    every change is a line.
    """
    from shardcompute.cli.cluster import watching
    from shardcompute.cli.cluster.text import (
        chosen_backends,
        describe_detours,
        describe_links,
        describe_trouble,
        mixed_chains,
    )

    if json and map:
        raise UsageError("--map is for people, --json for programs", hint="give one of the two")
    if links and (json or map or watch):
        raise UsageError("--links is a list of its own", hint="leave out --json, --map and --watch")
    if everyone and map:
        raise UsageError("nodes that have left hold no layers to draw", hint="give --all or --map")
    screen = open_screen()
    picture = _picture(is_map=map, has_everyone=everyone)
    with at.connect() as client:
        if watch:
            watching.watch(client, picture, screen, is_json=json)
            return
        view = client.state()
    if links:
        for line in describe_links(view):
            screen.say(line)
        return
    listed = _listed(view, everyone)
    if not listed and not json:
        screen.say("no machine has joined yet; shardcompute token create makes a token to join with")
        return
    watching.show_once(view, picture, screen, is_json=json)
    if not json:
        for node in listed:
            if node.memory_reason:
                screen.say(
                    f"{node.name} offers {format_bytes(node.memory_bytes)} since {node.memory_reason}",
                    "yellow",
                )
            if node.attested:
                screen.say(f"{node.name} is attested: {node.attested}")
            if node.duty:
                screen.say(f"{node.name} {node.duty}")
            for failure in node.failures:
                screen.say(f"{node.name} could not load {failure.model}: {failure.reason}", "yellow")
            for line in describe_trouble(node):
                screen.say(line, "yellow")
        for line in (*describe_detours(view), *chosen_backends(view), *mixed_chains(view)):
            screen.say(line, "yellow")


def _picture(*, is_map: bool, has_everyone: bool) -> Drawing:
    from shardcompute.cli.cluster.layer_map import draw_map
    from shardcompute.cli.cluster.text import describe_nodes, describe_speeds, fit
    from shardcompute.cli.cluster.watching import Drawing

    def lines(view: ClusterView, width: int, height: int | None) -> list[str]:
        if is_map:
            # What is piped is read later, in windows that nobody knows.
            return fit(draw_map(view, width if height else min(width, _MAP_WIDTH)), height)
        listed = _listed(view, has_everyone)
        return fit([*describe_nodes(listed, width), *describe_speeds(listed)], height)

    return Drawing(lines, lambda view: [dataclasses.asdict(node) for node in _listed(view, has_everyone)])


def _listed(view: ClusterView, has_everyone: bool) -> list[NodeView]:
    return [node for node in view.nodes if has_everyone or node.status != "gone"]

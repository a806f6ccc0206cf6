"""Live view: shows a cluster once, or goes on showing it while it changes.

On a terminal a watched view is redrawn in place and fits the window; anywhere else every change is written anew. A
cluster that is out of reach for a while is waited for. Ctrl-C ends the watching, and with it the command, well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardcompute.cli.console import Screen, cut, without_controls
from shardcompute.core.errors import LinkError, ShardComputeError, SourceError

if TYPE_CHECKING:
    from rich.text import Text

    from shardcompute.cluster_client import ClusterClient
    from shardcompute.node.admin.views import ClusterView

_RETRY_S = 1.0
_PLAIN_WIDTH = 100
_MOST_WIDTH = 120
_COLOURS = {
    "green": r"\b(ready|serving)\b",
    "yellow": r"\b(planned|loading|moving|recovering|joining|suspected|draining|resting|standby)\b|\^+|<- bottleneck",
    "red": r"\b(lost|gone|quarantined|broken|unservable)\b",
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a command shows a view: as lines of at most `width` (and, unless None, `height`), and as JSON."""

    lines: Callable[[ClusterView, int, int | None], list[str]]
    document: Callable[[ClusterView], Any]


def show_once(view: ClusterView, picture: Drawing, screen: Screen, *, is_json: bool) -> None:
    if is_json:
        screen.write_json(picture.document(view))
    elif not screen.is_terminal:
        screen.write("".join(f"{line}\n" for line in picture.lines(view, _PLAIN_WIDTH, None)))
    else:
        # A line is left for the prompt that follows.
        for line in picture.lines(view, _width(screen), screen.out.height - 1):
            screen.out.print(paint(cut(line, _width(screen))), no_wrap=True, soft_wrap=False)


def watch(client: ClusterClient, picture: Drawing, screen: Screen, *, is_json: bool) -> None:
    """Until Ctrl-C, or until the cluster has stopped."""
    try:
        if screen.is_terminal and not is_json:
            _redraw(client, picture, screen)
        else:
            for view in _views(client, lambda error: screen.say(error.message, "yellow")):
                show_once(view, picture, screen, is_json=is_json)
    except KeyboardInterrupt:
        return


def _redraw(client: ClusterClient, picture: Drawing, screen: Screen) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=screen.out, auto_refresh=False, vertical_overflow="crop") as live:
        frame: list[Text] = []

        def show(note: str, style: str) -> None:
            live.update(Group(*frame, Text(note, style, no_wrap=True)), refresh=True)

        def complain(error: ShardComputeError) -> None:
            since = time.strftime("%H:%M:%S")
            show(cut(f"{since}, trying again, Ctrl-C leaves: {error.message}", _width(screen)), "yellow")

        for view in _views(client, complain):
            width, height = _width(screen), screen.out.height - 1
            frame = [paint(cut(line, width)) for line in picture.lines(view, width, height - 1)]
            show(f"{time.strftime('%H:%M:%S')}, Ctrl-C leaves", "dim")


def _views(client: ClusterClient, complain: Callable[[ShardComputeError], None]) -> Iterator[ClusterView]:
    """Views as they change; once there was one, a break is told and waited for."""
    was_there = False
    while True:
        try:
            for view in client.watch():
                was_there = True
                yield view
            return
        except (LinkError, SourceError) as error:
            if not was_there:
                raise
            complain(error)
        time.sleep(_RETRY_S)


def paint(line: str) -> Text:
    """The line with states coloured, which says nothing that the words do not say."""
    from rich.text import Text

    painted = Text(without_controls(line), no_wrap=True)
    for style, pattern in _COLOURS.items():
        for match in re.finditer(pattern, painted.plain):
            painted.stylize(style, *match.span())
    return painted


def _width(screen: Screen) -> int:
    return min(screen.out.width, _MOST_WIDTH)

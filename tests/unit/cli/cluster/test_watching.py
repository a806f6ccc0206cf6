"""Watching: every change is shown, a cluster that is away is waited for, and Ctrl-C ends it well."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from shardcompute.cli.cluster import watching
from shardcompute.cli.cluster.text import describe_cluster, describe_watched
from shardcompute.cli.console import Screen
from shardcompute.control import events as happened
from shardcompute.core.errors import SourceError
from shardcompute.node.admin.views import ClusterView
from shardcompute.node.telemetry.history_store import EventView

from ..cluster_lab import HERE, Lab

Cli = Callable[..., Any]
PICTURE = watching.Drawing(describe_cluster, lambda view: view.name)


class Watched:
    """A client whose stream does these things, one connection after the other."""

    def __init__(self, *connections: list[ClusterView | BaseException]) -> None:
        self._connections = list(connections)

    def watch(self) -> Iterator[ClusterView]:
        for step in self._connections.pop(0):
            if isinstance(step, BaseException):
                raise step
            yield step


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(watching.time, "sleep", waited.append)
    return waited


def _terminal(**options: Any) -> tuple[Screen, io.StringIO]:
    written = io.StringIO()
    out = Console(file=written, force_terminal=True, width=80, height=12, legacy_windows=False, **options)
    return Screen(out, Console(file=io.StringIO())), written


def test_nodes_are_watched(cli: Cli, lab: Lab) -> None:
    lab.script = [lambda: lab.cluster.coordinator.post(happened.NodeDrained("a"))]
    first, second = map(json.loads, cli("nodes", "--json", "--watch", *HERE).stdout.splitlines())
    assert [node["is_draining"] for node in first] == [False] * 3
    assert [node["is_draining"] for node in second] == [True, False, False]
    drawn = cli("nodes", "--map", "--watch", *HERE).stdout
    assert drawn.count("org/tiny: serving") == 2


def test_a_cluster_that_is_away_is_waited_for(
    lab: Lab, waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    view = lab.admin.state()
    gone = SourceError("The server cannot be reached")
    client: Any = Watched([view, gone], [gone], [view])
    screen = Screen(Console(file=io.StringIO()), Console(stderr=True))
    watching.watch(client, PICTURE, screen, is_json=True)
    assert capsys.readouterr().out == '"home"\n"home"\n'
    assert len(waits) == 2


def test_a_cluster_that_never_was_there_is_an_error(waits: list[float]) -> None:
    client: Any = Watched([SourceError("The server cannot be reached")])
    screen, _ = _terminal()
    with pytest.raises(SourceError):
        watching.watch(client, PICTURE, screen, is_json=False)
    assert waits == []


def test_on_a_terminal_it_is_redrawn_and_left_in_order(lab: Lab, waits: list[float]) -> None:
    view = lab.admin.state()
    client: Any = Watched([view, SourceError("nobody answers")], [view, KeyboardInterrupt()])
    screen, written = _terminal()
    watching.watch(client, PICTURE, screen, is_json=False)
    text = written.getvalue()
    assert "nobody answers" in text
    # Hidden while it is redrawn, the cursor is there again.
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h")
    frame = text.rpartition("cluster home")[2].splitlines()
    assert len(frame) <= 12


def test_colours_add_nothing_to_the_words(lab: Lab) -> None:
    for line in describe_cluster(lab.admin.state()):
        assert watching.paint(line).plain == line
    screen, written = _terminal(no_color=True)
    watching.show_once(lab.admin.state(), PICTURE, screen, is_json=False)
    assert "org/tiny: serving" in written.getvalue()
    assert "\x1b[3" not in written.getvalue()


def test_status_is_watched_with_what_happened_last(cli: Cli, lab: Lab) -> None:
    lab.script = [lambda: lab.cluster.join("z")]
    first, second = cli("status", "--watch", *HERE).stdout.split("cluster home")[1:]
    assert "Z joined" not in first
    assert "lately:" in second
    assert second.rstrip().endswith("Z joined: 2 threads, 1000 bytes of memory")
    assert "load: 0 running" in second
    assert "lately:" not in cli("status", *HERE).stdout


def test_the_last_events_fit_the_window(lab: Lab) -> None:
    for number in range(60):
        lab.admin.history.tell(EventView(kind="model", text=f"event {number}"))
    view = lab.admin.state()
    for height in (8, 12, 24, 60):
        lines = describe_watched(view, 80, height)
        assert len(lines) <= height
        assert lines[0].startswith("cluster home")
        assert (height < 12) or lines[-1].endswith("event 59")


def test_one_screen_is_one_screen(lab: Lab) -> None:
    screen, written = _terminal()
    watching.show_once(lab.admin.state(), PICTURE, screen, is_json=False)
    lines = written.getvalue().splitlines()
    assert len(lines) < 12

"""Single-process serving: `up --local`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shardcompute.cli.console import Screen
from shardcompute.cli.models.opening import open_with_progress
from shardcompute.cli.options.cluster import ServingArguments
from shardcompute.cli.serve.addresses import check_ports, reachable_host
from shardcompute.cli.serve.greeting import choose_keys, greeting
from shardcompute.core.settings import Settings

if TYPE_CHECKING:
    from shardcompute.node.local.service import EngineOptions, LocalService


def serve_locally(
    serving: ServingArguments, engine: EngineOptions, screen: Screen, settings: Settings
) -> None:
    """Until a signal asks to stop."""
    host, port = serving.host, serving.port
    keys = choose_keys(host, serving.api_key or [])
    # A port that is taken is said before the model is fetched and loaded.
    check_ports([(host, port)])
    opened = open_with_progress(serving.model, settings, engine, screen, is_quiet=False)
    with opened.service:
        screen.say(f"loaded in {opened.load_s:.1f} s")
        _serve(opened.service, host, port, keys, screen)
    screen.say("stopped")


def _serve(service: LocalService, host: str, port: int, keys: list[str], screen: Screen) -> None:
    from shardcompute.api import create_app, serve
    from shardcompute.web import page_routes

    def greet(bound_host: str, bound_port: int) -> None:
        for line in greeting(service.name, reachable_host(bound_host), bound_port, keys):
            screen.say(line)
        screen.say("Ctrl-C stops it.")

    app = create_app(service, api_keys=keys or None, page=page_routes())
    asyncio.run(serve(app, host, port, on_listening=greet))

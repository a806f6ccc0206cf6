"""Single-process serving: `up --local`."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from shardcompute.cli.console import Screen
from shardcompute.cli.models.opening import open_with_progress
from shardcompute.cli.options.cluster import ServingArguments
from shardcompute.cli.options.https import TlsExamples
from shardcompute.cli.options.keys import server_keys
from shardcompute.cli.serve.addresses import check_ports, is_loopback, reachable_host
from shardcompute.cli.serve.greeting import greeting, new_key
from shardcompute.core.settings import Settings

if TYPE_CHECKING:
    from shardcompute.api.access.hosts import AllowedHosts
    from shardcompute.node.local.service import EngineOptions, LocalService
    from shardcompute.security.https.server import ServerTls


def serve_locally(
    serving: ServingArguments, engine: EngineOptions, screen: Screen, settings: Settings
) -> None:
    """Until a signal asks to stop."""
    from shardcompute.api.access.hosts import hosts_of

    host, port = serving.host, serving.port
    keys = server_keys(serving.api_key_file, settings)
    is_made = not keys and (serving.require_key or not is_loopback(host))
    if is_made:
        keys = [f"sk-{secrets.token_urlsafe(24)}"]
    origins = serving.cors_origins(settings)
    # A certificate or port that cannot be used is said before the model is fetched and loaded.
    given = [*(serving.allowed_host or ()), *settings.allowed_hosts]
    tls = serving.https_choice.open(settings.data_dir, [host, reachable_host(host), *given])
    check_ports([(host, port)])
    opened = open_with_progress(serving.model, settings, engine, screen, is_quiet=False)
    with opened.service:
        screen.say(f"loaded in {opened.load_s:.1f} s")
        hosts = hosts_of(host, given)
        if is_made:
            for line in new_key(keys[0]):
                screen.say(line)
        examples = serving.https_choice.examples(tls, settings.data_dir)
        _serve(opened.service, serving, keys, hosts, origins, tls, examples, screen)
    screen.say("stopped")


def _serve(
    service: LocalService,
    serving: ServingArguments,
    keys: list[str],
    hosts: AllowedHosts,
    origins: tuple[str, ...],
    tls: ServerTls | None,
    examples: TlsExamples | None,
    screen: Screen,
) -> None:
    from shardcompute.api import create_app, serve
    from shardcompute.web import page_routes

    def greet(bound_host: str, bound_port: int) -> None:
        url = f"{'http' if tls is None else 'https'}://{reachable_host(bound_host)}:{bound_port}"
        for line in greeting(service.name, url, needs_key=bool(keys), tls=examples):
            screen.say(line)
        screen.say("Ctrl-C stops it.")

    app = create_app(
        service,
        api_keys=keys or None,
        hosts=hosts,
        cors_origins=origins,
        image_urls=serving.image_urls.value,
        page=page_routes(),
    )
    asyncio.run(serve(app, serving.host, serving.port, on_listening=greet, tls=tls))

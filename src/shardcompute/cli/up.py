"""`shardcompute up`: serve a model over HTTP, for any OpenAI client."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import shlex
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli import options
from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.opening import open_with_progress
from shardcompute.cli.options import Backend, WeightForm, engine_options
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.node.local_service import LocalService


def up(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model: smollm2 (the default), a folder, a .gguf file or org/repo."
        ),
    ] = "",
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for other machines too.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on; 0 for any free one.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="Key that clients must send; may be repeated. One is made where other machines can connect.",
        ),
    ] = None,
    weights: options.Weights = WeightForm.NATIVE,
    backend: options.BackendName = Backend.ONNX,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    context: options.Context = None,
    kv_memory: options.KvMemory = None,
    stages: options.Stages = 1,
) -> None:
    """Serve a model over HTTP until Ctrl-C.

    Speaks OpenAI's protocol. Listens for this machine only unless --host says otherwise; then clients need an
    API key, which is made and printed if none is given.
    """
    screen, settings = open_screen(), load_settings()
    keys = choose_keys(host, api_key or [])
    engine = engine_options(
        weights=weights,
        backend=backend,
        device=device,
        threads=threads,
        context=context,
        kv_memory=kv_memory,
        stages=stages,
    )
    asyncio.run(_check_address(host, port))
    opened = open_with_progress(model, settings, engine, screen, is_quiet=False)
    with opened.service:
        screen.say(f"loaded in {opened.load_s:.1f} s")
        serve_model(opened.service, host, port, keys, screen)
    screen.say("stopped")


async def _check_address(host: str, port: int) -> None:
    """A port that is taken is said before the model is fetched and loaded."""
    from shardcompute.api.server import bind

    (await bind(host, port)).close()


def serve_model(service: LocalService, host: str, port: int, keys: list[str], screen: Screen) -> None:
    """Until a signal asks to stop."""
    from shardcompute.api import create_app, serve

    def greet(bound_host: str, bound_port: int) -> None:
        for line in greeting(service.name, reachable_host(bound_host), bound_port, keys):
            screen.say(line)

    app = create_app(service, api_keys=keys or None)
    asyncio.run(serve(app, host, port, on_listening=greet))


def choose_keys(host: str, given: list[str]) -> list[str]:
    """The keys to ask for: those given, or a new one if machines other than this one can connect."""
    for key in given:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                "an API key is empty or holds characters that no header can carry",
                hint="use letters, digits, - and _",
            )
    if given or is_loopback(host):
        return given
    return [f"sk-{secrets.token_urlsafe(24)}"]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def reachable_host(host: str) -> str:
    """What others can use to reach a server on `host`, where that means any address of this machine."""
    address = ipaddress.ip_address(host)
    if not address.is_unspecified:
        return f"[{host}]" if address.version == 6 else host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; asks the system which address it would use
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def greeting(model: str, host: str, port: int, keys: list[str]) -> list[str]:
    """What to do next, ready to be copied."""
    url = f"http://{host}:{port}"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    header = f" -H {shlex.quote(f'Authorization: Bearer {keys[0]}')}" if keys else ""
    key = f", api_key={keys[0]!r}" if keys else ""
    return [
        "",
        f"{model} is ready at {url} (for OpenAI clients: {url}/v1)",
        *([f"API key: {keys[0]}"] if keys else []),
        "",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d {shlex.quote(body)}",
        "",
        "  from shardcompute.client import Client",
        f"  with Client({url!r}{key}) as client:",
        '      print(client.chat("Why is the sky blue?").text)',
        "",
        "Ctrl-C stops it.",
    ]

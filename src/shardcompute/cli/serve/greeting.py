"""Start-up message of a server that is ready: everything that comes next, ready to be copied."""

from __future__ import annotations

import json
import secrets
import shlex

from shardcompute.cli.serve.addresses import is_loopback
from shardcompute.core.errors import UsageError


def greeting(model: str, host: str, port: int, keys: list[str]) -> list[str]:
    """How to talk to `model`."""
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
    ]


def invitation(token: str, host: str) -> list[str]:
    """How to add a machine to a cluster that listens on `host`."""
    if is_loopback(host):
        return [
            "To add a worker from another folder of this machine (--host 0.0.0.0 lets other machines join):",
            "",
            f"  shardcompute join {token} --data-dir FOLDER",
            "",
        ]
    return ["To add a machine, run this on it:", "", f"  shardcompute join {token}", ""]


def check_keys(given: list[str]) -> list[str]:
    """The keys themselves; UsageError for one that no header can carry."""
    for key in given:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                "an API key is empty or holds characters that no header can carry",
                hint="use letters, digits, - and _",
            )
    return given


def choose_keys(host: str, given: list[str]) -> list[str]:
    """The keys to ask for: those given, or a new one if machines other than this one can connect."""
    if check_keys(given) or is_loopback(host):
        return given
    return [f"sk-{secrets.token_urlsafe(24)}"]

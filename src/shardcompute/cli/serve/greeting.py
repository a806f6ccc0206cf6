"""Start-up message of a server that is ready: everything that comes next, ready to be copied."""

from __future__ import annotations

import json
import shlex

from shardcompute.cli.format import format_duration
from shardcompute.cli.options.https import TlsExamples
from shardcompute.cli.options.keys import API_KEY_VARIABLE
from shardcompute.cli.serve.addresses import is_loopback
from shardcompute.core.units import count_of


def greeting(model: str, url: str, *, needs_key: bool = False, tls: TlsExamples | None = None) -> list[str]:
    """How to talk to `model`; a key is taken from the environment, where others do not see it."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    header = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if needs_key else ""
    trust = "" if tls is None else f"--cacert {shlex.quote(tls.certificate)} "
    key = f", api_key=os.environ[{API_KEY_VARIABLE!r}]" if needs_key else ""
    pin = "" if tls is None else f", tls_pin={tls.pin!r}"
    return [
        "",
        f"{model} is ready at {url} (for OpenAI clients: {url}/v1)",
        *([f"Clients need an API key, in these examples from {API_KEY_VARIABLE}."] if needs_key else []),
        *([] if tls is None else _trusting(tls)),
        "",
        f"  curl {trust}{url}/v1/chat/completions -H 'Content-Type: application/json'{header} "
        f"-d {shlex.quote(body)}",
        "",
        *(["  import os"] if needs_key else []),
        "  from shardcompute.client import Client",
        f"  with Client({url!r}{key}{pin}) as client:",
        '      print(client.chat("Why is the sky blue?").text)',
        "",
    ]


def _trusting(tls: TlsExamples) -> list[str]:
    return [
        f"Its certificate was made here: {tls.certificate}",
        f"  commands elsewhere know it by --tls-pin {tls.pin}",
        f"  browsers show its SHA-256 fingerprint, {tls.fingerprint}",
    ]


def new_key(key: str) -> list[str]:
    """A key that was made for clients, shown once."""
    return ["", f"API key for clients, shown this once: {key}", ""]


def dashboard(url: str, code: str, life_s: float) -> list[str]:
    """A link that signs the page in. What is behind # is sent to nobody."""
    return [
        f"The dashboard, signed in (this link works once, within {format_duration(life_s)}; "
        "shardcompute page prints another):",
        "",
        f"  {url}/#/sign-in/{code}",
        "",
    ]


def invitation(token: str, host: str, *, machines: int, life_s: float) -> list[str]:
    """How to add a machine to a cluster that listens on `host`."""
    good_for = f"good for {count_of(machines, 'machine')} and {format_duration(life_s)}"
    if is_loopback(host):
        return [
            "To add a worker from another folder of this machine (--host 0.0.0.0 lets other machines join), "
            f"{good_for}:",
            "",
            f"  shardcompute join {token} --data-dir FOLDER",
            "",
        ]
    return [
        f"To add a machine, run this on it ({good_for}; shardcompute token create makes others):",
        "",
        f"  shardcompute join {token}",
        "",
    ]

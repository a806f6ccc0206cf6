"""Options for API keys, which come from a file or the environment: a command line is for everybody to see."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Annotated

import typer

from shardcompute.core.errors import SourceError, UsageError
from shardcompute.core.settings import Settings

API_KEY_VARIABLE = "SHARDCOMPUTE_API_KEY"
_MOST_BYTES = 1 << 16
_log = logging.getLogger(__name__)
KEY_ROLES = ("use", "observe", "operate")
"""As `security.api_keys` names them, which takes longer to import; a test holds them together."""

ServerKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="File of keys that clients must send, one in a line, perhaps after its role (use, observe or operate; by "
        f"default use). {API_KEY_VARIABLE} may hold another. Where other machines can connect, one is made otherwise.",
    ),
]
RequireKey = Annotated[
    bool,
    typer.Option(
        "--require-key",
        help="Ask programs on this machine for a key, too: for a server behind a proxy.",
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="Another name that clients call this server by, such as that of a proxy; may be repeated, and begin with "
        "`*.` for all names below it.",
    ),
]
ClientKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help=f"File with its API key, if it is not in {API_KEY_VARIABLE}. The cluster on this machine needs none.",
        rich_help_panel="Where",
    ),
]


def server_keys(file: Path | None, settings: Settings) -> list[str]:
    """The keys that clients must send, each perhaps after its role; [] where none are given."""
    given = [] if settings.api_key is None else [settings.api_key.reveal()]
    return [_check(line) for line in [*given, *([] if file is None else _read(file))]]


def client_key(file: Path | None, settings: Settings) -> str | None:
    """The key to send."""
    if file is not None:
        line = _read(file)[0]
    elif settings.api_key is not None:
        line = settings.api_key.reveal()
    else:
        return None
    return _without_role(_check(line))


def _read(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            found, content = os.fstat(opened.fileno()), opened.read(_MOST_BYTES)
    except FileNotFoundError:
        raise SourceError(f"there is no file {file}", hint="write an API key into it") from None
    except OSError as error:
        raise SourceError(
            f"{file} cannot be read: {error.strerror}", hint="check whose file it is"
        ) from error
    # Containers are given secrets as files of root that all their users can read.
    if os.name != "nt" and found.st_uid and stat.S_IMODE(found.st_mode) & 0o077:
        _log.warning("%s holds API keys and other users can read it; run: chmod 600 %s", file, file)
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError:
        raise _unusable() from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{file} holds no API key", hint="write one into it, each in a line of its own")
    return keys


def _check(line: str) -> str:
    """The line; UsageError for a key that no header can carry."""
    key = _without_role(line)
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise _unusable()
    return line


def _without_role(line: str) -> str:
    role, _, key = line.partition(" ")
    return key.strip() if role in KEY_ROLES else line


def _unusable() -> UsageError:
    return UsageError(
        "an API key is empty or holds characters that no header can carry",
        hint="use letters, digits, - and _; before it may stand use, observe or operate",
    )

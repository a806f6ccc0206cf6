"""Options for HTTPS: a certificate of the operator's, or one that is made, and the address that comes of it."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.core.errors import UsageError

if TYPE_CHECKING:
    from shardcompute.security.https.server import ServerTls

HTTPS_FOLDER = "https"
_PANEL = "HTTPS"

Https = Annotated[
    bool,
    typer.Option(
        "--https",
        help="Speak HTTPS with a certificate that is made here and renewed in time; its key is said at the start, for "
        "clients to know the server by.",
        rich_help_panel=_PANEL,
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="Speak HTTPS with this certificate (PEM, the server's own first). It is read again when it changes.",
        rich_help_panel=_PANEL,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(
        "--tls-key",
        metavar="FILE",
        help="Key of --tls-cert (PEM, without a passphrase), where it is not in the same file.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class HttpsChoice:
    """What was asked for; `is_on` False: plain HTTP."""

    is_made: bool = False
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.is_made and (self.certificate or self.key):
            raise UsageError(
                "--https makes a certificate, --tls-cert names one",
                hint="give one or the other; both mean HTTPS",
            )
        if self.key is not None and self.certificate is None:
            raise UsageError("--tls-key is the key of a certificate", hint="name it with --tls-cert")

    @property
    def is_on(self) -> bool:
        return self.is_made or self.certificate is not None

    def open(self, folder: Path, names: Iterable[str]) -> ServerTls | None:
        """`folder` is the node's own; `names` are those by which clients call the server, besides the machine's own.
        SourceError for a certificate that cannot be shown."""
        if not self.is_on:
            return None
        from shardcompute.security.https.server import ServerTls
        from shardcompute.security.https.sources import MadeCertificate, OperatorFiles

        if self.certificate is not None:
            return ServerTls(OperatorFiles(self.certificate, self.key))
        given = list(names)
        return ServerTls(MadeCertificate(folder / HTTPS_FOLDER, lambda: [*_own_names(), *given]))

    def examples(self, tls: ServerTls | None, folder: Path) -> TlsExamples | None:
        """What clients must know of a server whose certificate nobody else vouches for."""
        if tls is None or not self.is_made:
            return None
        from shardcompute.security.https.sources import CERTIFICATE_FILE

        return TlsExamples(
            tls.shown.pin, tls.shown.fingerprint, str(folder / HTTPS_FOLDER / CERTIFICATE_FILE)
        )


@dataclass(frozen=True, slots=True)
class TlsExamples:
    pin: str
    fingerprint: str
    certificate: str


def _own_names() -> list[str]:
    machine = socket.gethostname().lower()
    return ["localhost", "127.0.0.1", "::1", machine, f"{machine}.local"]

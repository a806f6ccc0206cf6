"""Options of commands that check signed files: whose authority is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.options.cluster import cluster_folder
from shardcompute.core.errors import SourceError, UsageError
from shardcompute.core.settings import load_settings

_AUTHORITY_FILES = ("authority/authority.pem", "coordinator/certificate.pem", "certificate.pem")
AuthorityFile = Annotated[
    Path | None,
    typer.Option(
        "--authority",
        metavar="PEM",
        help="Certificate of the cluster's authority: the certificate.pem of any member has it.",
    ),
]
AuthorityFingerprint = Annotated[
    str | None,
    typer.Option("--fingerprint", metavar="HEX", help="SHA-256 of that certificate, in its place."),
]


def trusted_authority(authority: Path | None, data_dir: Path | None) -> str:
    """The certificate (PEM) in a file that was named, or else that of the cluster on this machine."""
    from shardcompute.security.receipts.trust import read_authority

    found = authority or _own_authority(data_dir)
    return read_authority(content_of(found), str(found))


def content_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SourceError(
            f"{file} cannot be read: {error.strerror}", hint="name a file that is there"
        ) from error


def _own_authority(data_dir: Path | None) -> Path:
    folder = cluster_folder(load_settings(), data_dir)
    for name in _AUTHORITY_FILES:
        if (folder / name).is_file():
            return folder / name
    raise UsageError(
        "whom to trust is not known: there is no cluster on this machine",
        hint="give --authority with the certificate.pem of a member, or --fingerprint",
    )

"""Enrolled nodes on disk: key and certificate (see `security`), and in `member.json` where the coordinator is."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardcompute.core.errors import AuthError, SourceError, UsageError
from shardcompute.node.enrolment.join_client import join_together
from shardcompute.security.certificates import (
    certificate_der,
    fingerprint_of,
    needs_renewal,
    parse_certificate,
)
from shardcompute.security.credentials import Credentials
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.names import Role
from shardcompute.security.private_files import open_private_folder, read_private, replace_private
from shardcompute.security.tokens import JoinToken

log = logging.getLogger(__name__)
MEMBER_FILE = "member.json"
_COMMANDS = {Role.WORKER: "join", Role.DRIVER: "driver"}


@dataclass(frozen=True, slots=True)
class EnrolledNode:
    """A node that has joined a cluster and knows where to go."""

    credentials: Credentials
    control_urls: tuple[str, ...]


class _Stored(msgspec.Struct, frozen=True):
    control_urls: tuple[str, ...]


def join_from(folder: Path, token: JoinToken, role: Role = Role.WORKER, through: str = "") -> EnrolledNode:
    """Join the token's cluster from `folder`, or renew what was joined before.

    UsageError if the folder belongs to another cluster; otherwise as `join_client.join_cluster`.
    """
    [member] = join_all_from([folder], token, role, through)
    return member


def join_all_from(
    folders: Sequence[Path],
    token: JoinToken,
    role: Role = Role.WORKER,
    through: str = "",
    evidence: bytes = b"",
) -> list[EnrolledNode]:
    """Like `join_from` for several nodes of this machine at once, who use the token once; `through`: see
    `join_client.join_cluster`."""
    for folder in folders:
        open_private_folder(folder)
        former = _credentials(folder)
        if former is not None and authority_of(former) != token.fingerprint:
            raise UsageError(
                f"{folder} belongs to another cluster, {former.own.cluster!r}, not to that of the token",
                hint="choose another --data-dir, or delete this one",
            )
        if former is not None:
            _check_role(folder, former, role)
    joined, urls = join_together(token, folders, role, through, evidence)
    return [remember(folder, each, urls) for folder, each in zip(folders, joined, strict=True)]


def open_enrolled(folder: Path, role: Role = Role.WORKER) -> EnrolledNode:
    """What was joined from `folder` before. UsageError if nothing was, AuthError if it has run out."""
    if folder.is_dir():
        open_private_folder(folder)
    credentials = _credentials(folder)
    stored = _read(folder)
    if credentials is None or stored is None:
        raise UsageError(
            f"no cluster has been joined from {folder}",
            hint=f"run: shardcompute {_COMMANDS[role]} TOKEN, with the token that `shardcompute up` prints",
        )
    _check_role(folder, credentials, role)
    if credentials.own.expires_at_s <= time.time():
        raise AuthError(
            f"the certificate in {folder} has run out",
            hint="join again with a new token from the coordinator",
        )
    return EnrolledNode(credentials, stored.control_urls)


def is_enrolled(folder: Path, fingerprint: str) -> bool:
    """Whether the folder holds a good certificate of the cluster with this authority."""
    credentials = _credentials(folder)
    return (
        credentials is not None
        and authority_of(credentials) == fingerprint
        and not needs_renewal(credentials.certificate_pem, time.time())
    )


def remember(folder: Path, credentials: Credentials, urls: list[str]) -> EnrolledNode:
    """Write down where the coordinator is."""
    stored = _Stored(tuple(urls))
    replace_private(folder / MEMBER_FILE, msgspec.json.encode(stored))
    return EnrolledNode(credentials, stored.control_urls)


def remember_urls(credentials: Credentials, urls: list[str]) -> None:
    """Write down where coordinators are, as one of them has said; where that cannot be done, it is said again."""
    try:
        remember(credentials.identity.key_path.parent, credentials, urls)
    except SourceError as error:
        log.warning("where coordinators are is not on disk, and lost with this process: %s", error.message)


def authority_of(credentials: Credentials) -> str:
    """The fingerprint of the cluster that issued the certificate."""
    return fingerprint_of(certificate_der(parse_certificate(credentials.authority_pem)))


def _check_role(folder: Path, credentials: Credentials, role: Role) -> None:
    """A folder is one node, in one role: nobody is to count it twice."""
    if role not in credentials.own.roles:
        others = " and ".join(sorted(credentials.own.roles))
        raise UsageError(f"{folder} belongs to a {others}, not to a {role}", hint="choose another --data-dir")


def _credentials(folder: Path) -> Credentials | None:
    try:
        return Credentials.load(NodeIdentity.load(folder))
    except FileNotFoundError:
        return None


def _read(folder: Path) -> _Stored | None:
    path = folder / MEMBER_FILE
    try:
        return msgspec.json.decode(read_private(path), type=_Stored)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SourceError(f"{path} is damaged: {error}", hint="join the cluster again") from error

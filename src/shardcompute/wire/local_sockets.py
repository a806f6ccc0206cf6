"""Local sockets: a Unix socket beside each TCP port, for links between processes of one user on one machine.

Both ends of a link prove who they are as over TCP, by a TLS handshake with certificates, and then go on in the clear:
what they send does not leave the system's memory. That is for processes of one user alone: the sockets lie in a folder
that is closed to others, and each end asks the system whose process the other is. Where that cannot be had (Windows, a
path too long for a socket, a folder of somebody else's) links go over TCP, as between machines.

A socket is found by the node and the port that are wanted, and by the network that a process is in: containers with
networks of their own are machines of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import secrets
import socket
import stat
import struct
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)
_BACKLOG = 128
_MOST_PATH_BYTES = 100
"""Less than any system has room for in a socket's address."""
_MOST_LOOKED_AT = 256
_MACOS_LEVEL, _MACOS_PEER = 0, 1
"""SOL_LOCAL and LOCAL_PEERCRED, which Python has no names for."""
_UNIX = getattr(socket, "AF_UNIX", None)
_LINUX_PEER = getattr(socket, "SO_PEERCRED", None)


class LocalSocket:
    """One that is listened at; closing it frees its path."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self.sock = sock
        self._path = path
        self._number = path.lstat().st_ino

    def close(self) -> None:
        self.sock.close()
        with contextlib.suppress(OSError):
            # Another process may have taken the path over.
            if self._path.lstat().st_ino == self._number:
                self._path.unlink()


class LocalSockets:
    """The sockets of this user, in a folder that is made when the first is listened at."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def listen(self, node: str, port: int) -> LocalSocket | None:
        """Beside a port that this process has; None where that cannot be."""
        if _UNIX is None or not self._is_private(makes=True):
            return None
        path = self._path(node, port)
        if len(os.fsencode(path)) > _MOST_PATH_BYTES:
            return None
        self._sweep()
        made = path.with_name(f".{secrets.token_hex(8)}")
        sock = socket.socket(_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(str(made))
            sock.listen(_BACKLOG)
            # Nobody finds it before it answers. What a process left behind that had this port is replaced.
            made.replace(path)
            return LocalSocket(sock, path)
        except OSError as error:
            log.info("links on this machine go over TCP: %s", error)
            sock.close()
            with contextlib.suppress(OSError):
                made.unlink()
            return None

    def connect(self, node: str, port: int, timeout_s: float) -> socket.socket | None:
        """To the node that has this port on this machine; None where none of this user's has."""
        if _UNIX is None or not self._is_private(makes=False):
            return None
        sock = socket.socket(_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(str(self._path(node, port)))
            check_peer_user(sock)
        except OSError as error:
            sock.close()
            if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                log.info("the link to %s goes over TCP: %s", node, error)
            return None
        return sock

    def _path(self, node: str, port: int) -> Path:
        # What a node is called comes from outside: its name is no part of a path.
        name = f"{_network()} {port} {node}"
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    def _is_private(self, *, makes: bool) -> bool:
        """Whether the folder is there, this user's, and closed to all others."""
        try:
            if makes:
                with contextlib.suppress(FileExistsError):
                    self._folder.mkdir(mode=0o700)
            found = self._folder.lstat()
        except OSError:
            return False
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == _own_user()
        return is_own and not stat.S_IMODE(found.st_mode) & 0o077

    def _sweep(self) -> None:
        """Remove sockets of processes that were killed: nobody answers there."""
        if _UNIX is None:
            return
        with contextlib.suppress(OSError), os.scandir(self._folder) as found:
            for entry, _ in zip(found, range(_MOST_LOOKED_AT), strict=False):
                with socket.socket(_UNIX, socket.SOCK_STREAM) as probe:
                    probe.setblocking(False)
                    try:
                        probe.connect(entry.path)
                    except ConnectionRefusedError:
                        if not entry.name.startswith("."):
                            Path(entry.path).unlink(missing_ok=True)
                    except OSError:
                        # Busy, or no socket.
                        continue


def default_local_sockets() -> LocalSockets | None:
    """Those of this user; None where the system has no such sockets, or does not say whose process is at an end."""
    user = _own_user()
    if user is None or _UNIX is None or platform.system() not in ("Linux", "Darwin"):
        return None
    return LocalSockets(Path(tempfile.gettempdir(), f"shardcompute-links-{user}"))


def check_peer_user(sock: socket.socket) -> None:
    """PermissionError unless the process at the other end is this user's."""
    user = peer_user(sock)
    if user is None or user != _own_user():
        raise PermissionError("the process at the other end is another user's")


def peer_user(sock: socket.socket) -> int | None:
    """Whose process connected, or was connected to, as the system says; None where it does not."""
    if _LINUX_PEER is not None:
        told = sock.getsockopt(socket.SOL_SOCKET, _LINUX_PEER, struct.calcsize("iII"))
        return int(struct.unpack("iII", told)[1])
    if platform.system() == "Darwin":
        return int(struct.unpack_from("=II", sock.getsockopt(_MACOS_LEVEL, _MACOS_PEER, 76))[1])
    return None


def _own_user() -> int | None:
    user = getattr(os, "getuid", None)
    return None if user is None else int(user())


def _network() -> int:
    """Tells the network of this process from others of the machine, where there can be several."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0

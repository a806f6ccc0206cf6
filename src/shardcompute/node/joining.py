"""How a machine becomes a node: it shows a join token and goes away with a certificate.

The applicant first makes sure that it talks to the cluster that the token names (see `security.bootstrap`); only
then does it send the token's secret. The coordinator answers one applicant per connection, each in a thread with
a deadline, and says nothing to anybody whose token is not good.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from shardcompute.core import errors
from shardcompute.core.errors import AuthError, LinkError, ShardComputeError
from shardcompute.security.bootstrap import answer_join, open_join
from shardcompute.security.credentials import Credentials
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.names import Role
from shardcompute.security.tokens import JoinToken

log = logging.getLogger(__name__)
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 64 << 10
_TIMEOUT_S = 10.0
_MOST_AT_ONCE = 32


class Application(msgspec.Struct, frozen=True):
    """What an applicant says, once it knows whom it talks to."""

    token_id: str
    secret: bytes
    role: str
    node_id: str
    request_pem: str


class Admission(msgspec.Struct, frozen=True):
    """What it gets: a certificate and where to go, or why not."""

    certificate_pem: str = ""
    control_urls: list[str] = []
    error: str = ""
    code: str = ""


def join_cluster(token: JoinToken, folder: Path, role: Role) -> tuple[Credentials, list[str]]:
    """Join with a token: this node's credentials, saved in `folder`, and the coordinator's control URLs.

    Tries the token's addresses in turn. Raises AuthError when the token is refused, LinkError when nobody answers.
    """
    identity = NodeIdentity.open(folder)
    application = Application(
        token.token_id, token.secret, role.value, identity.node_id, identity.certificate_request()
    )
    failures = []
    for address in token.addresses:
        try:
            return _apply(address, token, identity, application)
        except LinkError as error:
            failures.append(f"{address}: {error.message}")
    raise LinkError(
        f"the cluster {token.cluster} cannot be reached ({'; '.join(failures)})",
        hint="check that the coordinator is running and that its ports are open to this machine",
    )


def _apply(
    address: str, token: JoinToken, identity: NodeIdentity, application: Application
) -> tuple[Credentials, list[str]]:
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S)
    except OSError as error:
        raise LinkError(f"no connection: {error.strerror or error}") from error
    connection, authority_pem = open_join(sock, token)
    with connection:
        _send(connection, msgspec.json.encode(application))
        try:
            admission = msgspec.json.decode(_receive(connection), type=Admission)
        except (msgspec.DecodeError, OSError) as error:
            raise LinkError(f"the coordinator's answer cannot be understood: {error}") from error
    if admission.error:
        kind = getattr(errors, admission.code, AuthError)
        is_ours = isinstance(kind, type) and issubclass(kind, ShardComputeError)
        raise (kind if is_ours else AuthError)(admission.error, hint="ask the coordinator for a new token")
    credentials = Credentials(identity, admission.certificate_pem, authority_pem)
    credentials.save()
    return credentials, [_reachable(url, host) for url in admission.control_urls]


def _reachable(url: str, host: str) -> str:
    """A coordinator that listens everywhere names no host: the one that answered is it."""
    return url.replace("//0.0.0.0:", f"//{host}:").replace("//[::]:", f"//{host}:")


class JoinDesk:
    """The coordinator's side. `admit` decides on applications; it raises AuthError to refuse."""

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext,
        authority_pem: str,
        admit: Callable[[Application], Admission],
    ) -> None:
        self._context = context
        self._authority_pem = authority_pem
        self._admit = admit
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise LinkError(
                f"port {port} on {host} cannot be used for joining: {error.strerror}",
                hint="choose another port",
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="join desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:
                return
            if not self._places.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._answer, args=(sock, peer[0]), name="applicant", daemon=True).start()

    def _answer(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.settimeout(_TIMEOUT_S)
            with answer_join(sock, self._context, self._authority_pem) as connection:
                try:
                    application = msgspec.json.decode(_receive(connection), type=Application)
                    admission = self._admit(application)
                except msgspec.DecodeError:
                    admission = Admission(error="The application cannot be understood", code="AuthError")
                except ShardComputeError as error:
                    log.warning("an applicant from %s was refused: %s", peer, error.message)
                    admission = Admission(error=error.message, code=type(error).__name__)
                _send(connection, msgspec.json.encode(admission))
        except (ShardComputeError, OSError) as error:
            log.info("an applicant from %s gave up: %s", peer, error)
        finally:
            self._places.release()


def _send(connection: ssl.SSLSocket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: ssl.SSLSocket) -> bytes:
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if size > _MOST_BYTES:
        raise LinkError(f"{size} bytes are more than anybody needs to join")
    return _receive_exactly(connection, size)


def _receive_exactly(connection: ssl.SSLSocket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        chunk = connection.recv(size - len(content))
        if not chunk:
            raise LinkError("the other side hung up")
        content += chunk
    return bytes(content)

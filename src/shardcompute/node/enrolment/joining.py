"""How a machine becomes a node: it shows a join token and goes away with a certificate.

The applicant first makes sure that it talks to the cluster that the token names (see `security.bootstrap`); only
then does it send the token's secret. The coordinator answers one applicant per connection, each in a thread with
a deadline for all of it, and says nothing to anybody whose token is not good.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shardcompute.core import errors
from shardcompute.core.errors import AuthError, LinkError, ShardComputeError
from shardcompute.core.rate_limited_log import RateLimitedLog
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
_WATCH_S = 0.5


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
        try:
            _send(connection, msgspec.json.encode(application))
            admission = msgspec.json.decode(_receive(connection), type=Admission)
        except (ValueError, RecursionError, OSError) as error:
            raise LinkError(f"the coordinator did not answer as it should: {error}") from error
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
        *,
        timeout_s: float = _TIMEOUT_S,
        most_at_once: int = _MOST_AT_ONCE,
    ) -> None:
        self._context = context
        self._authority_pem = authority_pem
        self._admit = admit
        self._timeout_s = timeout_s
        self._most_at_once = most_at_once
        self._lock = threading.Lock()
        self._limited_log = RateLimitedLog(log)
        self._applicants: dict[threading.Thread, _Applicant] = {}
        self._is_closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise LinkError(
                f"port {port} on {host} cannot be used for joining: {error.strerror}",
                hint="choose another port",
            ) from error
        self._socket.settimeout(_WATCH_S)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="join desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        with self._lock:
            applicants = dict(self._applicants)
        for thread, applicant in applicants.items():
            applicant.hang_up()
            thread.join()

    def _serve(self) -> None:
        while not self._is_closed:
            self._dismiss_the_slow()
            try:
                sock, peer = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._is_closed:
                    self._limited_log.warning("accept", "nobody can join for a moment: %s", error)
                    time.sleep(_WATCH_S)
                continue
            self._accept(sock, peer[0])

    def _accept(self, sock: socket.socket, peer: str) -> None:
        """Serve an applicant in a thread. Where all places are taken, who has been there longest must go: an honest
        applicant needs a moment only."""
        try:
            applicant = _Applicant(peer, sock.dup(), time.monotonic() + self._timeout_s)
        except OSError as error:
            self._limited_log.warning("accept", "nobody can join for a moment: %s", error)
            sock.close()
            return
        thread = threading.Thread(
            target=self._answer, args=(sock, applicant), name=f"applicant {peer}", daemon=True
        )
        with self._lock:
            waiting = [each for each in self._applicants.values() if not each.is_dismissed]
            if len(waiting) >= self._most_at_once:
                waiting[0].hang_up()
            self._applicants[thread] = applicant
        thread.start()

    def _dismiss_the_slow(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            late = [each for each in self._applicants.values() if each.deadline_s <= now_s]
        for applicant in late:
            applicant.hang_up()

    def _answer(self, sock: socket.socket, applicant: _Applicant) -> None:
        peer = applicant.peer
        try:
            sock.settimeout(self._timeout_s)
            with answer_join(sock, self._context, self._authority_pem) as connection:
                _send(connection, msgspec.json.encode(self._judge(_receive(connection), peer)))
        except (ShardComputeError, OSError) as error:
            self._limited_log.info(peer, "an applicant from %s gave up: %s", peer, error)
        except Exception:
            self._limited_log.error(peer, "an applicant from %s could not be served", peer, exc_info=True)
        finally:
            applicant.close()
            with self._lock:
                del self._applicants[threading.current_thread()]

    def _judge(self, content: bytes, peer: str) -> Admission:
        try:
            application = msgspec.json.decode(content, type=Application)
        except (ValueError, RecursionError):
            return Admission(error="The application cannot be understood", code="AuthError")
        try:
            return self._admit(application)
        except ShardComputeError as error:
            self._limited_log.warning(peer, "an applicant from %s was refused: %s", peer, error.message)
            return Admission(error=error.message, code=type(error).__name__)


class _Applicant:
    """A second grip on an applicant's socket, by which it can be ended while its thread waits for it."""

    def __init__(self, peer: str, handle: socket.socket, deadline_s: float) -> None:
        self.peer = peer
        self.deadline_s = deadline_s
        self.is_dismissed = False
        self._handle = handle

    def hang_up(self) -> None:
        self.is_dismissed = True
        with contextlib.suppress(OSError):
            self._handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._handle.close()


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

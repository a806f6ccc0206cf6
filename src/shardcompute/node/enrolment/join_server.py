"""Join server of the coordinator: it admits machines that show a join token, and pairs those that have a code.

It answers one applicant per connection, each in a thread with a deadline for all of it, and says nothing to anybody
whose token is not good.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable

import msgspec

from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.core.sockets.hosts import plain_address
from shardcompute.core.sockets.listening import listen
from shardcompute.node.enrolment.admission import (
    TIMEOUT_S,
    Admission,
    Application,
    FirstWords,
    PairingStart,
    receive,
    send,
)
from shardcompute.node.enrolment.pairing_server import PairingServer
from shardcompute.security.bootstrap import answer_join

log = logging.getLogger(__name__)
_MOST_AT_ONCE = 32
_WATCH_S = 0.5


class JoinServer:
    """Listens for applicants. `admit` decides on applications and knows from where they come; it raises AuthError to
    refuse."""

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext,
        authority_pem: str,
        admit: Callable[[Application, str], Admission],
        *,
        pairing: PairingServer | None = None,
        timeout_s: float = TIMEOUT_S,
        most_at_once: int = _MOST_AT_ONCE,
    ) -> None:
        self._context = context
        self._authority_pem = authority_pem
        self._admit = admit
        self._pairing = pairing
        self._timeout_s = timeout_s
        self._most_at_once = most_at_once
        self._lock = threading.Lock()
        self._limited_log = RateLimitedLog(log)
        self._applicants: dict[threading.Thread, _Applicant] = {}
        self._is_closed = False
        try:
            self._socket = listen(host, port)
        except OSError as error:
            raise LinkError(
                f"port {port} on {host} cannot be used for joining: {error.strerror}",
                hint="choose another port",
            ) from error
        self._socket.settimeout(_WATCH_S)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="join server", daemon=True)
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
            self._hang_up_on_the_slow()
            try:
                sock, peer = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._is_closed:
                    self._limited_log.warning("accept", "nobody can join for a moment: %s", error)
                    time.sleep(_WATCH_S)
                continue
            self.serve_connection(sock, plain_address(peer[0]))

    def serve_connection(self, sock: socket.socket, peer: str) -> None:
        """Serve an applicant in a thread. Where there are too many, who has been there longest must go: an honest
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

    def _hang_up_on_the_slow(self) -> None:
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
                self._hear(connection, peer)
        except (ShardComputeError, OSError) as error:
            self._limited_log.info(peer, "an applicant from %s gave up: %s", peer, error)
        except Exception:
            self._limited_log.error(peer, "an applicant from %s could not be served", peer, exc_info=True)
        finally:
            applicant.close()
            with self._lock:
                del self._applicants[threading.current_thread()]

    def _hear(self, connection: ssl.SSLSocket, peer: str) -> None:
        try:
            said = msgspec.json.decode(receive(connection), type=FirstWords)
        except (ValueError, RecursionError):
            said = None
        if isinstance(said, PairingStart) and self._pairing is not None:
            self._pairing.answer(connection, said)
            return
        admission = Admission(error="The application cannot be understood", code="AuthError")
        if isinstance(said, Application):
            admission = self._judge(said, peer)
        send(connection, msgspec.json.encode(admission))

    def _judge(self, application: Application, peer: str) -> Admission:
        try:
            return self._admit(application, peer)
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

"""A link over a connected socket, in the clear, inside TLS, or in the clear after a handshake of TLS.

The last is for sockets that no other user can reach (`local_sockets`): both ends have shown their certificates, and
what follows needs no cipher. `open_link` and `answer_link` turn a connected socket into an introduced link, whichever
way it was connected. Both keep to one deadline for TLS and introductions together, so that a silent peer holds its
thread for a known time only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time

from shardcompute.core.closing import Closing
from shardcompute.core.errors import LinkClosedError, LinkError
from shardcompute.core.sockets.secure_socket import SecureSocket
from shardcompute.wire.framing import Body, FrameReader, Part, pack_frame
from shardcompute.wire.handshake import Introduction, answer, introduce
from shardcompute.wire.limits import HANDSHAKE_LIMITS
from shardcompute.wire.links import DIRECT, LOCAL, Admit, LinkOptions, LinkStats
from shardcompute.wire.messages import Hello, Message
from shardcompute.wire.streams import ByteStream, PlainStream, TlsStream

_TLS_HINT = "check that both nodes belong to the same cluster and that their clocks are right"


class SocketLink(Closing):
    """Made by `open_link` and `answer_link`; until `introduced` it keeps to `deadline` and small limits."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        options: LinkOptions,
        deadline: float,
        *,
        certificate: bytes | None = None,
        is_local: bool = False,
    ) -> None:
        """`certificate`: what the peer has shown; of a TLS socket it is known."""
        self.address = address
        self.peer = ""
        self.role = ""
        self.version = 0
        self.certificate = (
            sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket) else certificate
        )
        self.is_local = is_local
        self.rung = LOCAL if is_local else DIRECT
        self.remark = ""
        self._tls_version = sock.version() if isinstance(sock, ssl.SSLSocket) else None
        self._congestion = read_congestion(sock)
        self._sock = sock
        self._stream: ByteStream = TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)
        self._options = options
        self._deadline: float | None = deadline
        self._limits = HANDSHAKE_LIMITS
        self._reader = FrameReader(HANDSHAKE_LIMITS)
        # Each is held for as long as the socket is in use, so that `close` frees it under nobody's feet.
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._ending = threading.Lock()
        self._end: tuple[str, str] | None = None
        self._is_detached = False
        self._sent = (0, 0)
        self._received = (0, 0)

    def introduced(self, introduction: Introduction) -> None:
        self.peer, self.role, self.version = introduction.peer, introduction.role, introduction.version
        self._deadline = None
        self._limits = self._reader.limits = self._options.limits

    @property
    def stats(self) -> LinkStats:
        return LinkStats(
            *self._sent,
            *self._received,
            self._congestion,
            self._tls_version,
            self.is_local,
            self.rung,
            self.remark,
        )

    def turn_round(self, role: str, rung: str) -> None:
        """We dialled because the peer asked us to: from now on it is as if it had dialled us, in this role."""
        self.role, self.rung = role, rung

    @property
    def has_one_host(self) -> bool:
        """Whether both ends have the same address."""
        if self._sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            return bool(self._sock.getsockname()[0] == self._sock.getpeername()[0])
        except OSError:
            return False

    def send(self, message: Message, body: Body = ()) -> None:
        parts = pack_frame(message, body, self._limits)
        size_bytes = sum(map(len, parts))
        parts = self._stream.prepare(parts)
        with self._sending:
            self._check_open()
            try:
                self._write(parts, self._frame_deadline(time.monotonic(), size_bytes))
            except LinkError as error:
                raise self._end_with(error) from error.__cause__
            self._sent = (self._sent[0] + 1, self._sent[1] + size_bytes)

    def receive(self, timeout_s: float | None = None) -> tuple[Message, memoryview]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._deadline is not None:
            deadline = self._deadline
        with self._receiving:
            self._check_open()
            try:
                frame = self._read_frame(deadline)
            except LinkError as error:
                raise self._end_with(error) from error.__cause__
            self._received = (self._received[0] + 1, self._received[1] + self._reader.frame_bytes)
            return frame

    def detach(self) -> tuple[socket.socket, bytes]:
        """The connection itself, with what was already read of it, for whoever goes on without frames of ours. It is
        non-blocking and the caller's to close. Of the link only `close` is left, which ends the connection for whoever
        has it. Between frames only, by who sends and receives on it."""
        with self._receiving, self._sending:
            self._check_open()
            left = self._reader.release()
            self._is_detached = True
            self._end = (f"the connection to {self._who()} was handed over", "")
            return self._sock, left

    def close(self) -> None:
        self._end_with(LinkClosedError(f"the link to {self._who()} was closed here"))
        if self._is_detached:
            shut_down(self._sock)
            return
        # The shutdown has woken whoever held these.
        with self._receiving, self._sending:
            self._sock.close()

    def _read_frame(self, idle_deadline: float | None) -> tuple[Message, memoryview]:
        reader = self._reader
        began_s: float | None = None
        while (frame := reader.next_frame()) is None:
            deadline = idle_deadline
            if reader.is_inside_frame:
                began_s = time.monotonic() if began_s is None else began_s
                deadline = self._frame_deadline(began_s, reader.announced_bytes)
            count = self._read(reader.space(), deadline)
            if count == 0:
                where = "in the middle of a frame" if reader.is_inside_frame else "between frames"
                raise LinkClosedError(
                    f"{self._who()} ended the link {where}",
                    hint="the node may have stopped or lost its network",
                )
            reader.advance(count)
        return frame

    def _read(self, space: memoryview, deadline: float | None) -> int:
        try:
            count = self._stream.read(space, deadline)
        except TimeoutError as error:
            # The system reports a peer that has stopped answering by the same class, with a number.
            if error.errno is not None:
                raise self._lost(error) from error
            if not self._reader.is_inside_frame:
                raise
            raise LinkError(
                f"{self._who()} sends too slowly", hint="the node may be overloaded or its network very slow"
            ) from error
        except OSError as error:
            raise self._lost(error) from error
        # Bytes that came before a shutdown of our own can still be read, but nobody wants them any more.
        self._check_open()
        return count

    def _write(self, parts: list[Part], deadline: float | None) -> None:
        try:
            self._stream.write(parts, deadline)
        except TimeoutError as error:
            if error.errno is not None:
                raise self._lost(error) from error
            raise LinkError(
                f"{self._who()} reads too slowly", hint="the node may be overloaded or its network very slow"
            ) from error
        except OSError as error:
            raise self._lost(error) from error

    def _frame_deadline(self, began_s: float, size_bytes: int) -> float:
        if self._deadline is not None:
            return self._deadline
        return began_s + self._options.frame_timeout_s + size_bytes / self._options.slowest_bytes_per_s

    def _lost(self, error: OSError) -> LinkError:
        if isinstance(error, ssl.SSLError):
            return LinkError(f"TLS with {self._who()} failed: {error.reason or error}", hint=_TLS_HINT)
        return LinkClosedError(f"the link to {self._who()} broke: {error.strerror or error}")

    def _end_with(self, error: LinkError) -> LinkError:
        """Use the link no more. Returns what to report: `error`, or what had ended the link before it."""
        with self._ending:
            if self._end is not None:
                return LinkClosedError(self._end[0], hint=self._end[1])
            self._end = (error.message, error.hint)
            shut_down(self._sock)
            return error

    def _check_open(self) -> None:
        if self._end is not None:
            raise LinkClosedError(self._end[0], hint=self._end[1])

    def _who(self) -> str:
        return f"{self.peer!r} at {self.address}" if self.peer else self.address


def open_link(
    sock: socket.socket,
    address: str,
    server_name: str,
    ours: Hello,
    options: LinkOptions,
    *,
    is_local: bool = False,
) -> SocketLink:
    """The link of whoever dialled; the socket is closed if it fails. Under TLS the peer's certificate must
    bear `server_name`. `is_local`: TLS is left behind after its handshake, at both ends."""
    deadline = time.monotonic() + options.handshake_timeout_s
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: sock.close())
        if options.tls is not None:
            try:
                options.tls.sslsocket_class = SecureSocket
                sock = options.tls.wrap_socket(
                    sock, server_hostname=server_name, do_handshake_on_connect=False
                )
            except (OSError, ValueError) as error:
                raise LinkError(f"TLS with {address} failed: {error}", hint=_TLS_HINT) from error
        link = _secure(sock, address, options, deadline, is_local=is_local)
        undo.callback(link.close)
        link.introduced(introduce(link, ours, options.handshake_timeout_s))
        undo.pop_all()
    if is_local:
        sock.close()
    return link


def wrap_answering(sock: socket.socket, options: LinkOptions) -> socket.socket:
    """The socket to hand to `answer_link`, under TLS if asked for; no bytes are exchanged yet."""
    if options.tls is None:
        return sock
    options.tls.sslsocket_class = SecureSocket
    return options.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def answer_link(
    sock: socket.socket,
    address: str,
    ours: Hello,
    options: LinkOptions,
    admit: Admit | None,
    *,
    is_local: bool = False,
) -> SocketLink:
    """The link of whoever was dialled, over a socket that went through `wrap_answering`.

    If it fails the socket stays the caller's, who may be about to shut it down from another thread. So it does where
    the link `is_local`, which has a handle of its own to the connection.
    """
    deadline = time.monotonic() + options.handshake_timeout_s
    link = _secure(sock, address, options, deadline, is_local=is_local)
    try:
        link.introduced(answer(link, ours, admit, options.handshake_timeout_s))
    except BaseException:
        if is_local:
            link.close()
        raise
    return link


def _secure(
    sock: socket.socket, address: str, options: LinkOptions, deadline: float, *, is_local: bool
) -> SocketLink:
    certificate: bytes | None = None
    if isinstance(sock, ssl.SSLSocket):
        try:
            sock.settimeout(options.handshake_timeout_s)
            sock.do_handshake()
            if is_local:
                certificate = sock.getpeercert(binary_form=True)
                sock = _without_tls(sock)
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else None
            raise LinkError(f"TLS with {address} failed: {reason or error}", hint=_TLS_HINT) from error
    sock.setblocking(False)
    return SocketLink(sock, address, options, deadline, certificate=certificate, is_local=is_local)


def _without_tls(sock: ssl.SSLSocket) -> socket.socket:
    """The same connection, in the clear once both sides have said that TLS ends here."""
    sock.unwrap()
    return socket.socket(fileno=os.dup(sock.fileno()))


def shut_down(sock: socket.socket) -> None:
    """Wake whoever waits for this socket. Not `SSLSocket.shutdown`, after which reads would bypass TLS."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def read_congestion(sock: socket.socket) -> str | None:
    """The congestion control in force, where the system tells."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return None
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    except OSError:
        return None
    return name.split(b"\0", 1)[0].decode("ascii", "replace")

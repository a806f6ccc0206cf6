"""WebSocket (RFC 6455) as a pipe for bytes: both handshakes and binary frames, without I/O.

Networks that let nothing out but the web let this out. What a frame holds is passed on as it comes, so nothing is kept
but what a control frame may hold: 125 bytes.
"""

from __future__ import annotations

import base64
import hashlib
import os
import struct

from shardcompute.core.errors import LinkError

PATH = "/relay"
MOST_HEAD_BYTES = 8192
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, _BINARY, _CLOSE, _PING, _PONG = 0, 2, 8, 9, 10
_MOST_CONTROL_BYTES = 125
_HINT = "check that the address is a relay's, and that what lies between passes WebSockets on"


def encode_frame(payload: bytes, *, masks: bool, opcode: int = _BINARY) -> bytes:
    """One whole frame; clients mask theirs."""
    length = len(payload)
    bit = 0x80 if masks else 0
    head = struct.pack("!B", 0x80 | opcode)
    if length < 126:
        head += struct.pack("!B", bit | length)
    elif length < 1 << 16:
        head += struct.pack("!BH", bit | 126, length)
    else:
        head += struct.pack("!BQ", bit | 127, length)
    if not masks:
        return head + payload
    mask = os.urandom(4)
    return head + mask + _masked(payload, mask, 0)


class FrameDecoder:
    """Takes a stream of frames apart. `feed` gives what it carries; `replies` is what must be sent back because of it
    (pongs, and the answer to a close). `is_closed` once the other side has said so."""

    def __init__(self, *, is_server: bool) -> None:
        self._is_server = is_server
        self._head = b""
        self._opcode = 0
        self._left = 0
        self._mask = b""
        self._offset = 0
        self._control = b""
        self._is_inside = False
        self.is_closed = False
        self.replies = b""

    def feed(self, data: bytes) -> bytes:
        """The bytes that were carried; `LinkError` where this is no WebSocket."""
        carried: list[bytes] = []
        while data or (self._is_inside and self._left == 0):
            if not self._is_inside:
                data = self._begin(data)
                continue
            piece, data = data[: self._left], data[self._left :]
            if self._mask:
                piece = _masked(piece, self._mask, self._offset)
            self._offset += len(piece)
            self._left -= len(piece)
            if self._opcode in (_BINARY, _CONTINUED):
                carried.append(piece)
            else:
                self._control += piece
            if self._left == 0:
                self._finish()
        return b"".join(carried)

    def _begin(self, data: bytes) -> bytes:
        """Read as much of a frame's head as there is; what is left of `data`."""
        self._head += data
        head = self._head
        if len(head) < 2:
            return b""
        first, second = head[0], head[1]
        size = {126: 2, 127: 8}.get(second & 0x7F, 0)
        stop = 2 + size + (4 if second & 0x80 else 0)
        if len(head) < stop:
            return b""
        self._opcode = first & 0x0F
        self._left = int.from_bytes(head[2 : 2 + size], "big") if size else second & 0x7F
        self._mask = head[2 + size : stop] if second & 0x80 else b""
        self._check(first)
        self._head, self._offset, self._control, self._is_inside = b"", 0, b"", True
        return head[stop:]

    def _check(self, first: int) -> None:
        if first & 0x70 or self._opcode not in (_CONTINUED, _BINARY, _CLOSE, _PING, _PONG):
            raise LinkError("something came that is no frame of bytes of a WebSocket", hint=_HINT)
        if self._opcode >= _CLOSE and (self._left > _MOST_CONTROL_BYTES or not first & 0x80):
            raise LinkError("a control frame of a WebSocket is too long", hint=_HINT)
        if bool(self._mask) is not self._is_server:
            raise LinkError("a frame of a WebSocket is masked by the wrong side", hint=_HINT)

    def _finish(self) -> None:
        self._is_inside = False
        if self._opcode == _PING:
            self.replies += encode_frame(self._control, masks=not self._is_server, opcode=_PONG)
        elif self._opcode == _CLOSE and not self.is_closed:
            self.is_closed = True
            self.replies += encode_frame(self._control[:2], masks=not self._is_server, opcode=_CLOSE)

    def take_replies(self) -> bytes:
        replies, self.replies = self.replies, b""
        return replies


def _masked(payload: bytes, mask: bytes, offset: int) -> bytes:
    """XOR with the mask repeated, in one go as long integers."""
    length = len(payload)
    if not length:
        return b""
    turned = mask[offset % 4 :] + mask[: offset % 4]
    key = (turned * (length // 4 + 1))[:length]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(length, "big")


def request_head(host: str) -> tuple[bytes, str]:
    """A client's first bytes, and what the server must answer them with."""
    key = base64.b64encode(os.urandom(16)).decode()
    head = (
        f"GET {PATH} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    return head.encode("ascii"), _accept(key)


def check_response(head: bytes, expected: str) -> None:
    """`LinkError` unless the server has switched to WebSockets."""
    lines = head.decode("latin-1").split("\r\n")
    status = lines[0].split(" ", 2)
    if len(status) < 2 or status[1] != "101":
        raise LinkError(f"a WebSocket was asked for and {lines[0][:80]!r} was the answer", hint=_HINT)
    if _fields(lines).get("sec-websocket-accept") != expected:
        raise LinkError("whoever answered does not speak WebSocket", hint=_HINT)


def answer_head(head: bytes) -> tuple[bytes, bool]:
    """What a relay answers to the head of a request, and whether the connection is a WebSocket from then on."""
    lines = head.decode("latin-1").split("\r\n")
    fields = _fields(lines)
    words = lines[0].split(" ")
    key = fields.get("sec-websocket-key", "")
    is_asked = fields.get("upgrade", "").lower() == "websocket" and 0 < len(key) <= 64
    if len(words) != 3 or words[0] != "GET" or words[1].split("?")[0] != PATH or not is_asked:
        text = b"This is a relay of ShardCompute. Members reach it by WebSocket.\n"
        return (
            b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: websocket\r\nConnection: close\r\n"
            b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(text) + text,
            False,
        )
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + _accept(key).encode() + b"\r\n\r\n",
        True,
    )


def _accept(key: str) -> str:
    return base64.b64encode(hashlib.sha1(key.encode("latin-1") + _GUID).digest()).decode()


def _fields(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines[1:] if ":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}

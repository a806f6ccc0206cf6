"""Channels: how bytes come to a relay and go from it, over a socket, inside TLS, or inside a WebSocket.

One door takes all three: the first bytes tell. TLS here hides from whatever lies between that this is no web server; it
proves nothing, and need not: what members say to each other is inside TLS of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from abc import ABC, abstractmethod

from shardcompute.core.errors import LinkClosedError, LinkError
from shardcompute.relay.messages import PREAMBLE
from shardcompute.relay.websocket import MOST_HEAD_BYTES, FrameDecoder, answer_head, encode_frame

BUFFER_BYTES = 1 << 16
"""The most that is read at once, and kept unsent, for one direction of a link."""
_TLS_BEGINS = 0x16


class Channel(ABC):
    """Two directions of bytes. `read` gives what there is, b"" at the end; `write` returns once the other side has
    taken most of it, which is what slows a fast sender down to a slow receiver."""

    def __init__(self) -> None:
        self._left = b""

    async def read(self) -> bytes:
        if self._left:
            data, self._left = self._left, b""
            return data
        return await self._receive()

    async def take(self, count: int) -> bytes:
        """Exactly so many bytes; `LinkClosedError` where the stream ends before."""
        data = b""
        while len(data) < count:
            more = await self.read()
            if not more:
                raise LinkClosedError("the caller hung up at the relay's door")
            data += more
        self._left = data[count:]
        return data[:count]

    async def take_head(self) -> bytes:
        """The head of an HTTP message, without the empty line."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = await self.read()
            if not more:
                raise LinkClosedError("the caller hung up at the relay's door")
            data += more
            if len(data) > MOST_HEAD_BYTES:
                raise LinkError("the head of a request is too long", hint="members send a short one")
        head, _, self._left = data.partition(b"\r\n\r\n")
        return head

    def put_back(self, data: bytes) -> None:
        self._left = data + self._left

    @abstractmethod
    async def _receive(self) -> bytes: ...

    @abstractmethod
    async def write(self, data: bytes) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class SocketChannel(Channel):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    async def _receive(self) -> bytes:
        return await self._reader.read(BUFFER_BYTES)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            # Nobody waits for what is unsent: an end that does not read would hold it for ever.
            self._writer.transport.abort() if self._is_full() else self._writer.close()

    def _is_full(self) -> bool:
        return self._writer.transport.get_write_buffer_size() > BUFFER_BYTES


class TlsChannel(Channel):
    """The answering side of TLS over another channel. One task reads, another writes."""

    def __init__(self, inner: Channel, context: ssl.SSLContext) -> None:
        super().__init__()
        self._inner = inner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                await self._flush()
                return
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more()

    async def _receive(self) -> bytes:
        while True:
            try:
                return self._tls.read(BUFFER_BYTES)
            except ssl.SSLWantReadError:
                if not await self._more():
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    async def write(self, data: bytes) -> None:
        if data:
            self._tls.write(data)
            await self._flush()

    def close(self) -> None:
        self._inner.close()

    async def _flush(self) -> None:
        data = self._outgoing.read()
        if data:
            await self._inner.write(data)

    async def _more(self) -> bool:
        data = await self._inner.read()
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return bool(data)


class WebSocketChannel(Channel):
    """The answering side of a WebSocket whose handshake is done."""

    def __init__(self, inner: Channel) -> None:
        super().__init__()
        self._inner = inner
        self._frames = FrameDecoder(is_server=True)

    async def _receive(self) -> bytes:
        while not self._frames.is_closed:
            data = await self._inner.read()
            if not data:
                return b""
            carried = self._frames.feed(data)
            replies = self._frames.take_replies()
            if replies:
                await self._inner.write(replies)
            if carried:
                return carried
        return b""

    async def write(self, data: bytes) -> None:
        if data:
            await self._inner.write(encode_frame(data, masks=False))

    def close(self) -> None:
        self._inner.close()


async def open_door(channel: Channel, tls: ssl.SSLContext | None) -> Channel:
    """The channel on which a caller says `PREAMBLE`, whatever it is wrapped in; `LinkError` for strangers."""
    first = await channel.take(1)
    channel.put_back(first)
    if first[0] == _TLS_BEGINS and tls is not None:
        secure = TlsChannel(channel, tls)
        await secure.handshake()
        channel = secure
        first = await channel.take(1)
        channel.put_back(first)
    if first == b"G":
        reply, is_open = answer_head(await channel.take_head())
        await channel.write(reply)
        if not is_open:
            raise LinkError("a web browser came to the relay's door")
        channel = WebSocketChannel(channel)
    if await channel.take(len(PREAMBLE)) != PREAMBLE:
        raise LinkError("somebody who speaks another language came to the relay's door")
    return channel

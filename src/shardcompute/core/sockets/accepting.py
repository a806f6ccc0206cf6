"""Accepting connections on an event loop without losing one that comes just as that ends.

asyncio's servers, and `sock_accept`, take a connection from the system a turn of the loop before anybody owns it; a
server that is closed, or a task that is cancelled, in between drops it open.
"""

from __future__ import annotations

import asyncio
import errno
import socket

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FULL_WAIT_S = 0.5


async def accept_one(listener: socket.socket) -> socket.socket:
    """The next connection to a non-blocking listener; cancelled, it has taken none. Raises OSError, BlockingIOError
    where whoever came has gone again."""
    if await until_readable(listener):
        return listener.accept()[0]
    return (await asyncio.get_running_loop().sock_accept(listener))[0]


async def until_readable(sock: socket.socket) -> bool:
    """False at once where the event loop (Windows' own) cannot tell."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(sock, lambda: None if readable.done() else readable.set_result(None))
    except NotImplementedError:
        return False
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    return True


async def wait_after(error: OSError) -> None:
    """A client that has gone again is no reason to wait; files that are used up are."""
    await asyncio.sleep(_FULL_WAIT_S if error.errno in _FULL else 0)

"""Linux network namespaces and the TAP devices in them, through system calls that Python does not wrap. Needs root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from shardcompute.core.errors import BackendError

NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000


@contextlib.contextmanager
def inside_namespace(name: str) -> Iterator[None]:
    """This thread's new sockets and devices belong to a namespace; other threads are not concerned."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        other = os.open(NAMESPACES / name, os.O_RDONLY)
        try:
            _enter(other)
        finally:
            os.close(other)
        try:
            yield
        finally:
            _enter(own)
    finally:
        os.close(own)


def open_tap(namespace: str, device: str) -> int:
    """A non-blocking descriptor that reads what machines in the namespace send through `device`, and feeds it."""
    if sys.platform == "win32":
        raise _only_on_linux()
    else:
        import fcntl

        with inside_namespace(namespace):
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            try:
                fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI))
            except OSError:
                os.close(tap)
                raise
        return tap


def sharpen_timers() -> None:
    """Let this thread's timers fire when they should rather than up to 50 µs later."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)


def _enter(descriptor: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    else:
        raise _only_on_linux()


def _only_on_linux() -> BackendError:
    return BackendError("network namespaces need Linux", hint="use the emulator of links")

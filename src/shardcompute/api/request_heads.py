"""Request heads, read strictly: what two programs could read as two different requests is none.

h11 forgives what old clients did. A proxy in front of us may forgive other things, and where the two disagree on where
a request ends, one client's bytes become the beginning of another's request. So lines end with CR LF and nothing else,
a line is never continued on the next, and a body has one length, told once and in one way.
"""

from __future__ import annotations

import re
from collections import Counter

from h11 import LocalProtocolError
from h11._receivebuffer import ReceiveBuffer

_BARE_ENDS = re.compile(rb"(?<!\r)\n|\r(?!\n)|\0")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_LENGTH = re.compile(rb"[0-9]{1,19}")
_ONCE = (b"content-length", b"transfer-encoding", b"host")


class StrictHeads(ReceiveBuffer):
    """What a client has sent and nobody has read yet, in the place of h11's own."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines of a head, or of what follows a body in chunks; None until all of them are there."""
        end = _BLANK_LINE.search(self._data, self._multiple_lines_search)
        if end is not None:
            check_head(bytes(self._data[: end.end()]))
        return super().maybe_extract_lines()


def check_head(head: bytes) -> None:
    """LocalProtocolError, which h11 answers for, where the lines up to the blank one leave room for two readings."""
    if _BARE_ENDS.search(head) is not None:
        raise LocalProtocolError("lines end with CR LF")
    first, *fields = head.split(b"\r\n")[:-2]
    if any(line[:1] in (b" ", b"\t") for line in (first, *fields)):
        raise LocalProtocolError("a line goes on on the next one")
    told = [
        (name.lower(), value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in fields)
    ]
    counts = Counter(name for name, _ in told)
    if any(counts[name] > 1 for name in _ONCE):
        raise LocalProtocolError("a header that stands once stands there twice")
    if counts[b"content-length"] and counts[b"transfer-encoding"]:
        raise LocalProtocolError("a body has both a length and chunks")
    if counts[b"transfer-encoding"] and first.endswith(b"HTTP/1.0"):
        raise LocalProtocolError("HTTP/1.0 has no chunks")
    if any(name == b"content-length" and not _LENGTH.fullmatch(value) for name, value in told):
        raise LocalProtocolError("a length is a number")

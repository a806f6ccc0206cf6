"""Store of receipts: those of the latest answers, for whoever asked for the answer and for operators."""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field

_MOST_RECEIPTS = 4096
_MOST_BYTES = 128 << 20
_MOST_TEXT_BYTES = 32 << 20


@dataclass(slots=True)
class _Kept:
    caller: str
    packed: bytes = b""
    mark: str = ""
    """What audits have found of the answer; "": none was made."""
    is_settled: threading.Event = field(default_factory=threading.Event)
    """There is one, or it is known that there will be none."""


class ReceiptStore:
    """Bounded: the oldest go first. Methods may be called from any thread."""

    def __init__(self, most_receipts: int = _MOST_RECEIPTS, most_bytes: int = _MOST_BYTES) -> None:
        self._most_receipts = most_receipts
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._used_bytes = 0

    def expect(self, receipt: str, caller: str) -> None:
        """An answer is under way that this key asked for."""
        with self._lock:
            self._kept.setdefault(receipt, _Kept(caller))
            self._trim()

    def put(self, receipt: str, packed: bytes) -> None:
        """Its receipt, as `pack_text` made it; empty: there is none. What nobody asked for is not kept, and what there
        is stays: a driver on another machine cannot replace it."""
        with self._lock:
            kept = self._kept.get(receipt)
            if kept is None or kept.packed:
                return
            self._used_bytes += len(packed)
            kept.packed = packed
            kept.is_settled.set()
            self._trim()

    def find(self, receipt: str, caller: str | None, wait_s: float = 0.0) -> bytes | None:
        """The text of a receipt, where `caller` asked for the answer (None: an operator, who may see all). Waits for
        one that stages are about to sign for."""
        with self._lock:
            kept = self._kept.get(receipt)
        if kept is None or caller not in (None, kept.caller):
            return None
        kept.is_settled.wait(wait_s)
        return unpack_text(kept.packed) if kept.packed else None

    def mark(self, receipt: str, finding: str) -> None:
        """An audit of the answer found this; what is worse than `passed` stays."""
        with self._lock:
            kept = self._kept.get(receipt)
            if kept is not None and kept.mark in ("", "passed"):
                kept.mark = finding

    def mark_of(self, receipt: str) -> str:
        """What audits have found of an answer; "": nothing yet, or it is not kept."""
        with self._lock:
            kept = self._kept.get(receipt)
        return "" if kept is None else kept.mark

    def _trim(self) -> None:
        while len(self._kept) > self._most_receipts or self._used_bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._used_bytes -= len(oldest.packed)
            oldest.is_settled.set()


def pack_text(text: bytes) -> bytes:
    return zlib.compress(text, 1)


def unpack_text(packed: bytes) -> bytes | None:
    """None where a peer sent something else, or far too much."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, _MOST_TEXT_BYTES)
    except zlib.error:
        return None
    return text if unpacker.eof else None

"""Response store: recent responses by caller, so that conversations go on by id (`previous_response_id`, items by
reference) and replies can be asked for again.

Everything is in this process' memory, for a limited time, and bounded in number and bytes for each caller and for all
together; the oldest go first. Nobody finds what another caller's key has made.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Item = Mapping[str, Any]
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoreLimits:
    life_s: float = 3600.0
    max_bytes: int = 64 * _MIB
    max_caller_bytes: int = 16 * _MIB
    max_caller_responses: int = 256
    max_response_bytes: int = _MIB


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A reply as it was sent, and the conversation up to its end as input items. Both are JSON."""

    reply: bytes
    conversation: bytes
    items: Mapping[str, bytes]
    """The reply's own items by their ids, as JSON of input items."""
    kept_s: float

    @property
    def size_bytes(self) -> int:
        return len(self.reply) + len(self.conversation) + sum(len(item) for item in self.items.values())


class ResponseStore:
    """Responses in the order in which they were kept. Used from one event loop."""

    def __init__(
        self, limits: StoreLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or StoreLimits()
        self._clock = clock
        self._kept: dict[str, OrderedDict[str, KeptResponse]] = {}
        self._bytes: dict[str, int] = {}
        self._items: dict[tuple[str, str], bytes] = {}

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes.values())

    def keep(
        self, caller: str, response_id: str, reply: bytes, before: Sequence[Item], said: Sequence[Item]
    ) -> bool:
        """Keep a reply that `said` these items after those `before` them; False where it is too large."""
        items = {item["id"]: _packed(item) for item in said}
        kept = KeptResponse(reply, _packed([*before, *said]), items, self._clock())
        if kept.size_bytes > self._limits.max_response_bytes:
            return False
        self.forget(caller, response_id)
        self._drop_old()
        self._kept.setdefault(caller, OrderedDict())[response_id] = kept
        self._bytes[caller] = self._bytes.get(caller, 0) + kept.size_bytes
        self._items |= {(caller, item_id): packed for item_id, packed in items.items()}
        while self._is_over(caller):
            self.forget(caller, next(iter(self._kept[caller])))
        while self.size_bytes > self._limits.max_bytes:
            self.forget(*min(self._oldest(), key=lambda each: self._kept[each[0]][each[1]].kept_s))
        return True

    def find(self, caller: str, response_id: str) -> KeptResponse | None:
        self._drop_old()
        return self._of(caller).get(response_id)

    def find_item(self, caller: str, item_id: str) -> bytes | None:
        """An item of a reply to this caller, as JSON of an input item."""
        self._drop_old()
        return self._items.get((caller, item_id))

    def forget(self, caller: str, response_id: str) -> bool:
        """Whether it was there."""
        kept = self._of(caller).pop(response_id, None)
        if kept is None:
            return False
        self._bytes[caller] -= kept.size_bytes
        for item_id in kept.items:
            self._items.pop((caller, item_id), None)
        if not self._kept[caller]:
            del self._kept[caller], self._bytes[caller]
        return True

    def _of(self, caller: str) -> OrderedDict[str, KeptResponse]:
        return self._kept.get(caller) or OrderedDict()

    def _is_over(self, caller: str) -> bool:
        return (
            len(self._kept[caller]) > self._limits.max_caller_responses
            or self._bytes[caller] > self._limits.max_caller_bytes
        )

    def _drop_old(self) -> None:
        before_s = self._clock() - self._limits.life_s
        while found := [each for each in self._oldest() if self._kept[each[0]][each[1]].kept_s < before_s]:
            for caller, response_id in found:
                self.forget(caller, response_id)

    def _oldest(self) -> Iterator[tuple[str, str]]:
        """Of each caller."""
        return ((caller, next(iter(kept))) for caller, kept in self._kept.items())


def _packed(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")

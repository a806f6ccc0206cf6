"""A node of the distributed hash table: what it answers, and how it looks up and publishes records. No sockets.

`answer` turns a datagram into one to send back. `lookup` and `publish` ask others through `ask`, which waits for an
answer for a moment only: of eight that are near, three are asked at a time, and those who do not answer are passed by.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardcompute.node.discovery.dht.messages import (
    ID_BYTES,
    MOST_CONTACTS,
    Body,
    Contact,
    FindRecord,
    KeepRecord,
    Neighbours,
    RecordKept,
    decode,
    encode,
)
from shardcompute.node.discovery.dht.records import SignedRecord, newer
from shardcompute.node.discovery.dht.table import BUCKET, RoutingTable, distance

MOST_RECORDS = 1024
"""What strangers may have us keep: about a megabyte."""
_PARALLEL = 3
_MOST_ROUNDS = 20
_TOKEN_S = 300.0
_MOST_NEWCOMERS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")
Address = tuple[str, int]
Ask = Callable[[Address, Body], tuple[bytes, Body] | None]
"""Sends a request and returns who answered what; None if nobody did in time."""


class DhtNode:
    """Methods may be called from any thread."""

    def __init__(
        self,
        ask: Ask,
        *,
        node_id: bytes | None = None,
        clock: Callable[[], float] = time.time,
        most_per_host: int = 2,
        most_records: int = MOST_RECORDS,
    ) -> None:
        self.node_id = node_id or secrets.token_bytes(ID_BYTES)
        self._ask = ask
        self._clock = clock
        self._most_records = most_records
        self._lock = threading.Lock()
        self._table = RoutingTable(self.node_id, most_per_host=most_per_host)
        self._records: OrderedDict[bytes, SignedRecord] = OrderedDict()
        self._secret = secrets.token_bytes(16)
        self._newcomers: deque[Contact] = deque(maxlen=_MOST_NEWCOMERS)
        """Who has asked us and is not known: known only once it has answered, as anybody can write any address."""

    @property
    def known_nodes(self) -> int:
        with self._lock:
            return len(self._table)

    @property
    def kept_records(self) -> int:
        with self._lock:
            return len(self._records)

    # What others ask

    def answer(self, content: bytes, sender: Address) -> bytes | None:
        """The datagram to send back; None for what deserves none. Never more bytes than came."""
        said = decode(content)
        if said is None or not isinstance(said.body, FindRecord | KeepRecord):
            return None
        with self._lock:
            self._newcomers.append(Contact(said.sender, *sender))
        if isinstance(said.body, FindRecord):
            body: Body = self._found(said.body.target, sender)
        else:
            body = RecordKept(self._keep(said.body, sender))
        reply = encode(said.number, self.node_id, body)
        return reply if len(reply) <= len(content) else None

    def _found(self, target: bytes, sender: Address) -> Neighbours:
        with self._lock:
            contacts = tuple(self._table.nearest(target, MOST_CONTACTS))
            record = self._good(target)
        return Neighbours(contacts, self._token(sender, self._period()), record)

    def _keep(self, request: KeepRecord, sender: Address) -> bool:
        period = self._period()
        tokens = (self._token(sender, period), self._token(sender, period - 1))
        if not any(hmac.compare_digest(request.token, each) for each in tokens):
            return False
        record = request.record
        if not record.check(self._clock()):
            return False
        with self._lock:
            known = self._good(record.key)
            if newer(known, record) is not record and known != record:
                return False
            self._records[record.key] = record
            self._records.move_to_end(record.key)
            while len(self._records) > self._most_records:
                self._drop_farthest()
        return True

    def _drop_farthest(self) -> None:
        """Of too many, those go for which others are nearer. Needs the lock."""
        farthest = max(self._records, key=lambda key: distance(key, self.node_id))
        del self._records[farthest]

    def _good(self, key: bytes) -> SignedRecord | None:
        """Needs the lock."""
        record = self._records.get(key)
        if record is not None and record.expires_at_s <= self._clock():
            del self._records[key]
            return None
        return record

    def _period(self) -> int:
        return int(self._clock() // _TOKEN_S)

    def _token(self, address: Address, period: int) -> bytes:
        return hmac.digest(self._secret, f"{address[0]} {period}".encode(), hashlib.sha256)[:8]

    def greet_newcomers(self) -> None:
        """Ask those who have asked us: whoever answers is known from then on."""
        with self._lock:
            newcomers = list(dict.fromkeys(self._newcomers))
            self._newcomers.clear()
            new = [each for each in newcomers if not self._table.has(each)]
        _in_parallel(lambda each: self._ask_find(each, self.node_id), new)

    # What we ask

    def bootstrap(self, addresses: Iterable[Address]) -> int:
        """Get to know nodes, from these on; how many are known then."""
        for address in addresses:
            self._ask_find(Contact(bytes(ID_BYTES), *address), self.node_id)
        self._walk(self.node_id)
        return self.known_nodes

    def lookup(self, key: bytes) -> SignedRecord | None:
        """The newest good record that those near the key have."""
        _, record = self._walk(key)
        with self._lock:
            return newer(record, self._good(key))

    def publish(self, record: SignedRecord) -> int:
        """Have those nearest to its key keep a record, as this node does itself; how many others do."""
        with self._lock:
            self._records[record.key] = record
        tokens, _ = self._walk(record.key)
        nearest = sorted(tokens, key=lambda each: distance(each.node_id, record.key))[:BUCKET]
        kept = _in_parallel(lambda each: self._ask_store(each, record, tokens[each]), nearest)
        return sum(kept)

    def _walk(self, target: bytes) -> tuple[dict[Contact, bytes], SignedRecord | None]:
        """Everybody near the target who answered, with the tokens they gave, and the best record they had."""
        with self._lock:
            candidates = dict.fromkeys(self._table.nearest(target))
        tokens: dict[Contact, bytes] = {}
        asked: set[bytes] = set()
        best: SignedRecord | None = None
        for _ in range(_MOST_ROUNDS):
            nearest = sorted(candidates, key=lambda each: distance(each.node_id, target))
            left = [each for each in nearest[:BUCKET] if each.node_id not in asked][:_PARALLEL]
            if not left:
                break
            asked |= {each.node_id for each in left}
            answers = _in_parallel(lambda each: self._ask_find(each, target), left)
            for contact, found in zip(left, answers, strict=True):
                if found is None:
                    del candidates[contact]
                    continue
                tokens[contact] = found.token
                candidates |= dict.fromkeys(each for each in found.contacts if each.node_id != self.node_id)
                if (
                    found.record is not None
                    and found.record.key == target
                    and found.record.check(self._clock())
                ):
                    best = newer(best, found.record)
        return tokens, best

    def _ask_find(self, contact: Contact, target: bytes) -> Neighbours | None:
        answered = self._ask((contact.host, contact.port), FindRecord(target))
        is_same = answered is not None and contact.node_id in (answered[0], bytes(ID_BYTES))
        with self._lock:
            if answered is None or not is_same or not isinstance(answered[1], Neighbours):
                self._table.failed(contact.node_id)
                return None
            self._table.heard(Contact(answered[0], contact.host, contact.port))
        return answered[1]

    def _ask_store(self, contact: Contact, record: SignedRecord, token: bytes) -> bool:
        answered = self._ask((contact.host, contact.port), KeepRecord(record, token))
        return answered is not None and isinstance(answered[1], RecordKept) and answered[1].is_kept


def _in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(max_workers=_PARALLEL) as pool:
        return list(pool.map(work, items))

"""etcd as a key-value store, by its JSON gateway: HTTP and nothing else, to whichever member answers.

etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379
etcds://store.example:2379?ca=/etc/ca.pem&cert=/etc/me.pem&key=/etc/me.key
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import math
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shardcompute.core.errors import StoreError, UsageError
from shardcompute.node.coordinator.shared.key_value import Change, Condition, Grant, Put

TIMEOUT_S = 0.6
"""For one answer of one member: a lease of two seconds must survive a member that is silent."""
_PORT = 2379
_PAGE = 256
_MOST_BYTES = 64 << 20
_FILES = ("ca", "cert", "key")
_MOST_IDLE = 4
_OF_LEASES = ("/v3/lease/keepalive", "/v3/lease/revoke")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Where a store's members are, and the files by which both sides prove who they are; "": not at all."""

    members: tuple[tuple[str, int], ...]
    is_tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""

    @classmethod
    def parse(cls, url: str) -> EtcdAddress:
        """UsageError for what is no address of an etcd."""
        parts = urlsplit(url)
        given = parse_qs(parts.query)
        is_known = parts.scheme in ("etcd", "etcds") and set(given) <= set(_FILES) and parts.path in ("", "/")
        if not is_known or "@" in parts.netloc or (given and parts.scheme == "etcd"):
            raise _no_address(url)
        members = tuple(_member(each, url) for each in parts.netloc.split(","))
        files = {name: values[0] for name, values in given.items()}
        return cls(members, parts.scheme == "etcds", **files)

    @property
    def text(self) -> str:
        """For people; names no files."""
        listed = ",".join(f"{host}:{port}" for host, port in self.members)
        return f"{'etcds' if self.is_tls else 'etcd'}://{listed}"

    def tls_context(self) -> ssl.SSLContext | None:
        if not self.is_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the certificates for {self.text} cannot be used: {error}",
                hint="name PEM files: ?ca=…&cert=…&key=…",
            ) from error
        return context


class EtcdClient:
    """A `KeyValueStore`. A member that does not answer is left for the next one. Threads do not wait for each other: a
    lease is renewed whatever else is asked for."""

    def __init__(self, address: EtcdAddress, timeout_s: float = TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._tls = address.tls_context()
        self._lock = threading.Lock()
        self._member = 0
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []

    @property
    def name(self) -> str:
        return self._address.text

    def read(self, key: str) -> bytes | None:
        with self._reading():
            found = self._ask("kv/range", {"key": _encode(key)}).get("kvs") or []
            return _value(found[0]) if found else None

    def read_all(self, prefix: str) -> list[tuple[str, bytes]]:
        start, stop, found = prefix, _after(prefix), []
        while True:
            reply = self._ask(
                "kv/range",
                {"key": _encode(start), "range_end": _encode(stop), "limit": str(_PAGE)},
            )
            with self._reading():
                page = [(_decode(each["key"]).decode(), _value(each)) for each in reply.get("kvs") or []]
            found += page
            if not reply.get("more") or not page:
                return found
            start = page[-1][0] + "\0"

    def write(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> bool:
        body = {
            "compare": [_comparison(each) for each in conditions],
            "success": [_operation(each) for each in changes],
        }
        return bool(self._ask("kv/txn", body).get("succeeded"))

    def grant(self, ttl_s: float) -> Grant:
        with self._reading():
            reply = self._ask("lease/grant", {"TTL": str(math.ceil(ttl_s))})
            return Grant(int(reply["ID"]), float(reply["TTL"]))

    def keep_alive(self, lease: int) -> float:
        with self._reading():
            reply = self._ask("lease/keepalive", {"ID": str(lease)})
            return float(reply.get("result", {}).get("TTL", 0))

    def revoke(self, lease: int) -> None:
        self._ask("lease/revoke", {"ID": str(lease)})

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """StoreError where an answer does not say what it should."""
        try:
            yield
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise StoreError(
                f"the store {self.name} does not answer like an etcd: {error!r}", hint="check its address"
            ) from error

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Each member in turn, from the one that answered last; StoreError where none does."""
        content, reasons, first = json.dumps(body).encode(), [], self._member
        for number in range(len(self._address.members)):
            member = (first + number) % len(self._address.members)
            try:
                reply = self._exchange(member, f"/v3/{path}", content)
            except (OSError, http.client.HTTPException, ValueError) as error:
                host, port = self._address.members[member]
                reasons.append(f"{host}:{port}: {error or type(error).__name__}")
            else:
                self._member = member
                return reply
        raise StoreError(
            f"the store {self.name} does not answer ({'; '.join(reasons)})",
            hint="check that most of its members run and can be reached from here",
        )

    def _exchange(self, member: int, path: str, content: bytes) -> dict[str, Any]:
        kept = self._take(member)
        connection = kept or self._connect(member)
        try:
            try:
                status, answer = _post(connection, path, content)
            except (ConnectionError, http.client.BadStatusLine):
                # One that was kept open may have been closed by the other side meanwhile.
                if kept is None:
                    raise
                connection.close()
                connection = self._connect(member)
                status, answer = _post(connection, path, content)
            reply = _reply(path, status, answer)
        except BaseException:
            connection.close()
            raise
        self._keep(member, connection)
        return reply

    def _take(self, member: int) -> http.client.HTTPConnection | None:
        with self._lock:
            for place, (other, connection) in enumerate(self._idle):
                if other == member:
                    del self._idle[place]
                    return connection
        return None

    def _keep(self, member: int, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append((member, connection))
                return
            _, oldest = self._idle.pop(0)
            self._idle.append((member, connection))
        oldest.close()

    def _connect(self, member: int) -> http.client.HTTPConnection:
        host, port = self._address.members[member]
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)


def _reply(path: str, status: int, answer: bytes) -> dict[str, Any]:
    """What a member answered; ValueError where that is no good answer."""
    if status == 404 and path in _OF_LEASES:
        return {}  # it has run out
    if status != 200:
        raise ValueError(f"HTTP {status}: {answer[:200].decode(errors='replace')}")
    # A stream of answers is one for each line.
    reply = json.loads(answer.split(b"\n", 1)[0])
    if isinstance(reply, dict):
        return reply
    raise ValueError("it did not answer with an object")


def _post(connection: http.client.HTTPConnection, path: str, content: bytes) -> tuple[int, bytes]:
    connection.request("POST", path, content, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read(_MOST_BYTES + 1)
    if len(answer) > _MOST_BYTES:
        raise ValueError("it answered with more than can be meant")
    return response.status, answer


def _comparison(condition: Condition) -> dict[str, str]:
    key = _encode(condition.key)
    if condition.value is None:
        return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
    return {"key": key, "target": "VALUE", "result": "EQUAL", "value": _encode(condition.value)}


def _operation(change: Change) -> dict[str, Any]:
    if isinstance(change, Put):
        put = {"key": _encode(change.key), "value": _encode(change.value), "lease": str(change.lease)}
        return {"request_put": put}
    return {"request_delete_range": {"key": _encode(change.start), "range_end": _encode(change.stop)}}


def _encode(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _value(found: Mapping[str, Any]) -> bytes:
    return _decode(found.get("value", ""))


def _after(prefix: str) -> str:
    """The first key after all that begin with this."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _member(text: str, url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _no_address(url) from None
    if not host:
        raise _no_address(url)
    return host, port or _PORT


def _no_address(url: str) -> UsageError:
    return UsageError(
        f"{url[:200]!r} is no address of a store",
        hint="write etcd://host:2379,host2:2379,host3:2379, or etcds:// with ?ca=FILE&cert=FILE&key=FILE",
    )

"""etcd as the coordinators' store: what its addresses look like, and a real one of three members."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shardcompute.core.errors import NotLeadingError, StoreError, UsageError
from shardcompute.node.coordinator.shared import Leadership, SharedJournal
from shardcompute.node.coordinator.shared.etcd import EtcdAddress, EtcdClient
from shardcompute.node.coordinator.shared.key_value import Condition, Delete, Put
from support.network.lab_links import wait_until
from support.network.real_etcd import needs_etcd, real_etcd

PREFIX = "/shardcompute/home/"


def test_addresses() -> None:
    plain = EtcdAddress.parse("etcd://a:1,[::1]:3,b")
    assert plain.members == (("a", 1), ("::1", 3), ("b", 2379))
    assert not plain.is_tls
    secured = EtcdAddress.parse("etcds://store.example:2379?ca=/c&cert=/d&key=/e")
    assert (secured.is_tls, secured.ca, secured.cert, secured.key) == (True, "/c", "/d", "/e")
    assert secured.text == "etcds://store.example:2379", "names no files"


@pytest.mark.parametrize(
    "url",
    [
        "http://a:1",
        "etcd://",
        "etcd://a,,b",
        "etcd://a:x",
        "etcd://me:secret@a:1",
        "etcd://a:1/path",
        "etcds://a?password=1",
        "etcd://a?ca=/c",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="no address of a store"):
        EtcdAddress.parse(url)


def test_certificates_that_are_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="certificates"):
        EtcdClient(EtcdAddress.parse(f"etcds://a:1?ca={tmp_path / 'none.pem'}"))


def test_nobody_there_is_said_with_every_member() -> None:
    client = EtcdClient(EtcdAddress.parse("etcd://127.0.0.1:9,127.0.0.1:10"), timeout_s=0.2)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9: .*127\.0\.0\.1:10: "):
        client.read("x")


@pytest.mark.parametrize(
    "answer", [b"[]", b"nothing", b'{"kvs": [{}]}', b'{"kvs": [{"key": "?"}]}', b'{"kvs": 3, "result": 3}']
)
def test_who_answers_otherwise_than_an_etcd_is_no_store(answer: bytes) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"etcd://127.0.0.1:{server.server_port}"
        with closing(EtcdClient(EtcdAddress.parse(url))) as client:
            with pytest.raises(StoreError):
                client.read_all("x")
            with pytest.raises(StoreError):
                client.grant(2.0)
        server.shutdown()


@needs_etcd
def test_a_real_etcd_fences_and_outlives_a_member(tmp_path: Path) -> None:
    with real_etcd(tmp_path / "etcd") as etcd, ExitStack() as stack:
        client = stack.enter_context(closing(etcd.client()))
        assert client.write([Condition("k/1", None)], [Put("k/1", b"one"), Put("k/2", b"\0two")])
        assert not client.write([Condition("k/1", None)], [Put("k/1", b"other")])
        assert client.write([Condition("k/1", b"one")], [Delete("k/1", "k/2")])
        assert client.read_all("k/") == [("k/2", b"\0two")]
        assert client.keep_alive(4711) == 0

        first = Leadership(client, PREFIX, "first")
        second = Leadership(stack.enter_context(closing(etcd.client())), PREFIX, "second")
        assert first.try_to_lead()
        journal = SharedJournal(client, PREFIX, first)
        journal.append(*(b"%d" % number for number in range(300)))
        journal.compact([b"outcome"], keeping=[7])
        assert not second.try_to_lead()
        etcd.kill(0)
        wait_until(lambda: _renews(first), "it is renewed by the members that are left", 20.0)
        journal.write_note("keys", b"kept")
        # Nobody renews it any more: the other follows.
        wait_until(lambda: _leads(second), "another leads", 20.0)
        newer = SharedJournal(second.store, PREFIX, second)
        newer.append(b"next")
        with pytest.raises(NotLeadingError):
            journal.append(b"never")
        assert list(newer.events()) == [b"6", b"outcome", b"next"]
        assert newer.read_note("keys") == b"kept"

        for number in (1, 2):
            etcd.kill(number)
        with pytest.raises(StoreError):
            second.renew()
        for number in range(3):
            etcd.start(number)
        wait_until(lambda: _renews(second) and second.is_held, "the store is back, with its leader", 30.0)
        newer.append(b"after")
        assert list(newer.events()) == [b"6", b"outcome", b"next", b"after"]


def _renews(leadership: Leadership) -> bool:
    try:
        leadership.renew()
    except StoreError:
        return False
    return leadership.is_held


def _leads(leadership: Leadership) -> bool:
    try:
        return leadership.try_to_lead()
    except StoreError:
        return False

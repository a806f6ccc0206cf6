"""Receipts over HTTP: asked for with a header, named in one, and shown to whoever asked for the answer."""

from __future__ import annotations

from typing import Any

import pytest

from shardcompute.api import create_app
from shardcompute.api.generation.receipts import ReceiptReply, ReceiptRunReply
from shardcompute.node.driver.receipts.store import ReceiptStore, pack_text
from shardcompute.security.api_keys import KeyRole, KeySummary
from shardcompute.security.receipts import Receipt, ReceiptRun

HEADER = "x-shardcompute-receipt"
CHAT = "/v1/chat/completions"
KEYS = {
    "mine": KeySummary("k-1", role=KeyRole.USE),
    "other": KeySummary("k-2", role=KeyRole.USE),
    "boss": KeySummary("k-3", role=KeyRole.OPERATE),
}


def ask(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


@pytest.mark.parametrize("is_stream", [False, True])
def test_asked_for_and_named(app: Any, service: Any, call: Any, is_stream: bool) -> None:
    plain = call(app, "POST", CHAT, json=ask(stream=is_stream))
    assert HEADER not in plain.headers
    assert [request.receipt for request in service.requests] == [""]
    reply = call(app, "POST", CHAT, json=ask(stream=is_stream, n=2), headers={HEADER: "yes"})
    ids = reply.headers[HEADER].split(", ")
    assert len(set(ids)) == 2
    assert [request.receipt for request in service.requests[1:]] == ids


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat", "/v1/responses", "/v1/completions"])
def test_by_every_protocol(app: Any, call: Any, path: str) -> None:
    body = {"max_tokens": 5, "stream": False, "model": "org/tiny"}
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/responses":
        body = {"model": "org/tiny", "input": "hi"}
    elif path == "/v1/completions":
        body |= {"prompt": "hi"}
    elif path == "/api/chat":
        body = {"model": "org/tiny", "stream": False, **messages}
    else:
        body |= messages
    reply = call(app, "POST", path, json=body, headers={HEADER: "yes"})
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER].startswith("rcpt-")


def test_neither_yes_nor_no(app: Any, call: Any) -> None:
    refused = call(app, "POST", CHAT, json=ask(), headers={HEADER: "rcpt-mine"})
    assert refused.status_code == 400
    assert HEADER in refused.text
    assert HEADER not in call(app, "POST", CHAT, json=ask(), headers={HEADER: "no"}).headers


def test_with_every_answer(service: Any, call: Any) -> None:
    app = create_app(service, gives_receipts=True)
    assert call(app, "POST", CHAT, json=ask()).headers[HEADER].startswith("rcpt-")


def test_who_may_see_it(service: Any, call: Any) -> None:
    store = ReceiptStore()
    app = create_app(service, verify_key=KEYS.get, receipts=store)
    store.expect("rcpt-1", "k-1")
    store.put("rcpt-1", pack_text(b'{"id": "rcpt-1"}'))
    for key in ("mine", "boss"):
        shown = call(app, "GET", "/v1/receipts/rcpt-1", headers=bearer(key))
        assert (shown.status_code, shown.json()) == (200, {"id": "rcpt-1"})
    hidden = call(app, "GET", "/v1/receipts/rcpt-1", headers=bearer("other"))
    never = call(app, "GET", "/v1/receipts/rcpt-2", headers=bearer("other"))
    assert (hidden.status_code, never.status_code) == (404, 404)
    assert hidden.json()["error"]["code"] == never.json()["error"]["code"] == "receipt_not_found"
    assert call(app, "GET", "/v1/receipts/rcpt-1").status_code == 401


def test_the_description_has_every_field() -> None:
    assert set(ReceiptReply.model_fields) == set(Receipt.__struct_fields__)
    assert set(ReceiptRunReply.model_fields) == set(ReceiptRun.__struct_fields__)


def test_a_server_without_a_cluster_has_none(app: Any, call: Any) -> None:
    assert call(app, "GET", "/v1/receipts/rcpt-1").status_code == 404

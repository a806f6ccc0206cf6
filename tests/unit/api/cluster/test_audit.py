"""Every route that changes something is in the audit log, done or refused, with who asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardcompute.api import create_app
from shardcompute.api.access.requirement import Access
from shardcompute.api.cluster import ROUTES
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.telemetry.audit import AuditLog
from shardcompute.security import KeyRole
from support.swarm.fake_cluster import NOW_S, serving_cluster

READING = ("tensor", "speech", "states")
TOLD = "/cluster/finetuning"
"""How a run goes, every second: shown, and nothing is done because of it."""
UNCHANGING = {"/cluster/plan", TOLD, *(f"/cluster/teaching/{{model:path}}/{each}" for each in READING)}
Ask = Callable[..., httpx.Response]


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[ClusterAdmin]:
    cluster = serving_cluster(500, 500)
    log = AuditLog(tmp_path / "cluster")
    (tmp_path / "cluster").mkdir(mode=0o700)
    settings = Settings(data_dir=tmp_path, offline=True)
    with ClusterAdmin(cluster, settings, audit=log, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        yield admin


@pytest.fixture
def ask(admin: ClusterAdmin) -> Ask:
    app = create_app(object(), verify_key=admin.find_key, admin=admin, local_secret="sk-local-x")  # type: ignore[arg-type]

    def send(method: str, path: str, body: Any = None, *, key: str = "sk-local-x") -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                headers = {"authorization": f"Bearer {key}"}
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(run())

    return send


def told(admin: ClusterAdmin) -> list[tuple[str, str, str, str]]:
    return [(e.who, e.action, e.target, e.result) for e in reversed(admin.audit.page(limit=1000).data)]


def test_no_route_that_changes_something_is_left_out() -> None:
    for route in ROUTES:
        changes = route.method != "GET" and route.path not in UNCHANGING
        assert bool(route.audit) == changes, route.path
        assert (
            changes or route.needs is not Access.OPERATE or route.method == "GET" or route.path in UNCHANGING
        )
    names = [route.audit for route in ROUTES if route.audit]
    assert len(names) == len(set(names))


def test_who_did_what(ask: Ask, admin: ClusterAdmin) -> None:
    made = ask("POST", "/cluster/keys", {"label": "bob", "role": "operate"}).json()
    token = ask("POST", "/cluster/tokens", {}, key=made["key"]).json()
    ask("DELETE", f"/cluster/tokens/{token['id']}", key=made["key"])
    node = admin.state().nodes[0].id
    ask("POST", f"/cluster/nodes/{node}/drain", {})
    assert ask("DELETE", "/cluster/keys/sk-sc-nothing0").status_code == 404
    assert told(admin) == [
        ("local", "key.create", made["id"], "done"),
        (made["id"], "token.create", token["id"], "done"),
        (made["id"], "token.revoke", token["id"], "done"),
        ("local", "node.drain", node, "done"),
        ("local", "key.revoke", "sk-sc-nothing0", "refused: There is no API key sk-sc-nothing0"),
    ]
    page = ask("GET", "/cluster/audit").json()
    assert page["problem"] == ""
    assert page["data"][-1]["detail"] == {"label": "bob", "role": "operate"}
    assert made["key"] not in json.dumps(page)
    assert token["token"] not in json.dumps(page)


def test_whoever_may_not_is_listed_too(ask: Ask, admin: ClusterAdmin) -> None:
    key = admin.create_key("eve", role=KeyRole.OBSERVE)
    assert ask("POST", "/cluster/keys", {"role": "operate"}, key=key.key).status_code == 403
    assert ask("GET", "/cluster/audit", key=key.key).status_code == 403
    [(who, action, _, result)] = told(admin)
    assert (who, action) == (key.id, "key.create")
    assert result.startswith("refused: The API key")


def test_machines_that_join_are_listed(admin: ClusterAdmin) -> None:
    admin._cluster.access.tell_of_join("n-abc", "worker", "tok")  # type: ignore[attr-defined]
    [entry] = admin.audit.page().data
    assert (entry.who, entry.action, entry.detail) == (
        "n-abc",
        "node.join",
        {"role": "worker", "token": "tok"},
    )

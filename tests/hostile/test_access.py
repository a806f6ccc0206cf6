"""Who may do what over HTTP: strangers behind a proxy, names that are not ours, keys that reach for more."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardcompute.api import create_app
from shardcompute.api.access.hosts import AllowedHosts, hosts_of
from shardcompute.api.access.requirement import Access
from shardcompute.api.auth import needs_of
from shardcompute.core.errors import SourceError
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.security import KeyRole
from shardcompute.security.local_secret import SECRET_FILE, local_secret, read_local_secret
from shardcompute.web import page_routes
from support.api.bridge import LOCAL_SECRET
from support.swarm.fake_cluster import NOW_S, FakeCluster, serving_cluster

LOCAL = "http://127.0.0.1"
OWN = "/cluster/usage"
"""For any key, which sees its own there."""


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[ClusterAdmin]:
    cluster: FakeCluster = serving_cluster(500, 500)
    with ClusterAdmin(cluster, Settings(data_dir=tmp_path), clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        yield admin


@pytest.fixture
def app(admin: ClusterAdmin, fakes: Any) -> Any:
    """A cluster that asks for no key, as one is on loopback."""
    return open_app(fakes, admin)


def open_app(fakes: Any, admin: ClusterAdmin, **options: Any) -> Any:
    whole: dict[str, Any] = {"needs_key": False, **options}
    return create_app(
        fakes.FakeService(),
        verify_key=admin.find_key,
        local_secret=LOCAL_SECRET,
        admin=admin,
        page=page_routes(),
        **whole,
    )


def ask(app: Any, method: str, path: str, *, url: str = LOCAL, key: str = "", **options: Any) -> Any:
    headers = {**options.pop("headers", {}), **({"authorization": f"Bearer {key}"} if key else {})}

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            return await client.request(method, path, headers=headers, **options)

    return asyncio.run(run())


def routes(app: Any, *wanted: Access) -> list[tuple[str, str]]:
    """Method and path of every route that needs one of these."""
    return [
        (method, route.path.replace("{model:path}", "m").replace("{", "").replace("}", ""))
        for route in app.routes
        for method in sorted(route.methods - {"HEAD"})
        if needs_of(route) in wanted
    ]


def test_every_route_says_what_it_needs(app: Any) -> None:
    assert all(isinstance(needs_of(route), Access) for route in app.routes)
    opened = {path for _, path in routes(app, Access.OPEN) if not path.startswith("/page/")}
    assert opened == {"/", "/health", "/session"}
    assert routes(app, Access.KEY) == [("GET", OWN), ("DELETE", "/session")]
    assert not any(path.startswith(("/cluster/", "/metrics")) for _, path in routes(app, Access.USE))


# A keyless server behind a plain proxy: the address and the Host are those of a local program


def test_a_stranger_behind_a_plain_proxy_steers_and_sees_nothing(app: Any) -> None:
    for method, path in routes(app, Access.KEY, Access.OBSERVE, Access.OPERATE):
        answer = ask(app, method, path, json={})
        assert answer.status_code == 403, (method, path)
        assert answer.json()["error"]["code"] == "insufficient_role"
    assert ask(app, "GET", "/v1/models").status_code == 200


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP", "X-Forwarded-Host"])
def test_a_proxy_that_says_so_needs_a_key_for_everything(app: Any, admin: ClusterAdmin, header: str) -> None:
    for method, path in routes(app, Access.USE, Access.KEY, Access.OBSERVE, Access.OPERATE):
        answer = ask(app, method, path, headers={header: "203.0.113.9"}, json={})
        # Who would sign out needs no key to be told that nobody is signed in.
        assert answer.status_code == (403 if path == "/session" else 401), (method, path)
    key = admin.create_key("through the proxy").key
    assert ask(app, "GET", "/v1/models", headers={header: "203.0.113.9"}, key=key).status_code == 200


def test_any_text_will_do_as_a_key_where_none_is_asked_for(app: Any, admin: ClusterAdmin) -> None:
    assert ask(app, "GET", "/v1/models", key="none").status_code == 200
    gone = admin.create_key("gone")
    admin.revoke_key(gone.id)
    refused = ask(app, "GET", "/v1/models", key=gone.key)
    assert (refused.status_code, "revoked" in refused.text) == (401, True)


# Keys that reach for more


@pytest.mark.parametrize("needs_key", [False, True])
def test_a_key_for_models_opens_no_operators_route(admin: ClusterAdmin, fakes: Any, needs_key: bool) -> None:
    app = open_app(fakes, admin, needs_key=needs_key)
    key = admin.create_key("a user").key
    before = (admin.state(), admin.tokens(), admin.keys())
    for method, path in routes(app, Access.OBSERVE, Access.OPERATE):
        answer = ask(app, method, path, key=key, json={})
        assert answer.status_code == 403, (method, path)
        assert "is of role use; this needs one of role o" in answer.json()["error"]["message"]
    assert (admin.state(), admin.tokens(), admin.keys()) == before
    assert ask(app, "GET", "/v1/models", key=key).status_code == 200


def test_an_observer_changes_nothing(app: Any, admin: ClusterAdmin) -> None:
    key = admin.create_key("a dashboard", role=KeyRole.OBSERVE).key
    for method, path in routes(app, Access.OPERATE):
        assert ask(app, method, path, key=key, json={}).status_code == 403, (method, path)
    for path in ("/cluster/state", "/cluster/usage", "/cluster/requests", "/metrics"):
        assert ask(app, "GET", path, key=key).status_code == 200


def test_operators_and_local_commands_do_everything(app: Any, admin: ClusterAdmin) -> None:
    operator = admin.create_key("me", role=KeyRole.OPERATE).key
    for key in (operator, LOCAL_SECRET):
        made = ask(app, "POST", "/cluster/keys", key=key, json={"label": "x", "role": "observe"})
        assert (made.status_code, made.json()["role"]) == (200, "observe")
        assert ask(app, "POST", "/cluster/tokens", key=key, json={}).status_code == 200


def test_a_key_sees_its_own_usage_alone(app: Any, admin: ClusterAdmin) -> None:
    mine, other = admin.create_key("mine"), admin.create_key("other")
    counter = admin._cluster.pool.requests.usage
    for key in (mine.id, other.id, ""):
        counter.add(key, "org/tiny", requests=1, prompt_tokens=3, generated_tokens=4)

    def seen(key: str) -> set[str]:
        report = ask(app, "GET", OWN, key=key).json()
        return {view["key"] for span in ("totals", "minutes", "hours") for view in report[span]}

    assert seen(mine.key) == {mine.id}
    assert seen(LOCAL_SECRET) == {mine.id, other.id, ""}


def test_which_files_there_are_is_told_to_operators_alone(
    app: Any, admin: ClusterAdmin, tmp_path: Path
) -> None:
    """Whatever is asked, the answer is the same for a file that is there and one that is not."""
    (tmp_path / "there").mkdir()
    for role in (KeyRole.USE, KeyRole.OBSERVE):
        key = admin.create_key(role, role=role).key
        for path in ("/cluster/plan", "/cluster/models", "/cluster/pulls"):
            answers = {
                ask(app, "POST", path, key=key, json={"model": str(tmp_path / name)}).text
                for name in ("there", "not there")
            }
            assert len(answers) == 1
            assert "role operate" in answers.pop()


# Names that are not ours

FOREIGN = (
    "attacker.test",
    "attacker.test:8000",
    "127.0.0.1.attacker.test",
    "localhost.attacker.test",
    "a@b",
    "[::1",
)


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_is_refused_on_every_route(app: Any, host: str) -> None:
    every = [*routes(app, *Access), ("GET", "/nope"), ("GET", "/openapi.json")]
    for method, path in every:
        answer = ask(app, method, path, headers={"host": host}, key=LOCAL_SECRET, json={})
        assert answer.status_code == 403, (method, path)
        assert "Host header" in answer.text


OURS = (
    ("127.0.0.1", (), ("127.0.0.1:8000", "localhost", "LOCALHOST.:80", "[::1]:8000", "127.9.9.9", ""), ()),
    ("127.0.0.1", (), (), ("192.168.1.5", "box.test", "0.0.0.0", "*")),
    (
        "127.0.0.1",
        ("chat.test", "*.lan"),
        ("chat.test", "a.lan", "a.b.lan:443"),
        ("lan", "xlan", "a.chat.test"),
    ),
    ("0.0.0.0", (), ("192.168.1.5:8000", "[fe80::1]", "localhost"), ("box.test", "1.2.3.4.test")),
    ("192.168.1.5", ("box.test:8000",), ("192.168.1.5", "box.test", "127.0.0.1"), ("other.test",)),
    ("box.test", (), ("box.test:80", "10.0.0.1"), ("other.test",)),
    ("localhost", (), ("localhost", "127.0.0.1"), ("10.0.0.1", "box.test")),
    ("127.0.0.1", ("*",), ("anything.test", "10.0.0.1"), ("a b", "a/b")),
)


@pytest.mark.parametrize(("bound", "named", "ours", "others"), OURS)
def test_names_of_a_server(bound: str, named: Any, ours: Any, others: Any) -> None:
    allowed: AllowedHosts = hosts_of(bound, named)
    assert [host for host in ours if not allowed.admits(host)] == []
    assert [host for host in others if allowed.admits(host)] == []


# Signing in


def test_a_link_signs_in_once(app: Any) -> None:
    code = ask(app, "POST", "/cluster/sign-in", key=LOCAL_SECRET, json={}).json()["code"]
    signed = ask(app, "POST", "/session", json={"code": code})
    assert signed.headers["cache-control"] == "no-store"
    assert "set-cookie" not in signed.headers, "a cookie would be sent to every port of this machine"
    key = signed.json()["key"]
    assert ask(app, "GET", "/cluster/state", key=key).status_code == 200
    assert ask(app, "POST", "/session", json={"code": code}).status_code == 403
    assert ask(app, "DELETE", "/session", key=key).status_code == 200
    for path in ("/cluster/state", "/v1/models"):
        over = ask(app, "GET", path, key=key)
        assert (over.status_code, "This sign-in is over" in over.text) == (401, True)


@pytest.mark.parametrize(
    "code", ["", "x", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "a" * 200]
)
def test_codes_that_are_none(app: Any, code: str) -> None:
    assert ask(app, "POST", "/session", json={"code": code}).status_code == 403
    assert ask(app, "POST", "/session", json={"code": "a" * 201}).status_code == 400


# The local secret


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cluster"
    path.mkdir(mode=0o700)
    return path


def test_the_secret_is_for_its_owner_new_each_time_and_gone_at_the_end(folder: Path) -> None:
    path = folder / SECRET_FILE
    with local_secret(folder) as first:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_local_secret(folder) == first
    assert not path.exists()
    assert read_local_secret(folder) is None
    with local_secret(folder) as second:
        assert second != first


def test_the_secret_is_not_written_through_a_link(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / SECRET_FILE).symlink_to(victim)
    with local_secret(folder):
        assert victim.read_text() == "precious"
        assert not (folder / SECRET_FILE).is_symlink()


def a_link(path: Path) -> None:
    path.with_name("real").touch(0o600)
    path.symlink_to(path.with_name("real"))


def open_to_others(path: Path) -> None:
    path.write_text("sk-local-x")
    path.chmod(0o644)


def a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def nonsense(path: Path) -> None:
    path.touch(0o600)
    path.write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("make", [a_link, open_to_others, a_pipe, nonsense])
def test_a_secret_that_cannot_be_trusted_is_not_used(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder / SECRET_FILE)
    with pytest.raises(SourceError, match=r"cannot be trusted|is damaged"):
        read_local_secret(folder)


def test_a_secret_of_somebody_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_secret(folder):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(SourceError, match="belongs to user"):
            read_local_secret(folder)

"""The cluster's routes over a cluster without sockets: answers, refusals, secrets, and the stream of news."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from shardcompute.api import Limits, create_app
from shardcompute.api.access.hosts import hosts_of
from shardcompute.cluster_client import ClusterClient
from shardcompute.control import events as happened
from shardcompute.core.errors import AuthError, BackendError, QueueFullError, UnknownModelError, UsageError
from shardcompute.core.generation import Delta, GenerationRequest, Interruption, TokenChoice
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.admin.views import ClusterView
from shardcompute.node.service import ServiceLoad
from shardcompute.node.telemetry.history_store import HistoryRange
from shardcompute.security import KeyRole
from shardcompute.web import page_routes
from support.api.bridge import LOCAL_SECRET, Bridge
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.fake_cluster import NOW_S, FakeCluster, serving_cluster

LOCAL = "http://127.0.0.1"
SIGNED = {"authorization": f"Bearer {LOCAL_SECRET}"}
PATHS = {
    "/cluster/state",
    "/cluster/events",
    "/cluster/requests",
    "/cluster/usage",
    "/cluster/history/events",
    "/cluster/history/requests",
    "/cluster/history/usage",
    "/cluster/catalogue",
    "/cluster/pulls",
    "/cluster/plan",
    "/cluster/models",
    "/cluster/models/{model}",
    "/cluster/models/{model}/layout",
    "/cluster/nodes/{node}/drain",
    "/cluster/nodes/{node}",
    "/cluster/tokens",
    "/cluster/tokens/{token}",
    "/cluster/pairing",
    "/cluster/keys",
    "/cluster/keys/{key}",
    "/cluster/sign-in",
    "/cluster/finetuning",
    "/cluster/teaching/{model}/card",
    "/cluster/teaching/{model}/tensor",
    "/cluster/teaching/{model}/speech",
    "/cluster/teaching/{model}/states",
    "/cluster/teaching/{model}/draft-head",
    "/session",
}


@pytest.fixture
def cluster() -> FakeCluster:
    return serving_cluster(500, 500)


@pytest.fixture
def admin(cluster: FakeCluster, tmp_path: Any) -> Iterator[ClusterAdmin]:
    settings = Settings(data_dir=tmp_path, offline=True)
    with ClusterAdmin(cluster, settings, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        yield admin


@pytest.fixture
def client(service: Any, admin: ClusterAdmin) -> Iterator[ClusterClient]:
    app = create_app(service, admin=admin, local_secret=LOCAL_SECRET)
    with ClusterClient(LOCAL, api_key=LOCAL_SECRET, transport=Bridge(app)) as client:
        yield client


@pytest.fixture
def ask(service: Any, admin: ClusterAdmin) -> Callable[..., httpx.Response]:
    app = create_app(service, admin=admin, local_secret=LOCAL_SECRET)

    def send(method: str, path: str, *, headers: Any = None, **options: Any) -> Any:
        with httpx.Client(base_url=LOCAL, transport=Bridge(app)) as client:
            return client.request(method, path, headers={**SIGNED, **(headers or {})}, **options)

    return send


# Answers


def test_state_comes_back_as_it_is(client: ClusterClient, admin: ClusterAdmin) -> None:
    state = client.state()
    assert isinstance(state, ClusterView)
    assert state == admin.state()
    assert state.chains[0].bottleneck


def test_an_answer_tells_of_a_rescue(client: ClusterClient, service: Any) -> None:
    told = Interruption(lost=("b",), taken_over_by=("c",), pause_s=1.5, after_tokens=1)
    first, *rest = service.script
    service.script = [replace(first, interruption=told), *rest]
    model = service.models()[0].name
    deltas = list(client.generate(model, GenerationRequest((1, 2), 8)))
    assert [each.interruption for each in deltas if each.interruption] == [told]
    assert "".join(each.text for each in deltas) == "".join(each.text for each in service.script)


def test_plan_and_models(client: ClusterClient, admin: ClusterAdmin, cluster: FakeCluster) -> None:
    assert client.plan("org/tiny", form="int8") == admin.plan("org/tiny", "int8")
    fetch = client.load_model("org/other", form="int4", chains=2)
    assert (fetch.model, fetch.form, fetch.chains, fetch.status) == ("org/other", "int4", 2, "fetching")
    admin._fetches.join()
    (failed,) = client.state().fetches
    assert (failed.model, failed.status) == ("org/other", "failed")
    assert failed.error
    client.unload_model("org/other")
    assert client.state().fetches == ()
    client.unload_model("org/tiny")
    assert not cluster.coordinator.state.models["org/tiny"].is_wanted


def test_nodes_are_drained_and_revoked(client: ClusterClient, cluster: FakeCluster) -> None:
    assert client.drain_node("A").is_draining
    assert client.revoke_node("b").node.status == "gone"
    assert cluster.revoked == ["b"]


def test_requests_are_listed(client: ClusterClient, cluster: FakeCluster) -> None:
    assert client.requests() == []
    with cluster.pool.requests.open("org/tiny", "org/tiny#1", GenerationRequest((0,) * 7, 1)):
        (request,) = client.requests()
    assert (request.model, request.chain, request.state, request.prompt_tokens) == (
        "org/tiny",
        "org/tiny#1",
        "waiting",
        7,
    )


def test_history_is_told_in_pages(client: ClusterClient, cluster: FakeCluster, ask: Any) -> None:
    for _ in range(3):
        with cluster.pool.requests.open("org/tiny", "org/tiny#1", GenerationRequest((0,) * 7, 1)) as entry:
            entry.saw(Delta("a", (TokenChoice(1),)))
            entry.saw(Delta(finish="stop"))
    cluster.join("z")
    page = client.event_history(HistoryRange(limit=1))
    assert [event.text for event in page.data] == ["Z joined: 2 threads, 1000 bytes of memory"]
    assert page.next is not None
    older = client.event_history(HistoryRange(before=page.next))
    assert older.data
    assert all(event.number < page.next for event in older.data)
    assert len(client.request_history().data) == 3
    assert client.request_history(HistoryRange(since_s=2_000_000_000)).data == ()
    (used,) = client.usage_history(span_s=86_400).data
    assert (used.model, used.requests, used.prompt_tokens, used.generated_tokens) == ("org/tiny", 3, 21, 3)
    assert client.state().events[-1] == page.data[0]
    for query in ("since=x", "until=-1", "limit=0", "limit=1001", "before=1.5", f"since={'9' * 16}"):
        refused = ask("GET", f"/cluster/history/events?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.partition("=")[0])
    assert ask("GET", "/cluster/history/usage?span=60").status_code == 400


def test_secrets_are_told_once(client: ClusterClient, ask: Any) -> None:
    token = client.create_token(expires_s=3600.0, max_uses=1)
    key = client.create_key("phone")
    assert [(each.id, each.max_uses) for each in client.tokens()] == [(token.id, 1)]
    kept = client.keys()
    assert [(each.id, each.label) for each in kept] == [(key.id, "phone")]
    for path in ("/cluster/tokens", "/cluster/keys", "/cluster/state"):
        response = ask("GET", path)
        assert token.token not in response.text
        assert key.key not in response.text
        assert response.headers["cache-control"] == "no-store"
    client.revoke_token(token.id)
    client.revoke_key(key.id)
    assert client.tokens()[0].state == "revoked"
    assert client.keys()[0].is_revoked


def test_a_pairing_code_is_told_to_those_who_operate(
    client: ClusterClient, cluster: FakeCluster, ask: Any
) -> None:
    made = client.open_pairing()
    assert cluster.access.pairing.begin().shown == made.code
    assert (made.life_s, made.join_port) == (300.0, 7421)
    assert made.code not in ask("GET", "/cluster/state").text
    assert made.code not in repr(made)
    for _ in range(5):
        with pytest.raises(AuthError):
            cluster.access.pairing.settle(cluster.access.pairing.open(), is_right=False)
    assert ask("POST", "/cluster/pairing", json={}).status_code == 429


def test_pairings_and_wrong_codes_are_in_the_history(cluster: FakeCluster, admin: ClusterAdmin) -> None:
    cluster.access.paired("laptop", True)
    cluster.access.paired("laptop", False)
    told = [(event.tone, event.text) for event in admin.state().events[-2:]]
    assert [tone for tone, _ in told] == ["good", "warn"]
    assert "laptop was paired" in told[0][1]
    assert "wrong pairing code" in told[1][1]


# Refusals


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/cluster/models/org/none"),
        ("DELETE", "/cluster/nodes/nobody"),
        ("DELETE", "/cluster/tokens/feed"),
        ("DELETE", "/cluster/keys/nothing1"),
    ],
)
def test_what_does_not_exist_is_404(ask: Any, method: str, path: str) -> None:
    response = ask(method, path)
    assert response.status_code == 404
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_draining_nobody_is_404(ask: Any) -> None:
    assert ask("POST", "/cluster/nodes/nobody/drain", json={}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/cluster/plan", {}),
        ("/cluster/plan", {"model": "org/tiny", "form": "int3"}),
        ("/cluster/models", {"model": "org/tiny", "chains": 0}),
        ("/cluster/models", {"model": "org/tiny", "chain": 2}),
        ("/cluster/models", {"model": "not a model"}),
        ("/cluster/tokens", {"expires_s": 0}),
        ("/cluster/tokens", {"expires_s": 1e12}),
        ("/cluster/tokens", {"max_uses": 0}),
        ("/cluster/pairing", {"code": "12345678"}),
        ("/cluster/keys", {"label": "two\nlines"}),
        ("/cluster/nodes/a/drain", {"force": True}),
    ],
)
def test_wrong_orders_are_400_and_do_nothing(ask: Any, admin: ClusterAdmin, path: str, body: Any) -> None:
    before = admin.state()
    response = ask("POST", path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (admin.state(), admin.tokens(), admin.keys()) == (before, (), ())


@pytest.mark.parametrize(
    "path", ["/cluster/nodes/a/drain", "/cluster/models", "/cluster/tokens", "/cluster/keys"]
)
def test_a_web_page_cannot_post_a_form(ask: Any, admin: ClusterAdmin, path: str) -> None:
    response = ask("POST", path, content=b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert not any(node.is_draining for node in admin.state().nodes)


def test_keys_of_the_cluster_open_what_their_role_may_until_revoked(
    service: Any, admin: ClusterAdmin
) -> None:
    app = create_app(
        service,
        api_keys=["observe given"],
        verify_key=admin.find_key,
        admin=admin,
        hosts=hosts_of("0.0.0.0", ["box.test"]),
    )
    new = admin.create_key("phone", role=KeyRole.OBSERVE)
    transport = Bridge(app, "192.168.1.7")
    for key in ("given", new.key):
        with ClusterClient("http://box.test", api_key=key, transport=transport) as client:
            assert client.models() == ["org/tiny"]
            assert client.state().name == "home"
    admin.revoke_key(new.id)
    for wrong in (None, new.key, "nonsense"):
        with ClusterClient("http://box.test", api_key=wrong, transport=transport) as client:
            with pytest.raises(AuthError):
                client.state()
            with pytest.raises(AuthError):
                next(client.watch())


def test_a_book_of_keys_alone_is_enough(service: Any, admin: ClusterAdmin, call: Any) -> None:
    app = create_app(service, verify_key=admin.find_key)
    assert call(app, "GET", "/v1/models").status_code == 401
    headers = {"authorization": f"Bearer {admin.create_key('x').key}"}
    assert call(app, "GET", "/v1/models", headers=headers).status_code == 200


def test_without_a_cluster_there_are_no_routes(app: Any) -> None:
    with ClusterClient(LOCAL, transport=Bridge(app)) as client:
        with pytest.raises(BackendError, match="no routes for clusters"):
            client.state()
        document = client._call("GET", "/openapi.json")
    assert not PATHS & set(document["paths"])


def test_errors_come_back_as_themselves(client: ClusterClient) -> None:
    with pytest.raises(UnknownModelError):
        client.unload_model("org/none")
    with pytest.raises(UsageError, match="no node"):
        client.drain_node("nobody")
    with pytest.raises(UsageError, match="366 days"):
        client.create_token(expires_s=1e12)


def test_openapi_describes_the_routes(client: ClusterClient) -> None:
    document = client._call("GET", "/openapi.json")
    assert set(document["paths"]) >= PATHS
    schemas = document["components"]["schemas"]
    assert {"nodes", "links", "models", "chains", "fetches", "load"} <= set(
        schemas["ClusterView"]["properties"]
    )
    drain = document["paths"]["/cluster/nodes/{node}/drain"]["post"]
    assert [parameter["name"] for parameter in drain["parameters"]] == ["node"]
    events = document["paths"]["/cluster/events"]["get"]["responses"]["200"]["content"]
    assert list(events) == ["text/event-stream"]


# The stream of news


class Reader:
    """An ASGI client of the stream that reads only while it may."""

    def __init__(self, app: Any, on_body: Callable[[bytes, Reader], Any] = lambda body, reader: None) -> None:
        self.bodies: list[bytes] = []
        self.status = 0
        self.leave = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.is_stuck = asyncio.Event()
        self.has_read = asyncio.Event()
        self._app, self._on_body = app, on_body

    async def run(self) -> None:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/cluster/events",
            "raw_path": b"/cluster/events",
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"127.0.0.1"),
                (b"authorization", SIGNED["authorization"].encode()),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> Any:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if not self.may_read.is_set():
            self.is_stuck.set()
            await self.may_read.wait()
        self.bodies.append(message["body"])
        self.has_read.set()
        self._on_body(message["body"], self)

    def events(self) -> list[tuple[str, Any]]:
        parsed = []
        for body in self.bodies:
            lines = body.decode().splitlines()
            if lines[0].startswith("event: "):
                parsed.append((lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))))
        return parsed


def test_news_begin_with_the_state_and_go_on_with_changes(
    service: Any, admin: ClusterAdmin, cluster: FakeCluster
) -> None:
    def on_body(body: bytes, reader: Reader) -> None:
        if body.startswith(b"event: state"):
            cluster.coordinator.post(happened.NodeDrained("a"))
            admin._feed.publish()
        elif body.startswith(b"event: change"):
            reader.leave.set()

    reader = Reader(create_app(service, admin=admin, local_secret=LOCAL_SECRET), on_body)
    asyncio.run(reader.run())
    assert reader.status == 200
    (first, state), (second, change) = reader.events()[:2]
    assert (first, second) == ("state", "change")
    assert [node["is_draining"] for node in state["nodes"]] == [False, False]
    assert [(node["id"], node["is_draining"]) for node in change["nodes"]] == [("a", True)]
    assert change["links"] == []
    assert admin._feed._readers == []


def test_pings_show_that_a_silent_stream_lives(service: Any, admin: ClusterAdmin) -> None:
    def on_body(body: bytes, reader: Reader) -> None:
        if body == b": ping\n\n":
            reader.leave.set()

    limits = Limits(ping_interval_s=0.001)
    app = create_app(service, admin=admin, local_secret=LOCAL_SECRET, limits=limits)
    reader = Reader(app, on_body)
    asyncio.run(reader.run())
    assert b": ping\n\n" in reader.bodies


def test_a_slow_reader_gets_a_fresh_state_instead_of_a_backlog(
    service: Any, admin: ClusterAdmin, cluster: FakeCluster
) -> None:
    async def run() -> Reader:
        reader = Reader(create_app(service, admin=admin, local_secret=LOCAL_SECRET))
        running = asyncio.create_task(reader.run())
        await reader.has_read.wait()
        reader.may_read.clear()
        for count in range(1, 101):
            cluster.pool.busy = ServiceLoad(count, 0, 0.0)
            admin._feed.publish()
            if count == 1:
                await reader.is_stuck.wait()
        reader._on_body = lambda body, reader: reader.leave.set() if b"event: state" in body else None
        reader.may_read.set()
        await running
        return reader

    reader = asyncio.run(run())
    kinds = [kind for kind, _ in reader.events()]
    assert kinds == ["state", "change", "state"]
    assert reader.events()[-1][1]["load"]["running"] == 100


def test_too_many_readers_are_a_plain_error(service: Any, admin: ClusterAdmin, ask: Any) -> None:
    def refuse(wake: Callable[[], None]) -> Any:
        raise QueueFullError("64 readers already follow this cluster", hint="close one of them")

    admin.subscribe = refuse  # type: ignore[method-assign]
    response = ask("GET", "/cluster/events")
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


def test_the_client_puts_changes_together(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    from shardcompute.api.cluster.events import encode_event

    reader = admin._feed.subscribe(lambda: None)
    content = [encode_event(news) for news in reader.take()]
    cluster.coordinator.post(happened.NodeDrained("a"))
    admin._feed.publish()
    cluster.coordinator.post(happened.NodeLost("b", 1, "died", NOW_S))
    cluster.coordinator.settle()
    admin._feed.publish()
    content += [b": ping\n\n", *(encode_event(news) for news in reader.take())]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=b"".join(content)))
    with ClusterClient(LOCAL, transport=transport) as client:
        views = list(client.watch())
    assert len(views) >= 2
    assert not views[0].nodes[0].is_draining
    assert views[-1] == admin.state()


def test_an_answer_that_is_not_ours() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    with ClusterClient(LOCAL, transport=transport) as client, pytest.raises(BackendError, match="understood"):
        client.state()


def test_requests_that_were_told_are_not_told_again(ask: Any, cluster: FakeCluster) -> None:
    for _ in range(3):
        with cluster.pool.requests.open("org/tiny", "org/tiny#1", GenerationRequest((0,) * 7, 1)):
            pass
    first = ask("GET", "/cluster/requests").json()
    assert ([request["id"] for request in first["data"]], first["ended"]) == (["3", "2", "1"], 3)
    with cluster.pool.requests.open("org/tiny", "org/tiny#1", GenerationRequest((0,) * 7, 1)):
        later = ask("GET", f"/cluster/requests?after={first['ended']}").json()
    assert [request["id"] for request in later["data"]] == ["4"]
    assert ask("GET", "/cluster/requests?after=-1").status_code == 400


def test_usage_is_told_by_key_and_model(ask: Any, cluster: FakeCluster) -> None:
    with cluster.pool.requests.open("org/tiny", "org/tiny#1", GenerationRequest((0,) * 7, 1)) as entry:
        entry.saw(Delta(tokens=(TokenChoice(1), TokenChoice(2))))
    usage = ask("GET", "/cluster/usage").json()
    [total] = usage["totals"]
    assert (total["key"], total["model"], total["requests"]) == ("", "org/tiny", 1)
    assert (total["prompt_tokens"], total["generated_tokens"]) == (7, 2)
    assert len(usage["minutes"]) == len(usage["hours"]) == 1


def test_catalogue_offers_the_default(ask: Any) -> None:
    [entry] = ask("GET", "/cluster/catalogue").json()["data"]
    assert (entry["model"], entry["name"]) == ("smollm2", "SmolLM2-135M-Instruct")


def test_pulled_model_is_not_served(
    ask: Any, admin: ClusterAdmin, cluster: FakeCluster, tmp_path: Any
) -> None:
    folder = save_tiny_llama(tmp_path / "other")
    view = ask("POST", "/cluster/pulls", json={"model": str(folder)}).json()
    assert (view["name"], view["chains"]) == ("other", 0)
    admin._fetches.join()
    assert ask("GET", "/cluster/state").json()["fetches"] == []
    assert cluster.served == []


def test_page_needs_no_key_and_everything_else_does(service: Any, admin: ClusterAdmin) -> None:
    app = create_app(service, api_keys=["key"], admin=admin, page=page_routes())
    with httpx.Client(transport=Bridge(app), base_url=LOCAL) as client:
        assert client.get("/").headers["content-type"].startswith("text/html")
        assert client.get("/page/app.js").status_code == 200
        assert client.get("/cluster/state").status_code == 401
        assert client.get("/page/nothing.js").status_code == 401


def test_generations_know_the_public_name_of_their_key(fakes: Any, admin: ClusterAdmin) -> None:
    callers = []

    class Service(fakes.FakeService):  # type: ignore[misc]
        def generate(self, model: str, request: Any) -> Any:
            callers.append(request.caller)
            return super().generate(model, request)

    own = admin.create_key("laptop")
    app = create_app(Service(), api_keys=["observe given"], verify_key=admin.find_key, admin=admin)
    with httpx.Client(transport=Bridge(app), base_url=LOCAL) as client:
        for key in (own.key, "given"):
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": "org/tiny", "prompt": "hi"}
            assert client.post("/v1/completions", headers=headers, json=body).status_code == 200
    assert callers[0] == own.id
    assert callers[1].startswith("key-")
    assert "given" not in callers[1]


def test_a_layout_is_kept_and_let_go(client: ClusterClient, admin: ClusterAdmin, ask: Any) -> None:
    assert client.keep_layout("org/tiny", True).is_kept
    assert [model.is_kept for model in admin.state().models] == [True]
    assert not client.keep_layout("org/tiny", False).is_kept
    assert [model.is_kept for model in admin.state().models] == [False]
    assert ask("POST", "/cluster/models/org/none/layout", json={"keep": True}).status_code == 404
    assert ask("POST", "/cluster/models/org/tiny/layout", json={}).status_code == 400

"""Keys with limits that reach for more: other models, faster, longer, at the same time, after a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from shardcompute.api import create_app
from shardcompute.core.errors import CapacityError
from shardcompute.core.settings import Settings
from shardcompute.node.accounts import ClusterAccounts
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.driver.ledger_client import LedgerClient
from shardcompute.node.service import ServedModel
from shardcompute.node.telemetry.quota import QuotaLedger
from shardcompute.security import KeyLimits, KeyRole
from shardcompute.wire.control import DrawQuota
from support.swarm.fake_cluster import NOW_S, serving_cluster

ASK = {"prompt": [97, 98, 99], "max_tokens": 100, "temperature": 0}
"""3 tokens; the answers of a fake service have 5."""
DAY_S = 86_400.0
MODELS = tuple(ServedModel(name, 4096, 0, "0" * 64, 1) for name in ("org/tiny", "org/other"))


@dataclass
class Clock:
    now_s: float = time.time() // DAY_S * DAY_S + 10.0
    """Today, because a history forgets what is old."""

    def __call__(self) -> float:
        return self.now_s


class Gate(asyncio.Event):
    """Tells of everybody who has come to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: asyncio.Queue[None] = asyncio.Queue()

    async def wait(self) -> Literal[True]:
        self.reached.put_nowait(None)
        return await super().wait()


@dataclass
class Desk:
    """A server whose time stands still, and one key to it."""

    app: Any
    service: Any
    admin: ClusterAdmin
    clock: Clock
    key: str = ""
    is_cut_off: bool = False
    tell: Callable[[], None] = lambda: None
    notes: dict[str, bytes] = field(default_factory=dict)

    def open_ledger(self) -> QuotaLedger:
        return QuotaLedger(
            own=f"own-{len(self.notes)}-{time.monotonic_ns()}",
            read=self.notes.get,
            write=self.notes.__setitem__,
            clock=self.clock,
            wall_clock=self.clock,
        )

    def open_app(self, service: Any, quota: Any) -> Any:
        keys = self.admin.find_key
        return create_app(
            service, verify_key=keys, admin=self.admin, quota=quota, clock=self.clock, wall_clock=self.clock
        )

    def restart(self) -> None:
        self.ledger.flush()
        self.use(self.open_ledger())

    def use(self, ledger: QuotaLedger) -> None:
        self.ledger = ledger
        self.app = self.open_app(self.service, ledger)

    def beside(self) -> Desk:
        """A driver in a process of its own, with its ledger's link to this server."""
        accounts = ClusterAccounts(self.ledger, lambda: self.admin._cluster.access.key_book, self.clock)

        def send(message: Any) -> bool:
            if other.is_cut_off:
                return False
            if isinstance(message, DrawQuota):
                granted = accounts.draw("driver", message)
                client.take(granted)
            return True

        client = LedgerClient(send, 7, list)
        service = type(self.service)(served=MODELS)
        other = Desk(None, service, self.admin, self.clock, self.key, tell=client.turn)
        other.app = self.open_app(service, client)
        return other

    def give(self, **limits: Any) -> None:
        self.key = self.admin.create_key("a user", limits=KeyLimits(**limits)).key

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers, **options)

    def ask(self, method: str = "POST", path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body = {"json": {"model": "org/tiny", **ASK, **fields}} if method == "POST" else {}
        return asyncio.run(self.send(method, path, **body))


@pytest.fixture
def desk(tmp_path: Path, fakes: Any) -> Iterator[Desk]:
    clock = Clock()
    service = fakes.FakeService(served=MODELS)
    cluster = serving_cluster(500, 500)
    with ClusterAdmin(cluster, Settings(data_dir=tmp_path), clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        desk = Desk(None, service, admin, clock)
        desk.use(desk.open_ledger())
        yield desk


# Models


def test_a_key_knows_its_own_models_alone(desk: Desk) -> None:
    desk.give(models=("org/other",))
    for path in ("/v1/models", "/api/tags", "/api/ps"):
        assert "org/other" in desk.ask("GET", path).text
        assert "org/tiny" not in desk.ask("GET", path).text
    assert desk.ask(model="org/other").status_code == 200
    assert desk.ask(model="default").status_code == 200
    assert {request.max_tokens for request in desk.service.requests} == {100}


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
REFUSALS = [
    ("POST", "/v1/completions", ASK),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    ("POST", "/v1/responses", {"input": "hi"}),
    ("POST", "/v1/embeddings", {"input": "hi"}),
    ("POST", "/api/chat", {"messages": CHAT["messages"]}),
    ("POST", "/api/generate", {"prompt": "hi"}),
    ("POST", "/api/embed", {"input": "hi"}),
    ("POST", "/api/show", {}),
    ("POST", "/api/pull", {}),
    ("POST", "/tokenize", {"prompt": "hi"}),
    ("POST", "/detokenize", {"tokens": [97]}),
    ("GET", "/v1/models/org/tiny", None),
]


@pytest.mark.parametrize(("method", "path", "body"), REFUSALS)
def test_another_model_is_none_in_every_protocol(desk: Desk, method: str, path: str, body: Any) -> None:
    """As if it were not served: who may not use it does not learn that it is there."""
    desk.give(models=("org/other",))

    def answer(model: str) -> tuple[int, str]:
        asked = {} if body is None else {"json": {**body, "model": model}}
        refused = asyncio.run(desk.send(method, path.replace("org/tiny", model), **asked))
        return refused.status_code, refused.text.replace(model, "MODEL").replace(
            refused.headers["x-request-id"], ""
        )

    assert answer("org/tiny") == answer("org/none")
    assert answer("org/tiny")[0] == 404
    assert desk.service.requests == []


# Requests a minute


def test_a_request_too_many_is_told_when_to_come_back(desk: Desk) -> None:
    desk.give(requests_per_minute=2)
    assert desk.ask().status_code == 200
    desk.clock.now_s += 15.5
    assert desk.ask().status_code == 200
    refused = desk.ask()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "45"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "may send 2 requests a minute" in refused.text
    assert desk.ask("GET", "/v1/models").status_code == 200, "a list is no request to a model"
    desk.clock.now_s += 44.5
    assert desk.ask().status_code == 200
    assert desk.ask().status_code == 429
    assert desk.service.opened == 3


def test_refused_requests_do_not_lengthen_the_wait(desk: Desk) -> None:
    desk.give(requests_per_minute=1)
    desk.ask()
    for _ in range(10):
        assert desk.ask().status_code == 429
    desk.clock.now_s += 60.0
    assert desk.ask().status_code == 200


@pytest.mark.parametrize(
    ("path", "shown"), [("/v1/messages", "rate_limit_error"), ("/api/chat", "1 request a minute")]
)
def test_the_refusal_has_the_words_of_its_protocol(desk: Desk, path: str, shown: str) -> None:
    desk.give(requests_per_minute=1)
    body = {"model": "org/tiny", **CHAT}
    assert asyncio.run(desk.send("POST", path, json=body)).status_code == 200
    refused = asyncio.run(desk.send("POST", path, json=body))
    assert (refused.status_code, shown in refused.text) == (429, True)


def test_one_key_costs_another_nothing(desk: Desk) -> None:
    desk.give(requests_per_minute=1)
    desk.ask()
    desk.give(requests_per_minute=1)
    assert desk.ask().status_code == 200


# Tokens a day


def test_the_last_answer_is_cut_and_the_next_waits_for_the_day(desk: Desk) -> None:
    desk.give(tokens_per_day=20)
    assert desk.ask().status_code == 200
    assert desk.ask().status_code == 200
    assert [request.max_tokens for request in desk.service.requests] == [17, 9], "3 + 5 were used before"
    assert desk.ask().status_code == 200
    assert desk.service.requests[-1].max_tokens == 1
    refused = desk.ask()
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert int(refused.headers["retry-after"]) == DAY_S - 10
    desk.clock.now_s += DAY_S - 10
    assert desk.ask().status_code == 200


def test_tokens_are_not_spent_twice_at_the_same_time(desk: Desk, fakes: Any) -> None:
    desk.give(tokens_per_day=203)
    waiting = Gate()
    desk.service.script = [waiting, *fakes.say("Hello")]

    async def run() -> list[int]:
        body = {"json": {"model": "org/tiny", **ASK}}
        running = [asyncio.create_task(desk.send("POST", "/v1/completions", **body)) for _ in range(2)]
        for _ in running:
            await waiting.reached.get()
        third = await desk.send("POST", "/v1/completions", **body)
        waiting.set()
        return [third.status_code, *[(await each).status_code for each in running]]

    assert asyncio.run(run()) == [429, 200, 200]
    # 2 · (3 + 100), of which the second had to do with 97; both used 8 in the end.
    assert [request.max_tokens for request in desk.service.requests] == [100, 97]
    desk.service.script = fakes.say("Hello")
    assert desk.ask(max_tokens=180).status_code == 200


def test_many_answers_to_one_request_share_what_is_left(desk: Desk) -> None:
    desk.give(tokens_per_day=50)
    desk.service.script = [asyncio.Event()]
    assert desk.ask(n=8, max_tokens=30, temperature=1).status_code == 429
    assert sum(3 + request.max_tokens for request in desk.service.requests) <= 50


def test_what_was_refused_costs_nothing_and_what_was_left_costs_its_prompt(desk: Desk, fakes: Any) -> None:
    desk.give(tokens_per_day=103)
    desk.service.script = [CapacityError("no room")]
    assert desk.ask().status_code == 503
    desk.service.script = fakes.say("Hello")
    assert desk.ask().status_code == 200
    assert desk.service.requests[-1].max_tokens == 100

    async def leave() -> None:
        waiting = Gate()
        desk.service.script = [waiting]
        body = {"json": {"model": "org/tiny", **ASK}}
        asked = asyncio.create_task(desk.send("POST", "/v1/completions", **body))
        await waiting.reached.get()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(leave())
    assert desk.service.closed == desk.service.opened
    desk.service.script = fakes.say("Hello")
    desk.ask()
    assert desk.service.requests[-1].max_tokens == 103 - 8 - 3 - 3


def test_a_prompt_that_is_longer_than_what_is_left(desk: Desk) -> None:
    desk.give(tokens_per_day=10)
    refused = desk.ask(prompt=[97] * 10)
    assert refused.status_code == 429
    assert "10 of the 10 tokens" in refused.text
    assert desk.ask().status_code == 200


def test_a_restart_forgives_nothing(desk: Desk) -> None:
    desk.give(tokens_per_day=50)
    assert desk.ask(prompt=[97] * 30).status_code == 200
    desk.restart()
    assert desk.ask(prompt=[97] * 15).status_code == 429
    assert desk.ask(prompt=[97] * 14).status_code == 200
    assert desk.service.requests[-1].max_tokens == 1, "30 + 5 and 14 of 50"


def test_two_servers_count_together(desk: Desk) -> None:
    desk.give(tokens_per_day=50, requests_per_minute=4)
    other = desk.beside()
    assert desk.ask(prompt=[97] * 20).status_code == 200
    assert other.ask(prompt=[97] * 10).status_code == 200
    assert other.service.requests[-1].max_tokens == 50 - 25 - 10
    other.tell()
    refused = desk.ask(prompt=[97] * 20)
    assert refused.status_code == 429
    assert "10 of the 50 tokens" in refused.text
    assert desk.ask(prompt=[97] * 3).status_code == 200
    assert other.ask(prompt=[97]).json()["error"]["code"] == "rate_limit_exceeded", "the fifth of a minute"
    desk.clock.now_s += 71.0
    assert other.ask(prompt=[97] * 3).json()["error"]["code"] == "insufficient_quota"


def test_without_the_coordinator_a_server_goes_on_with_what_it_has(desk: Desk) -> None:
    desk.give(tokens_per_day=100_000)
    other = desk.beside()
    assert other.ask().status_code == 200
    other.is_cut_off = True
    assert other.ask().status_code == 200, "from what it holds in store"
    assert other.ask(max_tokens=4000).status_code == 503
    desk.clock.now_s += 61.0
    refused = other.ask()
    assert refused.status_code == 503
    assert "the coordinator is away" in refused.text
    other.is_cut_off = False
    assert other.ask().status_code == 200


# Expiry


def test_an_expired_key_opens_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.key = desk.admin.create_key("for an hour", role=KeyRole.OPERATE, life_s=3600.0).key
    assert desk.ask().status_code == 200
    monkeypatch.setattr("support.swarm.fake_cluster.NOW_S", NOW_S + 3600.0)
    refused = desk.ask()
    assert (refused.status_code, "has expired" in refused.text) == (401, True)
    assert asyncio.run(desk.send("GET", "/cluster/state")).status_code == 401


@pytest.mark.parametrize(
    "body",
    [
        {"role": "king"},
        {"role": "observe", "tokens_per_day": 5},
        {"models": []},
        {"models": [""]},
        {"requests_per_minute": 0},
        {"tokens_per_day": -1},
        {"expires_s": 0},
        {"expires_s": 1e30},
        {"limit": 3},
    ],
)
def test_keys_that_make_no_sense_are_not_made(desk: Desk, body: Any) -> None:
    desk.key = desk.admin.create_key("me", role=KeyRole.OPERATE).key
    assert asyncio.run(desk.send("POST", "/cluster/keys", json=body)).status_code == 400
    assert len(desk.admin.keys()) == 1

"""A coordinator that waits: what clients, load balancers and people are told who ask it."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from shardcompute.api.access.hosts import hosts_of
from shardcompute.api.standby import LEADER_HEADER, RETRY_AFTER_S, create_standby_app
from shardcompute.node.coordinator.shared import KnownCoordinator, Standing

URL = "http://10.0.0.1:8000"
LED = Standing(KnownCoordinator("n-first", URL, "leads", 5_000.0))


def ask(standing: Standing, method: str, path: str, **fields: object) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(create_standby_app(lambda: standing))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **fields)  # type: ignore[arg-type]

    return asyncio.run(run())


def test_a_load_balancer_leaves_it_out_and_learns_who_leads() -> None:
    told = ask(LED, "GET", "/health")
    assert told.status_code == 503
    assert told.headers["retry-after"] == str(RETRY_AFTER_S)
    assert told.headers[LEADER_HEADER] == URL
    body = told.json()
    assert (body["status"], body["leader"]) == (
        "waiting",
        {"node": "n-first", "url": URL, "since_s": 5_000.0},
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/chat/completions"), ("GET", "/cluster/state"), ("GET", "/v1/models"), ("DELETE", "/x")],
)
def test_every_request_is_told_where_to_go(method: str, path: str) -> None:
    told = ask(LED, method, path, json={"model": "m"} if method == "POST" else None)
    assert (told.status_code, told.headers["retry-after"]) == (503, str(RETRY_AFTER_S))
    assert told.headers[LEADER_HEADER] == URL
    error = told.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "not_leading")
    assert f"n-first does, at {URL}" in error["message"]
    assert told.headers["x-request-id"]


def test_other_protocols_are_told_in_their_words() -> None:
    assert ask(LED, "POST", "/v1/messages").json()["error"]["type"] == "overloaded_error"
    assert URL in ask(LED, "POST", "/api/chat").json()["error"]


def test_openais_client_tries_again_and_says_why() -> None:
    asked: list[str] = []

    async def run() -> None:
        app = create_standby_app(lambda: Standing(LED.leader))

        class Noting(httpx.ASGITransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                asked.append(request.url.path)
                response = await super().handle_async_request(request)
                response.headers["retry-after-ms"] = "1"  # a test need not wait
                return response

        async with openai.AsyncOpenAI(
            api_key="sk-1",
            base_url="http://127.0.0.1:8000/v1",
            max_retries=2,
            http_client=httpx.AsyncClient(transport=Noting(app)),
        ) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])

    with pytest.raises(openai.InternalServerError, match=r"n-first does, at http://10\.0\.0\.1:8000"):
        asyncio.run(run())
    assert asked == ["/v1/chat/completions"] * 3


def test_a_person_is_sent_to_the_leaders_page() -> None:
    sent = ask(LED, "GET", "/")
    assert (sent.status_code, sent.headers["location"]) == (307, f"{URL}/")
    assert ask(LED, "POST", "/").status_code == 503
    assert ask(Standing(), "GET", "/").status_code == 503


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (Standing(), "No coordinator leads this cluster yet"),
        (Standing(problem="the store does not answer"), "who does is not known: the store does not answer"),
        (Standing(KnownCoordinator("n-first", "", "leads")), "n-first does."),
    ],
)
def test_what_is_not_known_is_not_told(standing: Standing, words: str) -> None:
    told = ask(standing, "GET", "/health")
    assert words in told.json()["reason"]
    assert LEADER_HEADER not in told.headers
    assert told.status_code == 503


def test_names_of_other_servers_are_refused() -> None:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(create_standby_app(lambda: LED, hosts=hosts_of("127.0.0.1")))
        async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as client:
            return await client.get("/health")

    assert asyncio.run(run()).status_code == 403

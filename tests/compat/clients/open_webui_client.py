"""The requests that Open WebUI makes of its connections, as it makes them. Arguments: url, key, model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp

URL, KEY, MODEL = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Say hello."}]
SECRET = {"Authorization": f"Bearer {KEY}"}
# What it says of whoever asks, and of itself, on every request that it passes on.
TOLD = {
    **SECRET,
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Anna",
    "HTTP-Referer": "https://openwebui.com/",
}


async def get(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(f"{URL}{path}", headers=TOLD) as reply:
        assert reply.status == 200, (path, await reply.text())
        return await reply.json()


async def post(session: aiohttp.ClientSession, path: str, body: Any) -> str:
    async with session.post(f"{URL}{path}", data=json.dumps(body), headers=TOLD) as reply:
        text = await reply.text()
        assert reply.status == 200, (path, text)
        return text


async def ask_ollama(session: aiohttp.ClientSession) -> None:
    assert (await get(session, "/api/version"))["version"].count(".") >= 1
    [listed] = (await get(session, "/api/tags"))["models"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= listed.keys()
    assert len(listed["digest"]) == 64
    assert listed["size"] > 0
    [running] = (await get(session, "/api/ps"))["models"]
    assert running["model"] == listed["model"]
    assert running["expires_at"]
    shown = json.loads(await post(session, "/api/show", {"model": listed["model"]}))
    assert "completion" in shown["capabilities"]
    name = f"{MODEL}:latest"
    options = {"num_ctx": 4096, "temperature": 0, "num_predict": 12}
    body = {"model": name, "messages": MESSAGES, "options": options, "stream": True, "keep_alive": "5m"}
    lines = [json.loads(line) for line in (await post(session, "/api/chat", body)).splitlines()]
    assert "".join(line["message"]["content"] for line in lines)
    assert lines[-1]["done"]
    assert lines[-1]["eval_count"] <= 12
    whole = {"model": name, "prompt": "Say hello.", "stream": False, "options": options}
    assert json.loads(await post(session, "/api/generate", whole))["response"]
    embedded = json.loads(
        await post(session, "/api/embed", {"model": name, "input": ["one", "two"], "truncate": True})
    )
    assert len(embedded["embeddings"]) == 2
    assert "success" in await post(session, "/api/pull", {"model": name, "stream": True})
    for method, path in (("DELETE", "/api/delete"), ("POST", "/api/create")):
        async with session.request(
            method, f"{URL}{path}", data=json.dumps({"model": name}), headers=TOLD
        ) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]


async def ask_openai(session: aiohttp.ClientSession) -> None:
    [card] = (await get(session, "/v1/models"))["data"]
    assert card["id"] == MODEL
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "stream": True}
    text = await post(session, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    chunks = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert chunks[-1] == "[DONE]"
    assert json.loads(chunks[-2])["usage"]["completion_tokens"] <= 12
    # Titles, tags and follow-ups are asked for at the end of a chat, whole.
    task = {
        "model": MODEL,
        "messages": MESSAGES,
        "stream": False,
        "max_completion_tokens": 12,
        "metadata": {"task": "title"},
    }
    assert json.loads(await post(session, "/v1/chat/completions", task))["choices"][0]["message"]["content"]
    embedded = json.loads(await post(session, "/v1/embeddings", {"model": MODEL, "input": ["one"]}))
    assert embedded["data"][0]["embedding"]
    async with session.get(f"{URL}/v1/models", headers={"Authorization": "Bearer other"}) as reply:
        assert reply.status == 401
        assert (await reply.json())["error"]["message"]


async def main() -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300), trust_env=False) as session:
        await ask_ollama(session)
        await ask_openai(session)


asyncio.run(main())

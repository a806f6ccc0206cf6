"""Mutated HTTP requests of every protocol at a real server: nothing hangs, fails unforeseen or is left behind.

Half of them are broken where their structure is (fields of bodies, headers, paths), half where their bytes are.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from support.api.api_server import ask_port, read_all, request
from support.swarm.processes import Started

TIMEOUT_S = 60.0
AT_ONCE = 4
GROWTH_BYTES = 256 << 20
SPARE_FILES = 16
HOST = "127.0.0.1"
USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CHAT = {"messages": [USER], "max_tokens": 2, "stop": ["x"], "n": 1, "logit_bias": {"65": 1}, "seed": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "tools": [FUNCTION], "tool_choice": "auto"},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2, "guided_json": SCHEMA, "logprobs": 1, "echo": True},
    "/v1/responses": {"input": [USER], "max_output_tokens": 2, "tools": [], "metadata": {"a": "b"}},
    "/v1/embeddings": {"input": ["Hi", "you"], "encoding_format": "base64"},
    "/v1/messages": {"messages": [USER], "max_tokens": 2, "stop_sequences": ["x"], "system": "Be brief."},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/api/chat": {"messages": [USER], "options": {"num_predict": 2, "stop": ["x"]}, "stream": False},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 2}, "raw": True},
    "/api/embed": {"input": ["Hi"]},
    "/api/show": {"model": "tiny"},
    "/tokenize": {"messages": [USER], "return_token_strs": True},
    "/detokenize": {"tokens": [65, 66]},
}
READS = (
    "/health",
    "/metrics",
    "/v1/models",
    "/api/tags",
    "/api/ps",
    "/openapi.json",
    "/tokenizer_info",
    "/version",
)
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, 10**30, 1e308, 0.1, "", "\0", "\ud800", "💥" * 99, "x" * 5000),
    *(
        [],
        {},
        [[]],
        [None],
        {"": ""},
        [[[[[[[[]]]]]]]],
        {"type": "text"},
        "auto",
        "system",
        "tiny",
        [0] * 3000,
    ),
)


def mutate_value(value: Any, random: random.Random) -> Any:
    """The value with something odd in one place, or with a part missing, doubled or moved."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        changed = dict(value)
        how = random.randrange(5)
        if how == 0:
            del changed[key]
        elif how == 1:
            changed[random.choice(("a", "stream", "model", "format", "n", "\0"))] = random.choice(ODD)
        elif how == 2:
            changed[key] = random.choice(ODD)
        else:
            changed[key] = mutate_value(value[key], random)
        return changed
    if isinstance(value, list) and value and random.random() < 0.8:
        index = random.randrange(len(value))
        return [*value[:index], mutate_value(value[index], random), *value[index + random.randrange(2) :]] * (
            1 + (random.random() < 0.1)
        )
    return random.choice(ODD)


def mutate_bytes(content: bytes, random: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled or put in."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5, 20))):
        at = random.randrange(len(changed) + 1)
        how = random.randrange(5)
        if how == 0:
            changed[at : at + 1] = bytes([random.randrange(256)])
        elif how == 1:
            del changed[at : at + random.randrange(1, 30)]
        elif how == 2:
            changed[at:at] = changed[at : at + random.randrange(1, 60)]
        elif how == 3:
            changed[at:at] = random.choice(
                (b"\r\n", b"\n", b"\0", b"\r\n\r\n", b" ", b'"', b"{", b"%00", b"\xff")
            )
        else:
            del changed[at:]
    return bytes(changed)


HEADERS = (
    *(
        "transfer-encoding: chunked\r\n",
        "content-length: 5\r\n",
        "expect: 100-continue\r\n",
        "x: " + "y" * 9000,
    ),
    *(
        "upgrade: websocket\r\n",
        "content-encoding: gzip\r\n",
        "host: elsewhere\r\n",
        "accept: \xff\r\n",
        " x: y\r\n",
    ),
    *(
        "origin: http://evil\r\n",
        "range: bytes=0-\r\n",
        "connection: keep-alive\r\n",
        "x-request-id: \t\r\n",
        "",
    ),
)


def mutated_request(random: random.Random) -> bytes:
    path = random.choice((*BODIES, *BODIES, *READS))
    method = "POST" if path in BODIES else "GET"
    body = BODIES.get(path)
    if body is not None:
        for _ in range(random.randrange(3)):
            body = mutate_value(body, random)
    content = b"" if body is None else json.dumps(body).encode()
    if random.random() < 0.1:
        content = mutate_bytes(content, random)
    if random.random() < 0.1:
        path = mutate_bytes(path.encode(), random).decode("latin-1").replace(" ", "").replace("\n", "")
    headers = random.choice(HEADERS) if random.random() < 0.2 else ""
    if random.random() < 0.05:
        method = random.choice(("HEAD", "PUT", "OPTIONS", "DELETE", "G\0T", "CONNECT", "x" * 500))
    whole = _head(path, content, method, headers)
    return mutate_bytes(whole, random) if random.random() < 0.4 else whole


def _head(path: str, content: bytes, method: str, headers: str) -> bytes:
    try:
        return request(path, content, method=method, host=HOST, headers=headers)
    except UnicodeEncodeError:
        return request("/health", content, method="GET", host=HOST)


def answer_of(port: int, content: bytes) -> bytes:
    """All that comes back before the connection ends, which the client ends after what it has sent."""
    with socket.create_connection((HOST, port), TIMEOUT_S) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
        return b"".join(read_all(sock))


def storm(
    server: Started, count: int, new_request: Callable[[random.Random], bytes] = mutated_request
) -> None:
    port = int(server.wait_for(r"http://127\.0\.0\.1:(\d+)")[1])
    process = psutil.Process(server.pid)
    chat = request(
        "/v1/chat/completions",
        json.dumps({"messages": [USER], "max_tokens": 4, "temperature": 0}).encode(),
        host=HOST,
    )

    def text() -> str:
        status, body = ask_port(port, chat)
        assert status == 200
        return str(json.loads(body)["choices"][0]["message"]["content"])

    def attack(seed: int) -> None:
        content = new_request(random.Random(seed))
        try:
            answer = answer_of(port, content)
        except TimeoutError:
            pytest.fail(f"seed {seed} hangs: {content[:2000]!r}")
        assert not answer.startswith((b"HTTP/1.1 500", b"HTTP/1.1 502")), (
            f"seed {seed}: {answer!r} to {content!r}"
        )
        assert b"internal_error" not in answer, f"seed {seed}: {answer!r} to {content!r}"

    expected = text()
    for seed in range(200):
        attack(seed)
    memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    with ThreadPoolExecutor(AT_ONCE) as crowd:
        for _ in crowd.map(attack, range(200, count)):
            pass
    assert text() == expected
    metrics = ask_port(port, request("/metrics", method="GET", host=HOST))[1]
    assert b"Traceback" not in "\n".join(server.lines).encode()
    assert process.num_fds() <= files + SPARE_FILES
    assert process.num_threads() <= threads + SPARE_FILES
    assert process.memory_info().rss <= memory + GROWTH_BYTES
    running = [
        line for line in metrics.decode().splitlines() if "num_requests_running" in line and line[:1] != "#"
    ]
    assert running
    assert all(line.endswith((" 0", " 0.0")) for line in running)


@pytest.mark.ci
@pytest.mark.timeout(280)
def test_mutated_requests(server: Started) -> None:
    storm(server, 1000)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_mutated_requests(server: Started) -> None:
    storm(server, 10_000)

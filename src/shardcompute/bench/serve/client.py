"""HTTP clients of `bench serve`, several streams in a process of their own: as little work per chunk as can be.

A command comes as a line of JSON on standard input, its answer goes out as one. Chunks are kept with the time at which
they came, and read when all streams are over.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

_END = b"\r\n\r\n"


async def _stream(host: str, port: int, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed answer: when its pieces came, and its text and counts."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    started = time.perf_counter()
    wall = time.time()
    writer.write(head.encode() + content)
    pieces: list[tuple[float, bytes]] = []
    while piece := await reader.read(1 << 16):
        pieces.append((time.perf_counter() - started, piece))
    writer.close()
    return {"began": wall, **_read(pieces)}


def _read(pieces: list[tuple[float, bytes]]) -> dict[str, Any]:
    """What the pieces of a response say. The tokens of a chunk are taken to have come with the piece that ends it."""
    arrivals: list[float] = []
    text, rest, tokens, error = "", b"", 0, ""
    timings: dict[str, Any] = {}
    for at, piece in pieces:
        rest += piece
        *lines, rest = rest.split(b"\n")
        for line in lines:
            start = line.find(b"data: {")
            if start < 0:
                continue
            chunk = json.loads(line[start + 6 :])
            if "error" in chunk:
                error = json.dumps(chunk["error"])
            for choice in chunk.get("choices", ()):
                text += choice["text"]
                arrivals.append(at)
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            timings = chunk.get("timings") or timings
    if not arrivals and not error:
        error = b"".join(piece for _, piece in pieces)[:300].decode(errors="replace")
    return {"arrivals": arrivals, "text": text, "tokens": tokens, "timings": timings, "error": error}


async def _streams(command: dict[str, Any]) -> list[dict[str, Any]]:
    url = urlsplit(command["url"])
    host, port = url.hostname or "127.0.0.1", url.port or 80
    bodies = [{**command["body"], "prompt": prompt} for prompt in command["prompts"]]
    return await asyncio.gather(*(_stream(host, port, body) for body in bodies))


def main() -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_streams(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()

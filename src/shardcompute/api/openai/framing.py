"""SSE framing of OpenAI's streams: events without names and `[DONE]` for completions, named ones for responses."""

from __future__ import annotations

import json

from shardcompute.api.body import AnyReply
from shardcompute.api.errors import error_body
from shardcompute.api.openai.responses_schemas import ResponseEvent
from shardcompute.api.sse import MEDIA_TYPE, PING, event


class CompletionsFraming:
    """Of chat and plain completions: `data: {…}`, `data: {"error": …}`, and `data: [DONE]` at the end."""

    media_type = MEDIA_TYPE
    ping = PING
    ending = event(b"[DONE]")

    def write(self, chunk: AnyReply) -> bytes:
        return event(chunk.to_json())

    def write_error(self, error: Exception, request_id: str) -> bytes:
        return event(json.dumps(error_body(error, request_id=request_id)).encode())


class ResponsesFraming:
    """Numbered events with names, and nothing at the end."""

    media_type = MEDIA_TYPE
    ping = PING
    ending = b""

    def __init__(self) -> None:
        self._sent = 0

    def write(self, chunk: AnyReply) -> bytes:
        assert isinstance(chunk, ResponseEvent)
        self._sent = chunk.sequence_number + 1
        return event(chunk.to_json(), chunk.type)

    def write_error(self, error: Exception, request_id: str) -> bytes:
        told = error_body(error, request_id=request_id)["error"]
        body = {
            "type": "error",
            "sequence_number": self._sent,
            "code": told["code"] or told["type"],
            "message": told["message"],
            "param": told["param"],
        }
        return event(json.dumps(body).encode(), "error")

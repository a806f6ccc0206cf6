"""HTTP errors as clients see them: OpenAI's body `{"error": {message, type, param, code}}` and an HTTP status.

Under the paths of other protocols the same error has their shape (see `shape_error`).

`RequestError` is for what only HTTP knows (which parameter, which status); everything else comes from the
tree in `core.errors` and is translated here, once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from shardcompute.core.errors import (
    CapacityError,
    NotLeadingError,
    PromptTooLongError,
    QueueFullError,
    ShardComputeError,
    UnknownModelError,
    UsageError,
    WouldReplaceError,
)

RETRY_AFTER_S = 1
MESSAGES_PATH = "/v1/messages"
OLLAMA_PATH = "/api"
_CODES: tuple[tuple[type[ShardComputeError], str], ...] = (
    (PromptTooLongError, "context_length_exceeded"),
    (UnknownModelError, "model_not_found"),
    (QueueFullError, "rate_limit_exceeded"),
    (CapacityError, "overloaded"),
    (WouldReplaceError, "would_replace"),
    (NotLeadingError, "not_leading"),
)
_UNION_BRANCHES = frozenset({"str", "int", "float", "bool", "none"})
_MESSAGES_SHOWN = 4
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class RequestError(UsageError):
    """A request that is wrong in a way only HTTP can name: the parameter, the status, the code."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.code = code
        self.status = status
        self.headers = dict(headers or {})


def unsupported(param: str, message: str, *, hint: str = "leave it out") -> RequestError:
    """The refusal of a parameter that we know and do not honour."""
    return RequestError(message, hint=hint, param=param, code="unsupported_parameter")


def status_of(error: BaseException) -> int:
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, ShardComputeError):
        return error.http_status
    if isinstance(error, HTTPException):
        return error.status_code
    return 500


def error_body(error: BaseException, *, request_id: str = "") -> dict[str, Any]:
    """OpenAI's error body. What we did not foresee tells the client only the id to look up in the log."""
    status = status_of(error)
    param = code = None
    if isinstance(error, ShardComputeError):
        message = str(error)
        code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
        if isinstance(error, RequestError):
            param, code = error.param, error.code
        elif isinstance(error, UnknownModelError):
            param = "model"
    elif isinstance(error, HTTPException):
        message = error.detail
        code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    else:
        message = f"The server failed to answer this request; its log names it {request_id}."
        code = "internal_error"
    return {"error": {"message": message, "type": _type_of(status), "param": param, "code": code}}


def shape_error(error: BaseException, *, request_id: str = "", path: str = "") -> dict[str, Any]:
    """The body as who asks under this path expects it: Anthropic's, Ollama's or, everywhere else, OpenAI's."""
    body = error_body(error, request_id=request_id)
    if is_under(path, MESSAGES_PATH):
        kind = _ANTHROPIC_TYPES.get(status_of(error), body["error"]["type"])
        kind = "api_error" if kind == "server_error" else kind
        detail = {"type": kind, "message": body["error"]["message"]}
        return {"type": "error", "error": detail, "request_id": request_id or None}
    if is_under(path, OLLAMA_PATH):
        return {"error": body["error"]["message"]}
    return body


def is_under(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}/")


def error_response(error: BaseException, *, request_id: str = "", path: str = "") -> JSONResponse:
    """The whole answer to a request that failed before its first byte."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if isinstance(error, RequestError | HTTPException):
        headers |= dict(error.headers or {})
    if status in (429, 503):
        headers.setdefault("retry-after", str(RETRY_AFTER_S))
    body = shape_error(error, request_id=request_id, path=path)
    return JSONResponse(body, status_code=status, headers=headers)


def from_validation(error: ValidationError) -> RequestError:
    """The first thing wrong with a body, told with the name of the parameter."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not JSON: {first['msg']}.", code="invalid_json")
    param = _parameter(first["loc"])
    reasons = [problem["msg"] for problem in problems if problem["loc"][:1] == first["loc"][:1]]
    reason = ", or: ".join(dict.fromkeys(reasons[:_MESSAGES_SHOWN]))
    message = f"{param}: {reason}." if param else f"{reason}."
    return RequestError(message, param=param or None, code="invalid_value")


def _parameter(location: Sequence[int | str]) -> str:
    """`messages[0].content` from pydantic's location, without the names it gives to branches of unions."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_BRANCHES or not re.fullmatch(r"[a-z_][a-z0-9_]*", part):
            break
        else:
            path += f".{part}" if path else part
    return path


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"

"""OpenAPI 3.1 description of the API, generated from the routes and the types of what goes in and out."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import ErrorReply

BODY_ERRORS = (400, 404, 408, 413, 415, 503)
GENERATION_ERRORS = (400, 404, 408, 413, 415, 429, 500, 503)
_BYTES = "application/octet-stream"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One route: where it is, what runs, and what goes in and out."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    run: Callable[[Request], Awaitable[Response]]
    summary: str
    needs: Access = field(kw_only=True)
    """What is asked of the caller, checked before `run`."""
    body: type[BaseModel] | None = None
    reply: Any = None
    """The type of what is answered: a model, or a dataclass or union that something else than pydantic writes."""
    chunk: Any = None
    """That of each event of a stream, where the endpoint can stream."""
    chunk_type: str = "text/event-stream"
    error: type[BaseModel] = ErrorReply
    statuses: tuple[int, ...] = ()
    """Errors to expect, besides those of access."""
    counts: tuple[str, ...] = ()
    """Whole numbers that the query may have."""
    takes_bytes: bool = False
    """The body is no JSON but bytes, and so is, where it `has_bytes`, the answer."""
    has_bytes: bool = False
    audit: str = ""
    """What the audit log calls it, where it changes something."""

    @property
    def public_path(self) -> str:
        """The path without Starlette's converters: `{model:path}` is `{model}`."""
        return self.path.replace(":path}", "}")


def describe(endpoints: Sequence[ApiRoute], *, version: str, has_keys: bool) -> dict[str, Any]:
    """The OpenAPI document; `has_keys` says that requests need a bearer key."""
    kinds: list[tuple[Any, JsonSchemaMode]] = []
    for endpoint in endpoints:
        answers = (endpoint.error, endpoint.reply, endpoint.chunk)
        kinds += [(endpoint.body, "validation"), *((kind, "serialization") for kind in answers)]
    used = [(kind, mode) for kind, mode in dict.fromkeys(kinds) if kind is not None]
    refs, definitions = TypeAdapter.json_schemas(
        [(kind, mode, TypeAdapter(kind)) for kind, mode in used], ref_template=_REF
    )
    schemas = {kind: refs[kind, mode] for kind, mode in used}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operations = paths.setdefault(endpoint.public_path, {})
        operations[endpoint.method.lower()] = _operation(endpoint, schemas)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "ShardCompute", "version": version},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(endpoint: ApiRoute, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.has_bytes:
        content[_BYTES] = _BINARY
    elif endpoint.reply is not None:
        content["application/json"] = {"schema": schemas[endpoint.reply]}
    elif endpoint.chunk is None:
        content["text/plain"] = {"schema": {"type": "string"}}
    if endpoint.chunk is not None:
        # No `schema`: readers disagree whether it would describe the whole stream or one event of it.
        content[endpoint.chunk_type] = {"x-event-schema": schemas[endpoint.chunk]}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    error = {"description": "An error.", "content": {"application/json": {"schema": schemas[endpoint.error]}}}
    access = () if endpoint.needs is Access.OPEN else (401, 403)
    responses |= {str(status): error for status in sorted({*access, *endpoint.statuses})}
    operation: dict[str, Any] = {
        "operationId": getattr(endpoint.run, "__name__", endpoint.path),
        "summary": endpoint.summary,
        "x-access": endpoint.needs.value,
        "responses": responses,
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", endpoint.public_path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 2**48}}
        for name in endpoint.counts
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        schema = {"application/json": {"schema": schemas[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": schema}
    elif endpoint.takes_bytes:
        operation["requestBody"] = {"required": True, "content": {_BYTES: _BINARY}}
    return operation

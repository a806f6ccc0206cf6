"""Application state: what every endpoint works with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata

from starlette.requests import Request

from shardcompute.api.body import Limits
from shardcompute.api.images.fetching import ImageFetcher
from shardcompute.api.metrics.collector import GenerationMetrics
from shardcompute.node.service import Service
from shardcompute.security.api_keys import KeySummary


@dataclass(frozen=True, slots=True)
class ApiContext:
    service: Service
    limits: Limits = field(default_factory=Limits)
    images: ImageFetcher = field(default_factory=ImageFetcher)
    """How images are fetched that requests name by URL."""
    metrics: GenerationMetrics = field(default_factory=GenerationMetrics)
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time

    @property
    def chat_limits(self) -> Limits:
        """Of bodies that may have images, where a model could see them."""
        if all(model.vision is None for model in self.service.models()):
            return self.limits
        return replace(self.limits, max_body_bytes=self.limits.max_image_body_bytes)


def context_of(request: Request) -> ApiContext:
    """With the service as the caller may see it."""
    context: ApiContext = request.app.state.context
    service: Service | None = request.scope.get("shardcompute.service")
    return context if service is None else replace(context, service=service)


def request_id_of(request: Request) -> str:
    request_id: str = request.scope["shardcompute.request_id"]
    return request_id


def caller_of(request: Request) -> KeySummary:
    """Whose key the request was let in with; with an empty id where none was asked for."""
    caller: KeySummary = request.scope["shardcompute.caller"]
    return caller


def tell_audit(request: Request, target: str, **detail: object) -> None:
    """What the audit log says of this request: what it changes, without any secret. None is left out."""
    told = {name: value for name, value in detail.items() if value is not None}
    request.scope["shardcompute.audit"] = (target, told)


@cache
def package_version() -> str:
    return metadata.version("shardcompute")

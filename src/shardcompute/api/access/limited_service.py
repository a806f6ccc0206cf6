"""Limited service: what a key with limits sees of a service, its own models, and as many tokens as it has left."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from shardcompute.api.access.metering import KeyMeter
from shardcompute.core.errors import CapacityError, ShardComputeError, UnknownModelError
from shardcompute.core.generation import Delta, GenerationRequest
from shardcompute.node.service import ServedModel, Service, ServiceLoad, TextCodec
from shardcompute.security.api_keys import KeySummary


class LimitedService:
    """A `Service` for one caller. Models that are not theirs do not exist."""

    def __init__(self, service: Service, caller: KeySummary, meter: KeyMeter) -> None:
        self._service = service
        self._caller = caller
        self._meter = meter

    def models(self) -> Sequence[ServedModel]:
        return [model for model in self._service.models() if self._has(model.name)]

    def codec(self, model: str) -> TextCodec:
        self._check(model)
        return self._service.codec(model)

    def is_ready(self) -> bool:
        return self._service.is_ready()

    def obstacle(self) -> CapacityError | None:
        return self._service.obstacle()

    def load(self) -> ServiceLoad:
        return self._service.load()

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """As the service does; an answer for which not enough tokens are left ends earlier, with `length`."""
        self._check(model)
        prompt = len(request.prompt)
        hold = await self._meter.hold(self._caller, prompt, request.max_tokens)
        used = prompt
        deltas = self._service.generate(model, replace(request, max_tokens=hold.answer))
        try:
            async for delta in deltas:
                used += len(delta.tokens)
                yield delta
        except ShardComputeError:
            # What was refused, or broke, before its first token cost nothing.
            used = 0 if used == prompt else used
            raise
        finally:
            hold.settle(used)
            close = getattr(deltas, "aclose", None)
            if close is not None:
                await close()

    def _has(self, model: str) -> bool:
        models = self._caller.limits.models
        return models is None or model in models

    def _check(self, model: str) -> None:
        if not self._has(model):
            names = ", ".join(each.name for each in self.models())
            raise UnknownModelError(f"The model {model!r} is not served here.", hint=f"served here: {names}")

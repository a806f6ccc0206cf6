"""What the API needs of whatever serves a model, be it one process or a swarm."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shardcompute.core.errors import CapacityError
from shardcompute.core.generation import Delta, GenerationRequest
from shardcompute.models.spec import VisionSpec
from shardcompute.models.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it."""

    name: str
    context_length: int
    created_s: int
    digest: str
    """SHA-256, in hexadecimal, of what tells its weights from others."""
    size_bytes: int
    """Of the model's files."""
    base: str = ""
    """The model that this one is with an adapter; "": it is none of that kind."""
    vision: VisionSpec | None = None
    """How it sees; None: it takes text alone."""


def with_adapters(models: Iterable[tuple[ServedModel, Sequence[str]]]) -> list[ServedModel]:
    """Models, each followed by what it is with its adapters: models of their own to clients, named `model:adapter`."""
    return [
        each
        for model, adapters in models
        for each in (
            model,
            *(replace(model, name=f"{model.name}:{adapter}", base=model.name) for adapter in adapters),
        )
    ]


@dataclass(frozen=True, slots=True)
class HopTraffic:
    """Activations sent from one node to the next since the start, in one form."""

    sender: str
    receiver: str
    codec: str
    frames: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage of a chain did for this service since the start."""

    chain: str
    node: str
    steps: int
    queue_s: float
    compute_s: float
    codec_s: float
    exchange_s: float = 0.0
    """Of `compute_s`, what its ranks were exchanging, or waiting for each other."""
    slowest: str = ""
    """The rank for which the others have waited most of late."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """How many tokens a chain remembers for this service, and how many it may."""

    chain: str
    used_tokens: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """How busy a service is, and what has gone over its links."""

    running: int
    waiting: int
    kv_used_fraction: float
    traffic: Sequence[HopTraffic] = ()
    routers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By chain, what the router of its driver knows (see `decoding.routing.router`)."""
    stages: Sequence[StageWork] = ()
    kv: Sequence[KvUse] = ()


class TextCodec(Protocol):
    """The model's tokenizer, as far as the API uses it."""

    eos_ids: frozenset[int]

    def encode(self, text: str, *, add_special: bool = True, context_length: int | None = None) -> list[int]:
        """With a `context_length`, PromptTooLongError for text far beyond it, before much time is spent on it."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that this token stands for."""
        ...

    def vocabulary(self) -> Vocabulary:
        """The bytes of all tokens, which grammars need; always the same object."""
        ...

    def chat_template_source(self, *, has_tools: bool = False) -> str | None:
        """The text of the model's chat template, None without one."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template applied; UsageError when there is none or it refuses the messages. `variables` are the
        request's own, such as `enable_thinking`."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, context_length: int | None = None, **options: Any
    ) -> list[int]:
        """`render_chat`, then `encode_rendered`."""
        ...

    def encode_rendered(self, rendered: str, *, context_length: int | None = None) -> list[int]:
        """`encode` of what a chat template has written, without doubling special tokens."""
        ...


class Service(Protocol):
    """Serves one or more models. Methods are called from one event loop."""

    def models(self) -> Sequence[ServedModel]: ...

    def codec(self, model: str) -> TextCodec:
        """UnknownModelError when `model` is not served."""
        ...

    def is_ready(self) -> bool: ...

    def obstacle(self) -> CapacityError | None:
        """Why requests are not taken yet, and what to do about it; None once they are."""
        ...

    def load(self) -> ServiceLoad: ...

    def generate(self, model: str, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas until one has a `finish`. Closing the iterator cancels the generation and frees its memory.

        Raises before the first delta: UnknownModelError, PromptTooLongError, QueueFullError, CapacityError.
        """
        ...

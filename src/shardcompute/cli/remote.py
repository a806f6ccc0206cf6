"""A model that a server answers for, with the face that conversations know from a model in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from shardcompute.core.errors import CapacityError, UnknownModelError

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient
    from shardcompute.core.generation import Delta, GenerationRequest
    from shardcompute.node.local_service import LocalService


@dataclass(frozen=True, slots=True)
class RemoteTokenizer:
    """The server's tokenizer. Whether there is a chat template, the server says when it is asked to chat."""

    client: ClusterClient
    model: str
    has_chat_template: bool = True
    eos_ids: frozenset[int] = frozenset()
    """The server ends answers by itself."""

    def encode(self, text: str) -> list[int]:
        return self.client.tokenize(text, model=self.model)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.client.tokenize_chat(messages, model=self.model)


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """As much of `node.local_service.LocalService` as conversations use."""

    client: ClusterClient
    name: str

    @property
    def tokenizer(self) -> RemoteTokenizer:
        return RemoteTokenizer(self.client, self.name)

    def stream(self, request: GenerationRequest) -> Iterator[Delta]:
        return self.client.generate(self.name, request)

    def as_service(self) -> LocalService:
        return cast("LocalService", self)


def choose_model(client: ClusterClient, wanted: str) -> RemoteModel:
    """The model of this name, or the first one where none is wanted. UnknownModelError if it is not served."""
    served = client.models()
    if not served:
        raise CapacityError("the cluster serves no model yet", hint="shardcompute load MODEL adds one")
    if wanted and wanted not in served:
        raise UnknownModelError(f"{wanted} is not served there", hint=f"served there: {', '.join(served)}")
    return RemoteModel(client, wanted or served[0])

"""Remote model: a server answers for it, with the interface that conversations know from a model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.core.errors import CapacityError, UnknownModelError, UsageError
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient
    from shardcompute.core.generation import Delta, GenerationRequest
    from shardcompute.node.local.service import LocalService


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
    """As much of `node.local.service.LocalService` as conversations use. Closing it closes the client."""

    client: ClusterClient
    name: str

    @property
    def tokenizer(self) -> RemoteTokenizer:
        return RemoteTokenizer(self.client, self.name)

    def stream(self, request: GenerationRequest) -> Iterator[Delta]:
        return self.client.generate(self.name, request)

    def stream_chat(
        self, request: GenerationRequest, messages: Sequence[Mapping[str, Any]]
    ) -> Iterator[Delta]:
        """The answer to messages that the server makes the prompt of, drawn as the request says."""
        return self.client.generate(self.name, request, messages)

    def as_service(self) -> LocalService:
        return cast("LocalService", self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def find_server(service: object) -> RemoteModel | None:
    """The model that answers, where a server does."""
    return service if isinstance(service, RemoteModel) else None


def choose_model(client: ClusterClient, wanted: str) -> RemoteModel:
    """The model of this name, or the first one where none is wanted. UnknownModelError if it is not served."""
    served = client.models()
    if not served:
        raise CapacityError("the cluster serves no model yet", hint="shardcompute load MODEL adds one")
    if wanted and wanted not in served:
        raise UnknownModelError(f"{wanted} is not served there", hint=f"served there: {', '.join(served)}")
    return RemoteModel(client, wanted or served[0])


def find_remote(
    reference: str,
    *,
    is_local: bool,
    has_engine: bool,
    url: str | None,
    api_key_file: Path | None,
    tls_pin: str | None,
    say: Callable[[str], None],
) -> RemoteModel | None:
    """The model as the cluster at `url`, or on this machine, serves it; None where this process must answer.

    `has_engine`: the user said how this process shall compute, which means that it shall.
    """
    if is_local or has_engine:
        if url is not None:
            raise UsageError(
                "--url asks a server; --local and engine options are for answers in this process",
                hint="leave out one or the other",
            )
        return None
    address = ClusterLocation(url, api_key_file, tls_pin=tls_pin).find()
    if address is None:
        return None
    client = address.connect()
    try:
        return choose_model(client, _served_name(client, reference))
    except (CapacityError, UnknownModelError) as error:
        client.close()
        if url is not None:
            raise
        say(f"{error.message}; answering in this process")
        return None
    except BaseException:
        client.close()
        raise


def _served_name(client: ClusterClient, reference: str) -> str:
    """A served model's own name, or what a model is called once it is served."""
    from shardcompute.node.admin.downloads import served_name

    if not reference or reference in client.models():
        return reference
    return served_name(parse_reference(reference))

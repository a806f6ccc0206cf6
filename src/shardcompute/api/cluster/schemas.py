"""Request schemas of the cluster's routes. Replies are `node.admin.views`, written by msgspec."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from shardcompute.api.body import ReplyBody
from shardcompute.node.admin.catalogue import CatalogueEntry
from shardcompute.node.admin.views import (
    ClusterChange,
    ClusterView,
    FetchView,
    KeyView,
    NewKey,
    NewToken,
    NodeView,
    PlanView,
    TokenView,
)
from shardcompute.node.telemetry.request_log import RequestView
from shardcompute.node.telemetry.usage import UsageReport

Form = Literal["native", "float32", "int8", "int4", "mixed"]


class ClusterRequest(BaseModel):
    """Strict, and closed: a misspelt field must not quietly do something else."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class EmptyRequest(ClusterRequest):
    """`{}`: asking for JSON keeps web pages from posting here without a CORS preflight."""


class LoadModelRequest(ClusterRequest):
    """For planning and loading alike."""

    model: str = Field(max_length=4096, description="smollm2, a folder, a .gguf file or org/repo.")
    form: Form = Field("native", description="The form of the weights in memory.")
    chains: int = Field(1, ge=1, le=64, description="Copies of the model, each on machines of its own.")


class PullModelRequest(ClusterRequest):
    model: str = Field(max_length=4096, description="smollm2 or org/repo.")


class CreateTokenRequest(ClusterRequest):
    expires_s: Annotated[int | float, Field(gt=0)] = Field(
        86_400, description="Seconds from now; at most 366 days."
    )
    max_uses: int | None = Field(None, ge=1, lt=2**31, description="Machines that may join with it.")
    role: Literal["worker", "driver"] | None = Field(
        None, description="As what they may join; null: as either."
    )


class CreateKeyRequest(ClusterRequest):
    label: str = Field("", max_length=80, description="What the key is for.")


class StateReply(RootModel[ClusterView]):
    """A cluster at one moment."""


class ClusterEvent(RootModel[ClusterView | ClusterChange]):
    """`state` events hold a whole view, `change` events what differs from what was told before."""


class PlanReply(RootModel[PlanView]):
    """A dry run."""


class FetchReply(RootModel[FetchView]):
    """An order that is being carried out; the state says how far it has come."""


class NodeReply(RootModel[NodeView]):
    """The node as it was when it was asked."""


class NewTokenReply(RootModel[NewToken]):
    """A join token, told this once."""


class NewKeyReply(RootModel[NewKey]):
    """An API key, told this once."""


class UsageReply(RootModel[UsageReport]):
    """Spans in which nothing was used are left out."""


class RequestList(ReplyBody):
    data: tuple[RequestView, ...]
    ended: int
    """How many have ended so far; asked with `after` this number, only later ones are told."""


class CatalogueList(ReplyBody):
    data: tuple[CatalogueEntry, ...]


class TokenList(ReplyBody):
    data: tuple[TokenView, ...]


class KeyList(ReplyBody):
    data: tuple[KeyView, ...]


class Deleted(ReplyBody):
    id: str
    deleted: Literal[True]

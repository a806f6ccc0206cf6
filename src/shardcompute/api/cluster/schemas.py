"""Request schemas of the cluster's routes. Replies are `node.admin.views`, written by msgspec."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardcompute.api.body import ReplyBody
from shardcompute.control.cost.what_if import ImaginedMachines
from shardcompute.core.kv_types import KvType
from shardcompute.node.admin.catalogue import CatalogueEntry
from shardcompute.node.admin.views import (
    KeyView,
    TokenView,
)
from shardcompute.node.telemetry.request_log import RequestView

Form = Literal["native", "float32", "int8", "int4", "mixed"]


class ClusterRequest(BaseModel):
    """Strict, and closed: a misspelt field must not quietly do something else."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class EmptyRequest(ClusterRequest):
    """`{}`: asking for JSON keeps web pages from posting here without a CORS preflight."""


class KeepLayoutRequest(ClusterRequest):
    keep: bool
    """Whether layouts are to stay as they are."""


AdapterName = Annotated[str, Field(max_length=64)]
AdapterFolder = Annotated[str, Field(max_length=4096)]


class LoadModelRequest(ClusterRequest):
    """For planning and loading alike."""

    model: str = Field(max_length=4096, description="smollm2, a folder, a .gguf file or org/repo.")
    form: Form = Field("native", description="The form of the weights in memory.")
    chains: int = Field(1, ge=1, le=64, description="Copies of the model, each on machines of its own.")
    kv_type: KvType | None = Field(
        None,
        description="What CPUs round keys and values to; null: as the model is served, else what the cluster was "
        "started with.",
    )
    parallel: str | None = Field(
        None,
        max_length=64,
        description="How to cut it: auto, or tp=2,pp=3 or a part of that (tp=2:reduce); null: as was asked for before, "
        "else stages, as many as pay.",
    )


class WhatIfRequest(ClusterRequest):
    count: int = Field(1, ge=1, le=64, description="So many machines that are not there.")
    memory_bytes: int = Field(gt=0, le=1 << 50, description="What each of them offers.")
    bytes_per_s: float | None = Field(
        None,
        gt=1.0,
        le=1e15,
        description="How much of weights each reads; null: as the cluster's middle one.",
    )

    def machines(self) -> ImaginedMachines:
        return ImaginedMachines(self.count, self.memory_bytes, self.bytes_per_s)


class PlanModelRequest(LoadModelRequest):
    price_kwh: float | None = Field(
        None, ge=0, le=1e6, description="What a kilowatt-hour costs; null: what the cluster was started with."
    )
    what_if: WhatIfRequest | None = Field(
        None, description="Machines that are not there: what would they bring?"
    )


class ServeModelRequest(LoadModelRequest):
    replace: bool = Field(
        False,
        description="Whether models that are served may give way to it, after the answers that run; else 409 where "
        "they would have to.",
    )
    via_coordinator: bool = Field(
        False,
        description="Whether a model of the hub is fetched to the coordinator's disk and sent to workers from there; "
        "else each worker reads its own part from the hub.",
    )
    adapters: dict[AdapterName, AdapterFolder] = Field(
        {},
        max_length=64,
        description="PEFT LoRA folders on the coordinator's machine to keep beside the model, by name, besides those "
        "that it has; requests choose one as model:name.",
    )


class PullModelRequest(ClusterRequest):
    model: str = Field(max_length=4096, description="smollm2 or org/repo.")


class CreateTokenRequest(ClusterRequest):
    expires_s: Annotated[int | float, Field(gt=0)] = Field(
        86_400, description="Seconds from now; at most 366 days."
    )
    max_uses: int | None = Field(
        8, ge=1, lt=2**31, description="Machines that may join with it; null: any number."
    )
    role: Literal["worker", "driver"] | None = Field(
        None, description="As what they may join; null: as either."
    )
    origin: str | None = Field(
        None,
        max_length=300,
        description="Where the page is, such as http://10.0.0.5:8000: the reply then has a link, and its QR code.",
    )


class CreateKeyRequest(ClusterRequest):
    label: str = Field("", max_length=80, description="What the key is for.")
    role: Literal["use", "observe", "operate"] = Field(
        "use", description="use: ask models; observe: see the cluster, too; operate: everything."
    )
    models: tuple[str, ...] | None = Field(
        None,
        description="For role use: the models that it may ask, as `GET /v1/models` names them; null: all.",
    )
    requests_per_minute: int | None = Field(None, ge=1, description="For role use.")
    tokens_per_day: int | None = Field(
        None, ge=1, description="For role use: of prompts and answers together, from 00:00 to 24:00 UTC."
    )
    expires_s: Annotated[int | float, Field(gt=0)] | None = Field(
        None, description="Seconds from now; null: good until it is revoked."
    )


class SignInRequest(ClusterRequest):
    code: str = Field(max_length=200, description="As the link has it behind `#/sign-in/`.")


class SessionKey(ReplyBody):
    key: str


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

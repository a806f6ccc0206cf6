"""Routes of fine-tuning runs: their drivers tell how they go, and pages show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import read_body
from shardcompute.api.cluster.schemas import ClusterRequest
from shardcompute.api.context import context_of
from shardcompute.api.openapi import ApiRoute
from shardcompute.core.fields import shorten
from shardcompute.node.finetuning.curves import MOST_POINTS, CurveStep, RunCurve, RunReport

if TYPE_CHECKING:
    from shardcompute.node.finetuning.curves import CurveBoard

_MOST_STEPS = 1 << 40


class ToldStep(ClusterRequest):
    """One step: its loss, the norm of its gradients, and tokens a second."""

    step: int = Field(ge=1, le=_MOST_STEPS)
    loss: float
    norm: float = Field(ge=0)
    tokens_per_s: float = Field(ge=0)
    held_out: float | None = None


class ToldRun(ClusterRequest):
    """How a run goes: its steps since it told something last."""

    id: str = Field(min_length=1, max_length=64, pattern="^[0-9a-z-]+$")
    model: str = Field(max_length=512)
    steps: int = Field(ge=1, le=_MOST_STEPS)
    workers: int = Field(ge=0, le=1 << 16)
    points: list[ToldStep] = Field(fail_fast=True, max_length=MOST_POINTS)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class RunCurves:
    """Of the last few runs, the newest first."""

    data: list[RunCurve]


async def tell_run(request: Request) -> Response:
    told = await read_body(request, ToldRun, context_of(request).limits)
    points = sorted((CurveStep(**point.model_dump()) for point in told.points), key=lambda each: each.step)
    report = RunReport(
        told.id, shorten(told.model, 512), told.steps, told.workers, tuple(points), told.is_over
    )
    _board(request).tell(report)
    return _reply(RunCurves([]))


async def list_runs(request: Request) -> Response:
    return _reply(RunCurves(_board(request).curves()))


def _board(request: Request) -> CurveBoard:
    board: CurveBoard = request.app.state.admin.finetuning
    return board


def _reply(view: RunCurves) -> Response:
    return Response(msgspec.json.encode(view), media_type="application/json")


FINETUNING_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET",
        "/cluster/finetuning",
        list_runs,
        "Loss, gradient norm and speed of the last fine-tuning runs.",
        needs=Access.OBSERVE,
        reply=RunCurves,
        statuses=(403,),
    ),
    ApiRoute(
        "POST",
        "/cluster/finetuning",
        tell_run,
        "Tell how a fine-tuning run goes.",
        needs=Access.OPERATE,
        body=ToldRun,
        reply=RunCurves,
        statuses=(400, 403, 413, 415),
    ),
)

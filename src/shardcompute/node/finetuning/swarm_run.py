"""A run through a cluster: a crew of its workers, and a new one from the last checkpoint whenever one is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardcompute.core.errors import BackendError, CapacityError, LinkError, SourceError
from shardcompute.finetune.pipeline import LearningPipeline
from shardcompute.finetune.preparation import PreparedRun
from shardcompute.finetune.training import CurvePoint, OnStep, RunCadence, Taught, teach
from shardcompute.node.finetuning.crew import Crew, RunOrder
from shardcompute.node.finetuning.swarm_pipeline import SwarmPipeline
from shardcompute.node.rpc.commands import Peer
from shardcompute.wire import Link

log = logging.getLogger(__name__)
_MOST_LOSSES = 12
"""One behind the other, without a step in between."""
_PAUSE_S = 2.0
_LONGEST_PAUSES = 5
"""Pauses grow up to so many: a coordinator that is started again takes a while."""


@dataclass(frozen=True, slots=True)
class SwarmTaught:
    """What came of a run, what went between its stages, and how often it has begun again. `idle_shares` are those of
    the last crew's workers, `optimizer_bytes` what each of them kept of the optimiser."""

    taught: Taught
    wire_bytes: int
    losses: int
    idle_shares: tuple[float, ...] = ()
    optimizer_bytes: tuple[int, ...] = ()


class CrewPipeline(LearningPipeline, Protocol):
    """A pipeline that knows how much went between its stages."""

    @property
    def wire_bytes(self) -> int: ...


OpenPipeline = Callable[[Crew, Sequence[Peer]], AbstractContextManager[CrewPipeline]]


def teach_in_swarm(
    dial: Callable[[Peer], Link],
    find_workers: Callable[[], Sequence[Peer]],
    order: RunOrder,
    prepared: PreparedRun,
    resume: Path,
    digest: str,
    loop: RunCadence,
    *,
    on_step: OnStep = lambda _point, _seconds: None,
    say: Callable[[str], None] = lambda _: None,
    open_pipeline: OpenPipeline | None = None,
    pause_s: float = _PAUSE_S,
) -> SwarmTaught:
    """Run it over whatever workers `find_workers` names at the time; the fewest of them is one. `open_pipeline` puts
    a crew's stages between others, where some are kept elsewhere."""
    losses = failures = wire_bytes = 0

    def note(point: CurvePoint, seconds: float) -> None:
        nonlocal failures
        failures = 0
        on_step(point, seconds)

    while True:
        pipeline: CrewPipeline | None = None
        try:
            workers = _ask_for_workers(find_workers)
            with Crew(dial, workers, order) as crew, ExitStack() as stack:
                say(_describe(crew))
                pipeline = SwarmPipeline(crew, order)
                if open_pipeline is not None:
                    pipeline = stack.enter_context(open_pipeline(crew, crew.workers))
                taught = teach(
                    pipeline,
                    prepared.plan,
                    prepared.taught.examples,
                    resume,
                    digest,
                    loop,
                    held_out=prepared.held_out,
                    on_step=note,
                    say=say,
                )
                return SwarmTaught(
                    taught,
                    wire_bytes + pipeline.wire_bytes,
                    losses,
                    tuple(pipeline.idle_shares) if isinstance(pipeline, SwarmPipeline) else (),
                    tuple(each.optimizer_bytes for each in crew.opened),
                )
        except (LinkError, BackendError, CapacityError) as error:
            wire_bytes += 0 if pipeline is None else pipeline.wire_bytes
            failures += 1
            losses += pipeline is not None
            # What a worker lacks it will lack again; a link that ended, or one that is busy still, will not.
            is_lasting = not isinstance(error, LinkError) and pipeline is None and failures > 1
            if is_lasting or failures >= _MOST_LOSSES:
                raise
            say(f"a stage was lost: {error.message}")
            time.sleep(pause_s * min(failures, _LONGEST_PAUSES))


def _ask_for_workers(find_workers: Callable[[], Sequence[Peer]]) -> list[Peer]:
    """LinkError where there are none, or nobody who knows: a coordinator comes back."""
    try:
        workers = list(find_workers())
    except (LinkError, BackendError, SourceError) as error:
        raise LinkError(f"the cluster does not answer: {error.message}", hint=error.hint) from error
    if not workers:
        raise LinkError("no worker is there to teach on", hint="see `shardcompute nodes`")
    return workers


def _describe(crew: Crew) -> str:
    """Which worker has which layers."""
    copies = f", {crew.copies} copies" if crew.copies > 1 else ""
    names = ", ".join(
        f"{worker.node[:8]} has layers {stage.start} to {stage.stop}"
        for worker, stage in zip(crew.workers, crew.stages * crew.copies, strict=True)
    )
    return f"{len(crew.stages)} stages{copies}: {names}"

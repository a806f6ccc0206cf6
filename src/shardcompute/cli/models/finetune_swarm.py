"""`shardcompute finetune --swarm`: the stages of a run on the workers of a running cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import Screen
from shardcompute.cli.models.entering import enter_cluster, ready_workers
from shardcompute.cli.progress import waiting
from shardcompute.core.errors import UsageError
from shardcompute.core.units import format_bytes

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient
    from shardcompute.finetune.local import LocalOptions
    from shardcompute.finetune.preparation import PreparedRun
    from shardcompute.finetune.split.leak import LeakReport
    from shardcompute.finetune.training import CurvePoint, OnStep, RunCadence, Taught
    from shardcompute.node.finetuning.crew import Crew, RunOrder
    from shardcompute.node.finetuning.swarm_run import CrewPipeline, OpenPipeline
    from shardcompute.node.rpc.commands import Peer
    from shardcompute.weights.checkpoint import Checkpoint
    from shardcompute.wire import Link

_RUN_LETTERS = 16


@dataclass(frozen=True, slots=True)
class HomeLayers:
    """How many layers at each end stay with the data, and how this machine computes them."""

    kept: int
    machine: LocalOptions


@dataclass(frozen=True, slots=True)
class SwarmChoice:
    """Which workers teach, what goes between them in which form, and how much of their time it may take."""

    workers: int = 0
    """At most so many; 0: all."""
    codec: str = "exact"
    share: float = 1.0
    recomputes: bool = False
    copies: int = 1
    home: HomeLayers | None = None
    """What stays on this machine; None: nothing does."""


def teach_through_cluster(
    client: ClusterClient,
    checkpoint: Checkpoint,
    prepared: PreparedRun,
    resume: Path,
    choice: SwarmChoice,
    loop: RunCadence,
    *,
    teacher: Checkpoint | None = None,
    on_step: OnStep,
    say: Callable[[str], None],
) -> Taught:
    """Run it on workers of a cluster that serves this very model."""
    from shardcompute.finetune.local import adapted_modules, run_digest
    from shardcompute.finetune.swarm.balance import head_cost, layer_costs
    from shardcompute.node.finetuning.crew import RunOrder
    from shardcompute.node.finetuning.curve_reporter import CurveReporter
    from shardcompute.node.finetuning.swarm_run import teach_in_swarm
    from shardcompute.wire import find_codec

    find_codec(choice.codec)
    model = served_name(client, checkpoint)
    with ExitStack() as stack:
        entered = stack.enter_context(closing(enter_cluster(client, "finetuning")))
        endpoint, origin = entered.endpoint, entered.coordinator()
        order = RunOrder(
            model,
            origin,
            checkpoint.spec.layer_count,
            prepared.plan,
            adapted_modules(checkpoint, prepared.plan),
            prepared.mean_tokens,
            choice.codec,
            choice.share,
            choice.recomputes,
            choice.copies,
            costs=layer_costs(checkpoint.layout),
            head_cost=head_cost(checkpoint.spec, prepared.taught.learned / prepared.taught.tokens),
            kept=0 if choice.home is None else choice.home.kept,
            owner="" if choice.home is None else endpoint.node,
        )
        reporter = CurveReporter(
            client.tell_run, run_digest(checkpoint, prepared)[:_RUN_LETTERS], model, prepared.plan.steps
        )

        def note(point: CurvePoint, seconds: float) -> None:
            reporter.note(point, seconds)
            on_step(point, seconds)

        def find_workers() -> list[Peer]:
            found = _workers(client, choice.workers)
            reporter.workers = len(found)
            return found

        stack.callback(reporter.close)
        dial = endpoint.dialler("finetune")
        found = teach_in_swarm(
            dial,
            find_workers,
            order,
            prepared,
            resume,
            run_digest(checkpoint, prepared),
            loop,
            on_step=note,
            say=say,
            open_pipeline=None
            if choice.home is None
            else home_opener(checkpoint, prepared, choice.home, teacher, order, dial, say),
        )
        reporter.is_over = True
    say(f"{format_bytes(found.wire_bytes)} ({found.wire_bytes} bytes) went between the stages")
    if found.idle_shares:
        idle = ", ".join(f"{share:.0%}" for share in found.idle_shares)
        say(f"workers were idle {idle} of the time of their steps")
    return found.taught


def home_opener(
    checkpoint: Checkpoint,
    prepared: PreparedRun,
    home: HomeLayers,
    teacher: Checkpoint | None,
    order: RunOrder,
    dial: Callable[[Peer], Link],
    say: Callable[[str], None],
) -> OpenPipeline:
    """Opens a crew's stages between those that are kept here, and says what its workers could read, before a step."""
    from shardcompute.finetune.losses.teacher import DistillingPipeline
    from shardcompute.finetune.split.home import open_home
    from shardcompute.finetune.split.leak import measure_leak
    from shardcompute.node.finetuning.lent_crew import open_owners_pipeline

    available = psutil.virtual_memory().available
    at_home = open_home(checkpoint, prepared, home.machine, home.kept, teacher, available)
    is_said = False

    @contextmanager
    def opened(crew: Crew, workers: Sequence[Peer]) -> Iterator[CrewPipeline]:
        nonlocal is_said
        at_home.begin_anew()
        with open_owners_pipeline((at_home.first, at_home.last), order, dial, crew, workers) as pipeline:
            probed = at_home.probed_batches(prepared.taught.examples, prepared.plan)
            if not is_said:
                say(_tell_leak(measure_leak(pipeline, probed) if probed else None, home.kept))
                is_said = True
            yield pipeline if at_home.teacher is None else DistillingPipeline(pipeline, at_home.teacher)

    return opened


def _tell_leak(report: LeakReport | None, kept: int) -> str:
    if report is None:
        return "too few examples to measure what other machines could read of them"
    return (
        f"tokens, labels and {kept} layers at each end stay here. Other machines could still read: {report}. "
        "Whoever tries harder reads more."
    )


def served_name(client: ClusterClient, checkpoint: Checkpoint) -> str:
    """What the cluster calls the model; UsageError where it serves none of these weights."""
    served = [name for name in client.models() if ":" not in name or name == checkpoint.name]
    if checkpoint.name in served:
        return checkpoint.name
    raise UsageError(
        f"the cluster does not serve {checkpoint.name}",
        hint=f"load it first: shardcompute load {checkpoint.name}; served are {', '.join(served) or 'none'}",
    )


def push_adapter(
    at: ClusterLocation, model: str, reference: str, name: str, folder: Path, screen: Screen
) -> None:
    """Have the cluster serve the adapter beside the model, as it is served now, and wait until it does. Its workers
    load the model again with it, once the answers that run are finished."""
    from shardcompute.cli.cluster.following import follow_load
    from shardcompute.cli.cluster.load import name_for

    address = at.require()
    with address.connect() as client:
        served = next((each for each in client.state().models if each.name == model), None)
        if served is None:
            raise UsageError(
                f"the cluster does not serve {model} any more", hint=f"the adapter is in {folder}"
            )
        order = client.load_model(
            name_for(address, reference),
            form=served.weight_form,
            chains=served.wanted_chains,
            replace=True,
            adapters={name: str(folder.absolute())},
        )
        with waiting(screen, f"loading {model}:{name}") as progress:
            follow_load(client.watch(), order, progress)
    screen.say(f"served as {model}:{name}")


def _workers(client: ClusterClient, most: int) -> list[Peer]:
    """Those that are there and may work, always in the same order."""
    from shardcompute.node.rpc.commands import Peer

    nodes = ready_workers(client)
    return [Peer(each.id, each.address) for each in nodes[: most or len(nodes)]]

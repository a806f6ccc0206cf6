"""`shardcompute up`: serve a model over HTTP, for any OpenAI client, from this machine and all that join it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options.adapters import AdapterArguments
from shardcompute.cli.options.cluster import ClusterArguments, Parallel, ServingArguments
from shardcompute.cli.options.engine import EngineArguments, check_device
from shardcompute.cli.options.records import changed_options, with_options
from shardcompute.cli.options.worker import MaxMemory, PriceHour, Watts
from shardcompute.core.errors import UsageError
from shardcompute.core.phases import note_imports, phase
from shardcompute.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from shardcompute.backends.cpu_choice import CpuBackendChoice
    from shardcompute.control.placement.parallelism import Parallelism
    from shardcompute.node.process.local_workers import LocalWorkers
    from shardcompute.node.worker.power.terms import PowerTerms
    from shardcompute.weights.checkpoint import Checkpoint


@with_options
def up(
    serving: ServingArguments,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=0,
            max=64,
            help="Workers on this machine, each with a stage of the model; by default 3 if they fit, of which as many "
            "are used as pay.",
        ),
    ] = None,
    no_workers: Annotated[
        bool, typer.Option("--no-workers", help="No workers on this machine: others will join.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Serve from this process alone, without a cluster.")
    ] = False,
    cluster: ClusterArguments,
    max_memory: MaxMemory = None,
    watts: Watts = None,
    price_hour: PriceHour = None,
    engine: EngineArguments,
    adapters: AdapterArguments,
    parallel: Parallel = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C.

    Starts a cluster on this machine: a coordinator with the HTTP API, and some workers. Other machines join it
    with the line that it prints. Speaks OpenAI's protocol. Listens for this machine only unless --host says
    otherwise; then clients need an API key, which is made and printed if none is given.
    """
    note_imports()
    if workers == 0:
        raise UsageError(
            "--workers 0 asks for no workers on this machine",
            hint="say so with --no-workers; others will join",
        )
    asked = _parsed(parallel)
    screen, settings = open_screen(), load_settings()
    own = {
        "--workers": workers,
        "--max-memory": max_memory,
        "--watts": watts,
        "--price-hour": price_hour,
    }
    if local:
        from shardcompute.cli.serve.local import serve_locally

        useless = [*_given({**own, "--no-workers": no_workers or None}), *changed_options(cluster)]
        _refuse(useless, "a cluster", "leave out --local")
        stages = _local_stages(asked)
        serve_locally(serving, engine.engine_options(stages, screen.say, adapters), screen, settings)
        return
    from shardcompute.cli.serve.foreground import ClusterPlan, run_cluster
    from shardcompute.node.worker.power.terms import PowerTerms

    _refuse(_given({"--kv-memory": engine.kv_memory}), "a single process", "add --local")
    check_device(engine.device, engine.backend)
    if no_workers:
        useless = _given({**own, "--threads": engine.threads})
        _refuse(useless, "workers on this machine", "leave out --no-workers")
    power = PowerTerms(watts, price_hour)
    shared = None if no_workers else _own_workers(workers, max_memory, power, engine, settings, screen.say)
    plan = ClusterPlan(
        serving,
        cluster,
        engine.weights.value,
        engine.context,
        engine.kv_type.value,
        workers=shared,
        parallel=asked_parallelism(asked, workers, cluster.chains),
        adapters=adapters,
        choose_backend=_backend_choice(shared, engine, screen.say),
    )
    run_cluster(plan, screen, settings)


def _parsed(parallel: str | None) -> Parallelism | None:
    from shardcompute.control.placement.parallelism import parse_parallelism

    return None if parallel is None else parse_parallelism(parallel)


def asked_parallelism(
    asked: Parallelism | None, workers: int | None, chains: int | None
) -> Parallelism | None:
    """Whoever asks for three workers, and for no more than one chain, wants to see three at work."""
    if asked is not None or workers is None or (chains or 1) > 1:
        return asked
    return _parsed(f"pp={workers}")


def _local_stages(asked: Parallelism | None) -> int:
    if asked is not None and asked.tp > 1:
        raise UsageError("one process has no tensor ranks", hint="leave out --local, or use pp=… for stages")
    return max(1, asked.pp) if asked is not None else 1


def _own_workers(
    count: int | None,
    max_memory: int | None,
    power: PowerTerms,
    engine: EngineArguments,
    settings: Settings,
    say: Callable[[str], None],
) -> LocalWorkers:
    from shardcompute.backends.device_choice import choose_devices
    from shardcompute.backends.footprint import process_bytes
    from shardcompute.node.process.local_workers import share_machine
    from shardcompute.node.worker.memory.promise import check_promise

    with phase("devices"):
        chosen = choose_devices(engine.device, engine.backend.value)
    for device in chosen.devices:
        if max_memory is not None and device.is_host_memory:
            check_promise(max_memory, process_bytes(device.backend))
    for line in chosen.describe():
        say(line)
    threads = engine.threads or settings.threads
    return share_machine(chosen, count=count, threads=threads, max_memory_bytes=max_memory, power=power)


def _backend_choice(
    workers: LocalWorkers | None, engine: EngineArguments, say: Callable[[str], None]
) -> Callable[[Checkpoint, str], CpuBackendChoice] | None:
    """By what is measured here with as many threads as a worker has; None where no worker here leaves it open."""
    first = next((each for each in workers.each if each.device.alternatives), None) if workers else None
    choose = None if first is None else engine.backend_choice(first.device, say)
    if first is None or choose is None:
        return None
    threads = first.threads
    return lambda checkpoint, form: choose(checkpoint, form, threads)


def _given(options: Mapping[str, object | None]) -> list[str]:
    return [name for name, value in options.items() if value is not None]


def _refuse(useless: list[str], what: str, hint: str) -> None:
    """UsageError for options that would have no effect."""
    if useless:
        raise UsageError(f"{' and '.join(useless)} only mean something for {what}", hint=hint)

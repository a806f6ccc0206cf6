"""`shardcompute up`: serve a model over HTTP, for any OpenAI client, from this machine and all that join it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options import cluster as swarm_options
from shardcompute.cli.options import common as options
from shardcompute.cli.options.common import Backend, WeightForm, check_device, engine_options
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from shardcompute.node.process.launch import LocalWorkers


def up(
    model: swarm_options.Model = "",
    host: swarm_options.Host = "127.0.0.1",
    port: swarm_options.Port = 8000,
    api_key: swarm_options.ApiKey = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", metavar="N", min=1, max=64, help="Workers on this machine, by default 3 if they fit."
        ),
    ] = None,
    no_workers: Annotated[
        bool, typer.Option("--no-workers", help="No workers on this machine: others will join.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Serve from this process alone, without a cluster.")
    ] = False,
    data_dir: swarm_options.ClusterFolder = None,
    name: swarm_options.ClusterName = None,
    cluster_port: swarm_options.ClusterPort = None,
    join_port: swarm_options.JoinPort = None,
    advertise: swarm_options.Advertise = None,
    chains: swarm_options.Chains = None,
    prefer: swarm_options.Prefer = None,
    driver_placement: swarm_options.DriverPlacement = None,
    wire: swarm_options.WireForm = None,
    kv_tokens: swarm_options.KvTokens = None,
    speculate: swarm_options.Speculate = swarm_options.Drafting.AUTO,
    draft_model: swarm_options.DraftModel = None,
    self_draft: swarm_options.SelfDraft = False,
    max_memory: swarm_options.MaxMemory = None,
    weights: options.Weights = WeightForm.NATIVE,
    backend: options.BackendName = Backend.ONNX,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    context: options.Context = None,
    kv_memory: options.KvMemory = None,
    stages: Annotated[
        int | None,
        typer.Option(
            "--stages", metavar="N", min=1, help="With --local: cut the model into this many stages."
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C.

    Starts a cluster on this machine: a coordinator with the HTTP API, and some workers. Other machines join it
    with the line that it prints. Speaks OpenAI's protocol. Listens for this machine only unless --host says
    otherwise; then clients need an API key, which is made and printed if none is given.
    """
    screen, settings = open_screen(), load_settings()
    cluster_only = {
        "--workers": workers,
        "--no-workers": no_workers or None,
        "--data-dir": data_dir,
        "--name": name,
        "--cluster-port": cluster_port,
        "--join-port": join_port,
        "--advertise": advertise,
        "--chains": chains,
        "--prefer": prefer,
        "--driver-placement": driver_placement,
        "--wire": wire,
        "--kv-tokens": kv_tokens,
        "--self-draft": self_draft or None,
        "--draft-model": draft_model,
        "--speculate": None if speculate is swarm_options.Drafting.AUTO else speculate,
        "--max-memory": max_memory,
    }
    if local:
        from shardcompute.cli.serve.local import serve_locally

        _refuse(cluster_only, "a cluster", "leave out --local")
        engine = engine_options(
            weights=weights,
            backend=backend,
            device=device,
            threads=threads,
            context=context,
            kv_memory=kv_memory,
            stages=stages or 1,
        )
        serve_locally(model, host, port, api_key or [], engine, screen, settings)
        return
    from shardcompute.cli.serve.foreground import SwarmPlan, run_swarm

    _refuse({"--kv-memory": kv_memory, "--stages": stages}, "a single process", "add --local")
    check_device(device, backend)
    own = None if no_workers else _own_workers(workers, threads, max_memory, backend, device, settings)
    if no_workers:
        _refuse(
            {"--workers": workers, "--threads": threads, "--max-memory": max_memory},
            "workers on this machine",
            "leave out --no-workers",
        )
    plan = SwarmPlan(
        model=model,
        folder=swarm_options.cluster_folder(settings, data_dir),
        host=host,
        port=port,
        keys=api_key or [],
        form=weights.value,
        name=name,
        cluster_port=cluster_port,
        join_port=join_port,
        advertise=advertise,
        context=context,
        kv_tokens=kv_tokens,
        speculate=speculate,
        draft_model=draft_model,
        draft_heads=swarm_options.draft_heads_folder(settings) if self_draft else None,
        chains=chains,
        prefer=prefer,
        driver_placement=driver_placement,
        wire=wire,
        workers=own,
    )
    run_swarm(plan, screen, settings)


def _own_workers(
    count: int | None,
    threads: int | None,
    max_memory: int | None,
    backend: Backend,
    device: str,
    settings: Settings,
) -> LocalWorkers:
    from dataclasses import replace

    from shardcompute.node.process.launch import share_machine

    shared = share_machine(count=count, threads=threads or settings.threads, max_memory_bytes=max_memory)
    return replace(shared, backend=backend.value, device=device)


def _refuse(given: Mapping[str, object | None], what: str, hint: str) -> None:
    """UsageError for options that would have no effect."""
    useless = [name for name, value in given.items() if value is not None]
    if useless:
        raise UsageError(f"{' and '.join(useless)} only mean something for {what}", hint=hint)

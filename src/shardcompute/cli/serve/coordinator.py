"""`shardcompute coordinator`: the control plane and the HTTP API, for a machine that computes nothing."""

from __future__ import annotations

from shardcompute.cli.console import open_screen
from shardcompute.cli.options import cluster as swarm_options
from shardcompute.cli.options import common as options
from shardcompute.cli.options.common import WeightForm
from shardcompute.cli.serve.shaping import Shape
from shardcompute.core.settings import load_settings


def coordinator(
    model: swarm_options.Model = "",
    host: swarm_options.Host = "127.0.0.1",
    port: swarm_options.Port = 8000,
    api_key: swarm_options.ApiKey = None,
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
    weights: options.Weights = WeightForm.NATIVE,
    context: options.Context = None,
    shape: Shape = None,
) -> None:
    """Run a cluster's coordinator and HTTP API until Ctrl-C, without workers on this machine.

    Needs no engine and little memory. The model is served as soon as the machines that join can hold it.
    """
    from shardcompute.cli.serve.foreground import SwarmPlan, run_swarm

    screen, settings = open_screen(), load_settings()
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
        shape=shape,
    )
    run_swarm(plan, screen, settings)

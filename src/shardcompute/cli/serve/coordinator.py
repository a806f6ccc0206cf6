"""`shardcompute coordinator`: the control plane and the HTTP API, for a machine that computes nothing."""

from __future__ import annotations

from shardcompute.cli.console import open_screen
from shardcompute.cli.options.adapters import AdapterArguments
from shardcompute.cli.options.cluster import ClusterArguments, Parallel, ServingArguments
from shardcompute.cli.options.engine import Context, KvTypeName, KvTypeOption, WeightForm, Weights
from shardcompute.cli.options.records import with_options
from shardcompute.cli.options.worker import Shape
from shardcompute.core.settings import load_settings


@with_options
def coordinator(
    serving: ServingArguments,
    cluster: ClusterArguments,
    adapters: AdapterArguments,
    weights: Weights = WeightForm.NATIVE,
    context: Context = None,
    kv_type: KvTypeOption = KvTypeName.FLOAT32,
    shape: Shape = None,
    parallel: Parallel = None,
) -> None:
    """Run a cluster's coordinator and HTTP API until Ctrl-C, without workers on this machine.

    Needs no engine and little memory. The model is served as soon as the machines that join can hold it.
    """
    from shardcompute.cli.serve.foreground import ClusterPlan, run_cluster
    from shardcompute.control.placement.parallelism import parse_parallelism

    plan = ClusterPlan(
        serving,
        cluster,
        weights.value,
        context,
        kv_type.value,
        shape=shape,
        parallel=None if parallel is None else parse_parallelism(parallel),
        adapters=adapters,
    )
    run_cluster(plan, open_screen(), load_settings())

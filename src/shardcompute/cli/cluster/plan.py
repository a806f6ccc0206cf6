"""`shardcompute plan`: where a cluster would put a model, and why."""

from __future__ import annotations

import dataclasses

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.cluster.load import Chains, Model, name_for
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.engine import ModelKvType, WeightForm, Weights
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options
from shardcompute.core.errors import CapacityError


@with_options
def plan(
    *,
    model: Model,
    weights: Weights = WeightForm.NATIVE,
    kv_type: ModelKvType = None,
    chains: Chains = 1,
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """Where a cluster would put a model, why there, how fast it would be, and what it takes of each machine's memory.

    Nothing is loaded; of a model that the cluster does not have, only headers are read, and of one that
    `list --catalogue` names nothing at all. Ends with 7 if it does not fit.
    """
    from shardcompute.cli.cluster.text import describe_fit, describe_memory

    screen = open_screen()
    address = at.require()
    with address.connect() as client:
        planned = client.plan(
            name_for(address, model),
            form=weights.value,
            chains=chains,
            kv_type=kv_type.value if kv_type else None,
        )
    if json:
        screen.write_json(dataclasses.asdict(planned))
    else:
        lines = [describe_fit(planned), "", planned.text, "", *describe_memory(planned)]
        screen.write("\n".join(lines) + "\n")
    if not all(chain.is_possible for chain in planned.chains):
        raise typer.Exit(CapacityError.exit_code)

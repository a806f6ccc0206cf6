"""`shardcompute plan`: where a cluster would put a model, and why."""

from __future__ import annotations

import dataclasses

import typer

from shardcompute.cli.cluster.access import ApiKey, DataDir, Url, connect, require_cluster
from shardcompute.cli.cluster.load import Chains, Model, name_for
from shardcompute.cli.console import open_screen
from shardcompute.cli.options import common as options
from shardcompute.cli.options.common import WeightForm
from shardcompute.core.errors import CapacityError


def plan(
    model: Model,
    weights: options.Weights = WeightForm.NATIVE,
    chains: Chains = 1,
    json: options.Json = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Where a cluster would put a model, why there, and how fast it would be.

    Nothing is loaded; of a model that the cluster does not have, only headers are read. Ends with 7 if it does
    not fit.
    """
    screen = open_screen()
    address = require_cluster(url, api_key, data_dir)
    with connect(address) as client:
        planned = client.plan(name_for(address, model), form=weights.value, chains=chains)
    if json:
        screen.write_json(dataclasses.asdict(planned))
    else:
        screen.write(f"{planned.text}\n")
    if not all(chain.is_possible for chain in planned.chains):
        raise typer.Exit(CapacityError.exit_code)

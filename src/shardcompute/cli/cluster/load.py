"""`shardcompute load` and `unload`: what a cluster serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterAddress, ClusterLocation
from shardcompute.cli.cluster.completion import complete_fetched, complete_served
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.engine import WeightForm, Weights
from shardcompute.cli.options.records import with_options
from shardcompute.cli.progress import waiting
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.node.admin.views import ModelView

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model: smollm2, a folder, a .gguf file or org/repo.",
        autocompletion=complete_fetched,
    ),
]
Chains = Annotated[
    int,
    typer.Option("--chains", metavar="N", min=1, max=64, help="Copies of it, each on machines of its own."),
]


@with_options
def load(
    *,
    model: Model,
    weights: Weights = WeightForm.NATIVE,
    chains: Chains = 1,
    at: ClusterLocation,
) -> None:
    """Have a cluster serve another model, and wait until it does.

    The cluster fetches what it lacks. Ctrl-C stops the waiting, not the loading; unload takes it back. A model
    that is served already can be given other weights or another number of chains.
    """
    from shardcompute.cli.cluster.following import follow_load

    screen = open_screen()
    address = at.require()
    with address.connect() as client:
        order = client.load_model(name_for(address, model), form=weights.value, chains=chains)
        with waiting(screen, f"loading {order.name}") as progress:
            served = follow_load(client.watch(), order, progress)
    screen.say(_outcome(served))
    for reason in served.reasons:
        screen.say(reason, "yellow")


@with_options
def unload(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Its name as `status` tells it.", autocompletion=complete_served
        ),
    ],
    at: ClusterLocation,
) -> None:
    """Have a cluster stop serving a model, or fetching it; requests that it is answering end."""
    screen = open_screen()
    with at.connect() as client:
        client.unload_model(model)
    screen.say(f"{model} is not served any more")


def name_for(address: ClusterAddress, model: str) -> str:
    """A path means to a cluster on this machine what it means here."""
    return str(parse_reference(model)) if address.is_here else model


def _outcome(model: ModelView) -> str:
    chains = "chain" if model.wanted_chains == 1 else "chains"
    return f"{model.name} is served by {model.ready_chains} of {model.wanted_chains} {chains}"

"""`shardcompute load` and `unload`: what a cluster serves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterAddress, ClusterLocation
from shardcompute.cli.cluster.completion import complete_fetched, complete_served
from shardcompute.cli.console import (
    Screen,
    has_terminal_input,
    open_screen,
    standard_input,
)
from shardcompute.cli.options.adapters import AdapterOption, parse_adapters
from shardcompute.cli.options.cluster import Parallel, ViaCoordinator
from shardcompute.cli.options.engine import ModelKvType, WeightForm, Weights
from shardcompute.cli.options.records import with_options
from shardcompute.cli.progress import waiting
from shardcompute.core.errors import UsageError, WouldReplaceError
from shardcompute.core.units import count_of
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.node.admin.views import ModelView

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model: smollm2, a name like qwen3:8b, a folder, a .gguf file or org/repo.",
        autocompletion=complete_fetched,
    ),
]
Chains = Annotated[
    int,
    typer.Option("--chains", metavar="N", min=1, max=64, help="Copies of it, each on machines of its own."),
]


_RUNNING = ("waiting", "prefill", "decode")


@with_options
def load(
    *,
    model: Model,
    weights: Weights = WeightForm.NATIVE,
    kv_type: ModelKvType = None,
    chains: Chains = 1,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Let models that are served give way to it, without asking, where they have to."
        ),
    ] = False,
    via_coordinator: ViaCoordinator = False,
    adapter: AdapterOption = None,
    parallel: Parallel = None,
    at: ClusterLocation,
) -> None:
    """Have a cluster serve another model, and wait until it does.

    The cluster fetches what it lacks. Ctrl-C stops the waiting, not the loading; unload takes it back. A model
    that is served already can be given other weights, another KV type, more adapters or another number of chains.
    What is served stays where there is memory for both; where there is not, it is asked before anything is
    replaced, and answers that run are finished first.
    """
    from shardcompute.cli.cluster.following import follow_load

    screen = open_screen()
    address = at.require()
    with address.connect() as client:
        load_it = partial(
            client.load_model,
            name_for(address, model),
            form=weights.value,
            chains=chains,
            via_coordinator=via_coordinator,
            kv_type=kv_type.value if kv_type else None,
            adapters=_adapters_for(address, adapter or ()),
            parallel=parallel,
        )
        try:
            order = load_it(replace=replace)
        except WouldReplaceError as error:
            if not _is_confirmed(screen, error):
                screen.say("nothing was changed")
                return
            order = load_it(replace=True)
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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, whatever it is answering.")] = False,
    *,
    at: ClusterLocation,
) -> None:
    """Have a cluster stop serving a model, or fetching it.

    Requests that it is answering end with an error; it is asked before that. MODEL:ADAPTER takes one adapter away: the
    model is loaded again without it, once its answers are finished.
    """
    screen = open_screen()
    with at.connect() as client:
        answering = sum(each.model == model and each.state in _RUNNING for each in client.requests())
        if answering and not yes and not _may_end(screen, model, answering):
            screen.say("nothing was changed")
            return
        client.unload_model(model)
    screen.say(f"{model} is not served any more")


def name_for(address: ClusterAddress, model: str) -> str:
    """A path means to a cluster on this machine what it means here."""
    return str(parse_reference(model)) if address.is_here else model


def _adapters_for(address: ClusterAddress, given: Sequence[str]) -> dict[str, str]:
    """Folders by name; as with models, a path of another machine is left as it is."""
    if address.is_here:
        return {name: str(folder) for name, folder in parse_adapters(given).items()}
    return {name: each.partition("=")[2] for each, name in zip(given, parse_adapters(given), strict=True)}


def _is_confirmed(screen: Screen, would: WouldReplaceError) -> bool:
    from shardcompute.node.admin.swap import REPLACE_HINT

    # What is said to programs is of no use here.
    told = would.message.removesuffix(f" ({REPLACE_HINT})")
    if not has_terminal_input(standard_input()):
        raise WouldReplaceError(told, hint="add --replace if you mean it")
    screen.say(told)
    return screen.confirm("replace it, after the answers that run?")


def _may_end(screen: Screen, model: str, answering: int) -> bool:
    told = f"{model} is answering {count_of(answering, 'request')}"
    if not has_terminal_input(standard_input()):
        raise UsageError(f"{told}, which would end with an error", hint="add --yes if you mean it")
    return screen.confirm(f"{told}; end them?")


def _outcome(model: ModelView) -> str:
    chains = "chain" if model.wanted_chains == 1 else "chains"
    through = f", through {model.runner}" if model.runner else ""
    return f"{model.name} is served by {model.ready_chains} of {model.wanted_chains} {chains}{through}"

"""`run --share-layers`: a model in this process, some of whose layers two workers of a cluster compute on shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.models.entering import enter_cluster, ready_workers
from shardcompute.cli.options.shares import ShareArguments
from shardcompute.core.errors import CapacityError, UnknownModelError, UsageError
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient
    from shardcompute.node.admin.views import ModelView, NodeView
    from shardcompute.node.local.service import EngineOptions


@contextlib.contextmanager
def sharing(
    reference: str,
    at: ClusterLocation,
    shares: ShareArguments,
    options: EngineOptions,
    say: Callable[[str], None],
) -> Iterator[EngineOptions]:
    """The engine with layers that two workers compute on shares, for as long as the block lasts."""
    from shardcompute.node.local.shared_stage import SharedStage
    from shardcompute.node.rpc.commands import Peer
    from shardcompute.node.shares.pair import SharedLayers, SharePair

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(at.connect())
        model = _served(client, reference)
        if options.form not in ("native", model.weight_form):
            raise UsageError(
                f"the cluster serves {model.name} as {model.weight_form}, and shares are of the same weights",
                hint="leave out --weights",
            )
        start, stop, has_head = shares.layers(model.layer_count)
        chosen = choose_workers(ready_workers(client), shares.names)
        entered = stack.enter_context(contextlib.closing(enter_cluster(client, "shares")))
        layers = SharedLayers(model.name, entered.coordinator(), start, stop, has_head)
        machines = [Peer(each.id, each.address) for each in chosen]
        pair = stack.enter_context(SharePair(entered.endpoint.dialler("shares"), machines, layers))
        say(describe(chosen, start, stop, has_head=has_head))
        if host_of(chosen[0]) == host_of(chosen[1]):
            say("both workers are on one machine: nothing is hidden from whoever runs it")
        yield replace(options, shares=SharedStage(start, stop, pair), form=model.weight_form)


def choose_workers(workers: Sequence[NodeView], names: Sequence[str]) -> list[NodeView]:
    """Those that were named, else two on different machines, else any two."""
    if names:
        return [_find(workers, name) for name in names]
    if len(workers) < 2:
        raise CapacityError(
            f"shares need two workers that are ready, and the cluster has {len(workers)}",
            hint="join another machine, see `shardcompute nodes`",
        )
    first = workers[0]
    other = next((each for each in workers[1:] if host_of(each) != host_of(first)), workers[1])
    return [first, other]


def describe(workers: Sequence[NodeView], start: int, stop: int, *, has_head: bool) -> str:
    what = f"layers {start} to {stop - 1}" + (" and the head" if has_head else "")
    names = " and ".join(each.name or each.id for each in workers)
    return (
        f"{what}: linear maps by {names} on shares; neither learns anything of them, both together learn all. "
        "They see when rows come, and how many."
    )


def host_of(node: NodeView) -> str:
    return urlsplit(node.address).hostname or node.address


def _find(workers: Sequence[NodeView], name: str) -> NodeView:
    found = [each for each in workers if name in (each.id, each.name)]
    if len(found) != 1:
        problem = "is no worker that is ready" if not found else "is the name of several workers"
        raise UsageError(f"{name} {problem}", hint="see `shardcompute nodes`; ids are unique")
    return found[0]


def _served(client: ClusterClient, reference: str) -> ModelView:
    from shardcompute.node.admin.downloads import served_name

    models = {each.name: each for each in client.state().models}
    name = reference if reference in models else served_name(parse_reference(reference))
    if name not in models:
        raise UnknownModelError(
            f"the cluster does not serve {name}, so its workers have no weights of it",
            hint=f"shardcompute load {reference or name}; served are {', '.join(models) or 'none'}",
        )
    return models[name]

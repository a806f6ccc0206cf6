"""A coordinator among several: it waits with the model at hand, leads, and waits again when another does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcompute.cli.console import Screen
from shardcompute.cli.serve.standby.server import StandbyAddress, StandbyServer
from shardcompute.core.errors import UsageError

if TYPE_CHECKING:
    from shardcompute.node.cluster import ClusterOptions, PreparedModel
    from shardcompute.node.coordinator.shared import Leadership
    from shardcompute.weights.checkpoint import Checkpoint

Lead = Callable[["Checkpoint", "Leadership", "PreparedModel"], None]
"""Serves as the leader until a signal asks to stop, or another leads."""


def run_candidate(
    options: ClusterOptions,
    store_url: str,
    form: str,
    open_model: Callable[[], Checkpoint],
    lead: Lead,
    standby: StandbyAddress,
    screen: Screen,
) -> None:
    """Until a signal asks to stop. Who asks meanwhile, at the address that is the API's once it leads, is told who
    does."""
    from shardcompute.node.cluster import prepare_model
    from shardcompute.node.coordinator.shared import EtcdClient
    from shardcompute.node.coordinator.shared.etcd import EtcdAddress
    from shardcompute.node.process.candidacy import Candidacy

    if options.recovers_journal:
        raise UsageError(
            "--recover-journal is about a journal in a file", hint="leave it out, or leave out --store"
        )
    with contextlib.closing(EtcdClient(EtcdAddress.parse(store_url))) as store:
        candidacy = Candidacy(options, store)
        screen.say(f"this is {candidacy.node} of the cluster {candidacy.cluster}, by {store.name}")
        is_deposed = True
        while is_deposed:
            # What takes time is done before it is needed.
            checkpoint = open_model()
            prepared = prepare_model(options, checkpoint, form)
            is_deposed = False
            with (
                contextlib.suppress(KeyboardInterrupt),
                StandbyServer(standby, screen.say) as server,
                candidacy.leading(screen.say, hear=server.hear) as leadership,
            ):
                server.close()
                screen.say(f"this coordinator leads, in epoch {leadership.epoch}")
                lead(checkpoint, leadership, prepared)
                is_deposed = leadership.is_deposed
            if is_deposed:
                screen.say("another coordinator leads: waiting to take over")

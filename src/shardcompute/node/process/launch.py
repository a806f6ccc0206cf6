"""Launch of a cluster on one machine: the coordinator in this process, workers in processes of their own.

Nothing here is needed twice: a cluster that is started again from the same folder has the same authority, and its
local workers the same keys.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.state import ClusterState
from shardcompute.core.errors import UsageError
from shardcompute.core.phases import phase
from shardcompute.core.sockets.hosts import NEAR_HOSTS, bracketed
from shardcompute.node.cluster import Cluster, ClusterOptions, PreparedModel
from shardcompute.node.enrolment.stored import is_enrolled, join_from, remember
from shardcompute.node.process.local_workers import LocalWorker, LocalWorkers
from shardcompute.node.process.supervisor import Program, Supervisor
from shardcompute.security.authority import ClusterAuthority
from shardcompute.security.credentials import Credentials
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.names import Role, check_cluster_name
from shardcompute.security.tokens import JoinToken, parse_token
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.wire import join_address

INVITED_MACHINES = 8
INVITATION_LIFE_S = 3600.0
"""Of the token that is printed at the start; others are made where more machines are to come, or later."""
_ENROL_WITHIN_S = 600.0
_WORKERS_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Served:
    """What a cluster is to serve."""

    checkpoint: Checkpoint
    form: str = "native"
    chains: int = 1
    parallel: Parallelism | None = None
    """How it is to be cut; None: as was asked for before."""
    prepared: PreparedModel | None = None
    """What serving it takes, where that was made ready before."""

    def prepare(self, cluster: Cluster) -> PreparedModel:
        return self.prepared or cluster.prepare(self.checkpoint, self.form)


def check_cluster_name_of(folder: Path, name: str) -> None:
    """UsageError unless this can be the name of the cluster in `folder`: it is in every certificate."""
    check_cluster_name(name)
    try:
        authority = ClusterAuthority.load(folder / "authority")
    except FileNotFoundError:
        return
    if authority.name != name:
        raise UsageError(
            f"the cluster in {folder} is called {authority.name!r} and cannot be renamed",
            hint="leave --name out, or choose another --data-dir for a new cluster",
        )


def first_key(cluster: Cluster) -> str | None:
    """A key for clients, to be shown once; None where the cluster has one that is good."""
    now_s = time.time()
    known = cluster.access.keys()
    is_there = any(
        not each.is_revoked and (each.expires_at_s is None or now_s < each.expires_at_s) for each in known
    )
    return None if is_there else cluster.access.create_key("made by up")


def prepare(cluster: Cluster, served: Served) -> list[str]:
    """Go on serving what was served when the cluster was stopped; models that it does not know where to find again
    are dropped and named."""
    former = [name for name, each in cluster.coordinator.state.models.items() if each.is_wanted]
    known = {served.checkpoint.name, *(order.name for order in cluster.remembered())}
    dropped = [name for name in former if name not in known]
    for name in dropped:
        cluster.drop(name)
    if served.checkpoint.name in former:
        # Workers come back with what they hold: the model has to be known before they do.
        _serve(cluster, served)
    return dropped


def serve_from_workers(cluster: Cluster, served: Served, count: int) -> None:
    """Serve a model, unless `prepare` did, once `count` workers are there: a plan should see all of them. What there
    is to do without them is done while they start."""
    if any(model.name == served.checkpoint.name for model in cluster.pool.models()):
        return
    with phase("preparing the model"):
        prepared = served.prepare(cluster)
    are_there = threading.Event()

    def look(state: ClusterState) -> None:
        if sum(node.can_work and node.is_live for node in state.nodes.values()) >= count:
            are_there.set()

    cluster.coordinator.listen(look)
    look(cluster.coordinator.state)
    with phase("waiting for workers"):
        are_there.wait(_WORKERS_WITHIN_S)
    cluster.serve_prepared(prepared, chains=served.chains, parallel=served.parallel)


def _serve(cluster: Cluster, served: Served) -> None:
    cluster.serve_prepared(served.prepare(cluster), chains=served.chains, parallel=served.parallel)


@contextmanager
def running_workers(
    cluster: Cluster, workers: LocalWorkers, say: Callable[[str], None]
) -> Iterator[Supervisor]:
    """Local workers of a cluster, kept alive until the block ends."""
    folder = cluster.options.folder
    _enrol(cluster, [folder / "workers" / worker.name for worker in workers.each])
    programs = [Program(worker.name, _worker_command(cluster.options, worker)) for worker in workers.each]
    with Supervisor(programs, folder, say=say) as supervisor:
        yield supervisor


def _worker_command(options: ClusterOptions, worker: LocalWorker) -> tuple[str, ...]:
    return (
        *worker.command(options.folder / "workers" / worker.name),
        *("--host", options.host),
        *("--advertise", options.advertise or options.host),
    )


def cluster_port(cluster: Cluster) -> int:
    return urlsplit(cluster.url).port or 0


def join_port(token: JoinToken) -> int:
    return int(token.addresses[0].rpartition(":")[2])


def _enrol(cluster: Cluster, folders: list[Path]) -> None:
    """Join the local workers here, with a token of their own that is on no command line and good for nobody else."""
    host = NEAR_HOSTS.get(cluster.options.host, cluster.options.host)
    strangers = [folder for folder in folders if not is_enrolled(folder, cluster.fingerprint)]
    if strangers:
        token = parse_token(
            cluster.access.create_token(life_s=_ENROL_WITHIN_S, max_uses=len(strangers), roles=(Role.WORKER,))
        )
        try:
            for folder in strangers:
                _join_anew(folder, replace(token, addresses=(f"{bracketed(host)}:{join_port(token)}",)))
        finally:
            cluster.access.revoke_token(token.token_id)
    for folder in folders:
        credentials = Credentials.load(NodeIdentity.load(folder))
        assert credentials is not None
        # The port may be another one than last time.
        remember(folder, credentials, [join_address(host, cluster_port(cluster))])


def _join_anew(folder: Path, token: JoinToken) -> None:
    try:
        join_from(folder, token)
    except UsageError:
        # Certificates of a cluster that is no more: the worker becomes a new node.
        shutil.rmtree(folder)
        join_from(folder, token)

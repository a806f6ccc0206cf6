"""A made-up model, a swarm none of whose machines holds it whole, and an operator's way to its routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from shardcompute.api import create_app
from shardcompute.cluster_client import ClusterClient
from shardcompute.core.settings import load_settings
from shardcompute.node.admin.admin import ClusterAdmin
from support.api.bridge import LOCAL_SECRET, Bridge
from support.models.tiny_checkpoint import make_predictable, save_tiny_llama
from support.swarm.lab import Alone, LabSwarm, open_alone, swarm

Connect = Callable[[LabSwarm], AbstractContextManager[ClusterClient]]


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of its own, with other weights than the swarms of other tests have."""
    return make_predictable(save_tiny_llama(tmp_path_factory.mktemp("models") / "made-up", seed=11))


@pytest.fixture(scope="session")
def truth(made_up: Path) -> Iterator[Alone]:
    with open_alone(made_up) as service:
        yield Alone(service)


@pytest.fixture(scope="session")
def connect() -> Connect:
    @contextmanager
    def connect(lab: LabSwarm) -> Iterator[ClusterClient]:
        with ClusterAdmin(lab.cluster, load_settings()) as admin:
            app = create_app(lab.cluster.pool, admin=admin, local_secret=LOCAL_SECRET)
            with ClusterClient("http://127.0.0.1", api_key=LOCAL_SECRET, transport=Bridge(app)) as client:
                yield client

    return connect


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, made_up: Path) -> Iterator[LabSwarm]:
    """Three machines with room for two layers of six, and no draft head anywhere."""
    folder = tmp_path_factory.mktemp("swarm")
    with swarm(folder, made_up, layers=(2, 2, 2), stages=3, draft_heads=folder / "heads") as lab:
        yield lab
        lab.wait_quiet()


@pytest.fixture(scope="module")
def client(lab: LabSwarm, connect: Connect) -> Iterator[ClusterClient]:
    """Speaks for the cluster's operator."""
    with connect(lab) as client:
        yield client

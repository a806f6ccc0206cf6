"""Layers computed on shares by two workers: the logits of one process, and a worker that computes wrongly is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.core.errors import BackendError, UsageError, WrongProductError
from shardcompute.core.generation import GenerationRequest
from shardcompute.core.settings import load_settings
from shardcompute.models.spec import Stage
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.node.local.service import EngineOptions, LocalService, open_model
from shardcompute.node.local.shared_stage import SharedStage
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.node.shares.pair import SharedLayers, SharePair
from shardcompute.runtime.shard import open_shard
from shardcompute.security import Role
from shardcompute.trust.shares.fixed_point import Ring, RingMatrix
from shardcompute.trust.shares.ring import multiply
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import LabSwarm, swarm

LAYERS = 6
PROMPT = (5, 6, 7, 8, 9, 40)
OPTIONS = ExecutorOptions(kv_bytes=1 << 22, context_length=64)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def lab(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabSwarm]:
    with swarm(tmp_path_factory.mktemp("swarm"), base, layers=(40_000, 40_000), stages=1) as lab:
        yield lab


class Client:
    def __init__(self, lab: LabSwarm, folder: Path, role: Role = Role.DRIVER) -> None:
        credentials, _ = join_cluster(lab.token, folder, role)
        self.endpoint = Endpoint(credentials, "tcp://127.0.0.1:0", {}, transports=lab.network.transports)
        self.endpoint.start()
        self.workers = [Peer(each.node, each.url) for each in lab.workers]
        self.layers = SharedLayers(lab.model, Peer(lab.cluster.node, lab.cluster.url), 0, 2)

    def pair(self, **changes: int | bool) -> SharePair:
        layers = replace(self.layers, **changes)
        return SharePair(self.endpoint.dialler("shares"), self.workers, layers)

    def close(self) -> None:
        self.endpoint.close()


@pytest.fixture(scope="module")
def client(lab: LabSwarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with closing(Client(lab, tmp_path_factory.mktemp("client"))) as client:
        yield client


def logits(base: Path, shares: SharedStage | None) -> npt.NDArray[np.float32]:
    """Of the last row of the prompt, by stages of which one may be shared."""
    files = resolve(parse_reference(str(base)), load_settings())
    with open_checkpoint(files) as checkpoint:
        cuts = [Stage(0, LAYERS, LAYERS)] if shares is None else shares.cut(LAYERS)
        flowing: npt.NDArray[np.generic] = np.asarray(PROMPT, dtype=np.int64)
        for cut in cuts:
            shared = shares and shares.open(checkpoint, cut, "native", OPTIONS)
            executor = shared or open_shard(checkpoint, stage=cut, backend="numpy", options=OPTIONS)
            flowing = np.array(executor.step([Segment(1, 0, len(PROMPT), 1)], flowing))
            executor.close()
    return flowing.astype(np.float32)


@pytest.mark.parametrize(
    ("start", "stop", "has_head"), [(0, 2, False), (2, 3, False), (4, 6, False), (0, 6, True)]
)
def test_logits_are_those_of_one_process(
    start: int, stop: int, has_head: bool, client: Client, base: Path
) -> None:
    with client.pair(start=start, stop=stop, has_head=has_head) as pair:
        found = logits(base, SharedStage(start, stop, pair))
        assert pair.traffic.products == 4 * (stop - start) + has_head
    expected = logits(base, None)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert found.argmax() == expected.argmax()


def service(base: Path, shares: SharedStage | None) -> LocalService:
    return open_model(str(base), load_settings(), EngineOptions(shares=shares, threads=1, kv_bytes=1 << 22))


def test_an_answer_is_that_of_one_process(client: Client, base: Path) -> None:
    request = GenerationRequest(prompt=PROMPT, max_tokens=12)
    with client.pair() as pair, service(base, SharedStage(0, 2, pair)) as shared:
        found = [each.id for delta in shared.stream(request) for each in delta.tokens]
    with service(base, None) as alone:
        expected = [each.id for delta in alone.stream(request) for each in delta.tokens]
    assert found == expected


@pytest.mark.parametrize("cheater", [0, 1])
@pytest.mark.parametrize("error", [1, 1 << 63])
def test_who_computes_wrongly_is_named(
    cheater: int, error: int, client: Client, base: Path, lab: LabSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two adds the least or the worst to one number of a single product amid an answer."""
    request = GenerationRequest(prompt=PROMPT, max_tokens=12)
    with client.pair() as pair, service(base, SharedStage(0, 2, pair)) as shared:
        calls = 0

        def cheat(rows: Ring, matrix: RingMatrix) -> Ring:
            nonlocal calls
            calls += 1
            products = multiply(rows, matrix)
            if calls == 9:
                products[:1, 3:4] += np.uint64(error)
            return products

        monkeypatch.setattr(lab.workers[cheater]._shares, "_multiply", cheat)
        with pytest.raises(WrongProductError, match=lab.workers[cheater].node):
            list(shared.stream(request))
    assert calls == 9


def test_machines_see_shares_that_do_not_depend_on_the_text(
    client: Client, base: Path, lab: LabSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that either machine receives, for the same text twice: not a number of it is the same, and it is uniform."""
    seen: list[Ring] = []

    def look(rows: Ring, matrix: RingMatrix) -> Ring:
        seen.append(rows.copy())
        return multiply(rows, matrix)

    for worker in lab.workers:
        monkeypatch.setattr(worker._shares, "_multiply", look)
    for _ in range(2):
        with client.pair() as pair:
            logits(base, SharedStage(0, 2, pair))
    numbers = np.concatenate([each.ravel() for each in seen])
    assert len(np.unique(numbers)) == len(numbers)
    assert 0.49 < np.unpackbits(numbers.view(np.uint8)).mean() < 0.51


def test_other_weights_are_refused_before_anything_is_computed(client: Client, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "other", seed=2)
    with client.pair() as pair, pytest.raises(BackendError, match="other weights"):
        logits(other, SharedStage(0, 2, pair))


def test_layers_that_are_not_there_are_refused(client: Client) -> None:
    with pytest.raises(BackendError, match="has no layers 4 to 9"):
        client.pair(start=4, stop=9)
    with pytest.raises(BackendError, match="has no layers"):
        client.pair(start=0, stop=2, has_head=True)
    with pytest.raises(UsageError, match="two machines"):
        SharePair(client.endpoint.dialler("shares"), client.workers[:1] * 2, client.layers)


def test_workers_may_not_ask(lab: LabSwarm, tmp_path: Path) -> None:
    with (
        closing(Client(lab, tmp_path, Role.WORKER)) as worker,
        pytest.raises(BackendError, match="nothing to share"),
    ):
        worker.pair()


def test_clients_have_places(client: Client, base: Path) -> None:
    pairs = [client.pair() for _ in range(4)]
    try:
        with pytest.raises(BackendError, match="4 clients already"):
            client.pair()
    finally:
        for pair in pairs:
            pair.close()

"""Workers that nobody can dial serve any stage: they are met, and the tokens are those of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.discovery.again import coordinator_finder
from shardcompute.node.discovery.dht.records import Whereabout
from shardcompute.node.discovery.dht.udp import DhtSocket
from shardcompute.node.driver.standalone import StandaloneDriver, StandaloneOptions
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.node.enrolment.stored import authority_of, open_enrolled
from shardcompute.node.reach import reach as reach_room
from shardcompute.node.reach import relays as relays_room
from shardcompute.node.reach.cluster_relays import RelayOptions
from shardcompute.node.reach.rungs import DIRECT, PUNCHED, RELAYED
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.relay.server import RelayServer
from shardcompute.security import ClusterAuthority, Role, parse_token
from shardcompute.wire import TcpTransport, Transports
from support.models.requests import greedy, prompts, sampled
from support.network.lab_links import LabNetwork, wait_until
from support.network.relays import key_of
from support.swarm.lab import KV_TOKENS, STILL, Alone, LabSwarm

NOWHERE = "127.77.0.1"
"""An address of this machine at which nobody listens."""


OWN_RELAY = RelayOptions(0)


class PlainNetwork(LabNetwork):
    """The system's own TCP, without sockets of this machine, by which everybody is reached."""

    @property
    def transports(self) -> Transports:  # type: ignore[override]
        return Transports({"tcp": TcpTransport()})


@contextmanager
def homes(
    folder: Path, checkpoint: Path, layers: tuple[int, ...], relays: RelayOptions = OWN_RELAY
) -> Iterator[LabSwarm]:
    """Workers in homes of their own: of all addresses only the coordinator's leads anywhere."""
    options = ClusterOptions(
        folder / "cluster",
        port=0,
        join_port=0,
        relays=relays,
        kv_tokens=KV_TOKENS,
        context_length=512,
        placing=STILL,
        patience_s=30.0,
    )
    only_advertised = mock.patch.object(Endpoint, "addresses", property(lambda each: (each.url,)))
    with (
        only_advertised,
        # However slow this machine is, the better way is tried to its end first.
        mock.patch.multiple(reach_room, HEAD_START_S=20.0, _RELAY_AFTER_S=20.0, _OBSERVE_S=20.0),
        LabSwarm(folder, {"tiny": checkpoint}, options, network=PlainNetwork()) as lab,
    ):
        for room in layers:
            lab.add_worker(room, advertise=NOWHERE)
        lab.wait_until(
            lambda: [node.status for node in lab.state.nodes.values()] == ["ready"] * len(layers),
            lambda: f"all workers: {lab.describe()}",
        )
        lab.serve()
        lab.wait_serving(stages=len(layers))
        yield lab


def rungs_of(lab: LabSwarm) -> dict[str, set[str]]:
    """The rungs of the links that each worker sends frames on."""
    return {
        worker.node: {pump.link.stats.rung for pump in worker.stages._links._pumps.values()}
        for worker in lab.workers
    }


@pytest.mark.parametrize("punches", [True, False], ids=["punched", "relayed"])
def test_three_homes_answer_as_one_process(
    tmp_path: Path, tiny: Path, alone: Alone, punches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not punches:
        monkeypatch.setattr(relays_room.RelayBook, "punch_port", lambda book, timeout_s: None)
    with homes(tmp_path, tiny, (2, 2, 2)) as lab:
        requests = [kind(each) for kind in (greedy, sampled) for each in prompts(alone.service.tokenizer)[:4]]
        talks = [lab.start(request) for request in requests]
        for request, talk in zip(requests, talks, strict=True):
            assert talk.result() == alone.answer(request)
        stages = [stage.node for stage in lab.chain().stages]
        rungs = rungs_of(lab)
        # Between two of them nothing else is left; all dial the coordinator, where the driver is.
        expected = PUNCHED if punches else RELAYED
        assert [rungs[node] for node in stages] == [{expected, DIRECT}, {expected, DIRECT}, {DIRECT}]


def test_another_relay_takes_over_amid_streams(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two relays elsewhere know nothing but the cluster's key; the one in use is killed."""
    monkeypatch.setattr(relays_room.RelayBook, "punch_port", lambda book, timeout_s: None)
    Cluster(ClusterOptions(tmp_path / "cluster", port=0, join_port=0)).close()
    authority = ClusterAuthority.load(tmp_path / "cluster" / "authority")
    opened = [RelayServer("127.0.0.1", 0, key_of(authority)) for _ in range(2)]
    others = tuple((f"tcp://127.0.0.1:{relay.port}",) for relay in opened)
    with contextlib.ExitStack() as stack:
        for relay in opened:
            stack.enter_context(relay)
        lab = stack.enter_context(homes(tmp_path, tiny, (2, 2, 2), RelayOptions(None, others)))
        requests = [replace(greedy(each), max_tokens=200) for each in prompts(alone.service.tokenizer)[:4]]
        talks = [lab.start(request) for request in requests]
        lab.wait_until(lambda: all(len(talk.tokens) > 5 for talk in talks), "some tokens of each")
        used = max(opened, key=lambda relay: relay.view().spliced_bytes)
        assert used.view().connections
        used.close()
        for request, talk in zip(requests, talks, strict=True):
            assert talk.result() == alone.answer(request)
        assert all(relay.view().spliced_bytes for relay in opened)


def test_a_node_that_reaches_nothing_but_the_web_joins_and_is_heard(tmp_path: Path) -> None:
    """Joining and the control link go through the relay's door alone."""
    options = ClusterOptions(tmp_path / "cluster", port=0, join_port=0, relays=RelayOptions(0))
    with Cluster(options) as cluster:
        door = cluster.relay_doors[0]
        assert door.startswith("wss://")
        token = parse_token(cluster.access.create_token())
        nowhere = replace(token, addresses=(f"{NOWHERE}:1",))
        credentials, urls = join_cluster(nowhere, tmp_path / "node", Role.DRIVER, door)
        assert urls[0] == door
        transports = Transports({"tcp": TcpTransport()})
        node = StandaloneDriver(credentials, [door], StandaloneOptions(transports=transports))
        with contextlib.closing(node):
            node.start()
            wait_until(
                lambda: any(each.is_live for each in cluster.coordinator.state.nodes.values()),
                "the node is registered",
                20.0,
            )
            seen = cluster.relay_view()
            assert seen is not None
            assert seen.spliced_bytes > 0


def test_a_member_finds_its_coordinator_again_through_a_relay_that_the_hash_table_names(
    tmp_path: Path,
) -> None:
    """Behind a router of its own, the coordinator waits at a relay elsewhere; a record says at which. Others join
    there, too."""
    Cluster(ClusterOptions(tmp_path / "cluster", port=0, join_port=0)).close()
    authority = ClusterAuthority.load(tmp_path / "cluster" / "authority")
    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(RelayServer("127.0.0.1", 0, key_of(authority)))
        url = f"tcp://127.0.0.1:{relay.port}"
        options = ClusterOptions(
            tmp_path / "cluster",
            port=0,
            join_port=0,
            advertise=NOWHERE,
            relays=RelayOptions(None, ((url,),)),
        )
        cluster = stack.enter_context(Cluster(options))
        table = stack.enter_context(DhtSocket("127.0.0.1", 0))
        whereabout = Whereabout(cluster.urls, cluster.relay_urls())
        table.node.publish(cluster.sign_whereabout(whereabout, 1))
        wait_until(lambda: relay.view().connections > 0, "the coordinator waits at the relay", 30.0)
        credentials, urls = join_cluster(
            parse_token(cluster.access.create_token()), tmp_path / "node", Role.DRIVER, url
        )
        assert urls == [f"relay://127.0.0.1:{relay.port}", *cluster.urls]
        find = coordinator_finder(
            authority_of(credentials), credentials.authority_pem, [f"127.0.0.1:{table.port}"]
        )
        transports = Transports({"tcp": TcpTransport()})
        options_of_node = StandaloneOptions(transports=transports, find_again=find)
        # All that it knows by itself leads nowhere any more.
        node = StandaloneDriver(credentials, [f"tcp://{NOWHERE}:1"], options_of_node)
        with contextlib.closing(node):
            node.start()
            wait_until(
                lambda: any(each.is_live for each in cluster.coordinator.state.nodes.values()),
                "the node is registered",
                30.0,
            )
        kept = open_enrolled(tmp_path / "node", Role.DRIVER)
        assert f"relay://127.0.0.1:{relay.port}" in kept.control_urls

"""A coordinator says in the hash table where it is, and members find it there by their authority; over real sockets."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardcompute.core.sockets.listening import any_host
from shardcompute.node.discovery.dht.publishing import (
    Publisher,
    authority_key,
    search_holders,
    search_table,
)
from shardcompute.node.discovery.dht.records import SignedRecord, Whereabout, record_key, sign_record
from shardcompute.node.discovery.dht.udp import DhtSocket
from support.network.lab_links import wait_until
from support.network.papers import Papers


def test_a_cluster_that_moved_is_found_by_its_members(tmp_path: Path) -> None:
    authority = Papers.found(tmp_path).authority
    place = [Whereabout(("tcp://10.0.0.1:7420",))]

    def sign(whereabout: Whereabout, sequence: int) -> SignedRecord:
        return sign_record(authority.private_key, whereabout, sequence=sequence)

    with DhtSocket("127.0.0.1", 0) as bootstrap, DhtSocket("127.0.0.1", 0) as own:
        named = [f"127.0.0.1:{bootstrap.port}"]
        with Publisher(own, sign, lambda: place[0], named) as publisher:
            wait_until(lambda: bootstrap.node.kept_records == 1, "it is published", 30.0)
            search = search_table(authority.certificate_pem, named)
            assert search() == ["tcp://10.0.0.1:7420"]
            place[0] = Whereabout(("tcp://10.7.7.7:7420",), holders=("tcp://10.7.7.8:7430",) * 50)
            assert publisher.publish() == 1
            assert search() == ["tcp://10.7.7.7:7420"]
    other = Papers.found(tmp_path / "other").authority
    assert record_key(authority_key(other.certificate_pem)) != record_key(
        authority_key(authority.certificate_pem)
    )


def test_nobody_is_asked_where_no_node_is_known(tmp_path: Path) -> None:
    authority = Papers.found(tmp_path).authority
    assert search_table(authority.certificate_pem, [])() == []
    assert search_table(authority.certificate_pem, ["no-such-name.invalid:1"])() == []


def test_relays_and_holders_are_found_as_the_newest_good_record_says(tmp_path: Path) -> None:
    """Members look up doors to their coordinator, workers those who hold weights; forged and old records change
    nothing."""
    papers, stranger = Papers.found(tmp_path), Papers.found(tmp_path / "other").authority
    key = papers.authority.private_key
    evil = Whereabout(("tcp://6.6.6.6:1",), ("tcp://6.6.6.6:2",), ("tcp://6.6.6.6:3",))
    said = Whereabout(
        ("tcp://[fd00::1]:7420",),
        ("tcp://10.0.0.2:7422", "wss://relay.example", "http://10.0.0.2"),
        ("tcp://10.0.0.3:7430", "wss://10.0.0.4"),
    )
    good = sign_record(key, said, sequence=5)
    forged = msgspec.structs.replace(
        sign_record(stranger.private_key, evil, sequence=9), public_key=good.public_key
    )
    old, over = sign_record(key, evil, sequence=4), sign_record(key, evil, sequence=8, life_s=-1.0)
    with DhtSocket("127.0.0.1", 0) as bootstrap, DhtSocket("127.0.0.1", 0) as liar:
        liar.node.bootstrap([("127.0.0.1", bootstrap.port)])
        bootstrap.node.bootstrap([("127.0.0.1", liar.port)])
        bootstrap.node._records[good.key] = good
        named = [f"127.0.0.1:{bootstrap.port}", f"127.0.0.1:{liar.port}"]
        for bad in (forged, old, over):
            liar.node._records[good.key] = bad
            assert search_table(papers.authority.certificate_pem, named)() == [
                "tcp://[fd00::1]:7420",
                "relay://10.0.0.2:7422",
                "wss://relay.example",
            ]
            assert search_holders(papers.authority.certificate_pem, named)() == ["tcp://10.0.0.3:7430"]


def test_the_table_is_asked_over_either_kind_of_address(tmp_path: Path) -> None:
    authority = Papers.found(tmp_path).authority
    record = sign_record(authority.private_key, Whereabout(("tcp://10.0.0.1:7420",)), sequence=1)
    with DhtSocket(any_host(), 0) as table:
        table.node._records[record.key] = record
        hosts = ["127.0.0.1", "[::1]"] if any_host() == "::" else ["127.0.0.1"]
        for host in hosts:
            assert search_table(authority.certificate_pem, [f"{host}:{table.port}"])() == [
                "tcp://10.0.0.1:7420"
            ]

"""A coordinator says in the hash table where it is, and members find it there by their authority; over real sockets."""

from __future__ import annotations

from pathlib import Path

from shardcompute.node.discovery.dht.publishing import Publisher, authority_key, search_table
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

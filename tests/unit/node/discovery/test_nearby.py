"""Clusters nearby: what announcements are believed, and a real announcement over loopback."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import BackendError
from shardcompute.node.discovery import nearby
from shardcompute.node.discovery.nearby import (
    NearbyCluster,
    announced,
    find_nearby,
    own_addresses,
    read_announcement,
)

FINGERPRINT = "0123456789abcdef" * 4
GOOD: dict[bytes, bytes | None] = {
    b"v": b"1",
    b"name": b"home",
    b"fp": FINGERPRINT[:32].encode(),
    b"link": b"7420",
}
HOME = NearbyCluster("home", FINGERPRINT[:32], ("192.168.1.5", "fd00::5"), 7421, 7420)


def test_an_announcement_is_read() -> None:
    found = read_announcement(GOOD, ["192.168.1.5", "fd00::5", "192.168.1.5"], 7421)
    assert found == HOME
    assert found.join_addresses == ("192.168.1.5:7421", "[fd00::5]:7421")
    assert found.control_urls == ("tcp://192.168.1.5:7420", "tcp://[fd00::5]:7420")
    assert found.is_of(FINGERPRINT)
    assert not found.is_of("f" * 64)


@pytest.mark.parametrize(
    "change",
    [
        {b"v": b"2"},
        {b"v": None},
        {b"name": b"Home\x1b[2J"},
        {b"name": b"x" * 41},
        {b"name": "höme".encode()},
        {b"fp": b""},
        {b"fp": b"zz" * 16},
        {b"fp": b"ab" * 500},
        {b"link": b"0"},
        {b"link": b"70000"},
        {b"link": b"-1"},
        {b"link": b"9" * 5000},
        {b"link": "７".encode()},
    ],
)
def test_announcements_of_strangers_that_are_none(change: dict[bytes, bytes | None]) -> None:
    assert read_announcement({**GOOD, **change}, ["192.168.1.5"], 7421) is None


def test_announcements_without_a_place() -> None:
    assert read_announcement(GOOD, [], 7421) is None
    assert read_announcement(GOOD, ["no address"], 7421) is None
    assert read_announcement(GOOD, ["192.168.1.5"], None) is None
    assert read_announcement({}, ["192.168.1.5"], 7421) is None


def test_addresses_are_bounded() -> None:
    found = read_announcement(GOOD, [f"10.0.0.{number}" for number in range(200)], 7421)
    assert found is not None
    assert len(found.hosts) == 8


def test_own_addresses_are_for_others() -> None:
    assert not {"127.0.0.1", "::1", "0.0.0.0"} & {*own_addresses()}


def test_without_the_package_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zeroconf", None)
    with pytest.raises(BackendError, match="zeroconf") as missing:
        find_nearby(0.1)
    assert "shardcompute[discovery]" in missing.value.hint


def test_a_cluster_is_announced_and_found() -> None:
    pytest.importorskip("zeroconf", reason="zeroconf is not installed")
    cluster = NearbyCluster("lab-nearby", FINGERPRINT[:32], ("127.0.0.1",), 7421, 7420)
    with announced(cluster, interfaces=["127.0.0.1"]):
        found = find_nearby(
            10.0,
            interfaces=["127.0.0.1"],
            is_wanted=lambda each: each.name == "lab-nearby",
            first_only=True,
        )
    assert found == (cluster,)
    assert nearby.SERVICE.endswith(".local.")

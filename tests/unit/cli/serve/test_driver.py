"""`shardcompute driver`: how it joins, and how it finds its coordinator again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompute.cli.serve import driver as driver_command
from shardcompute.cli.serve.driver import DriverArguments
from shardcompute.core.settings import Settings
from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.discovery import nearby
from shardcompute.node.discovery.nearby import NearbyCluster
from shardcompute.node.enrolment.stored import EnrolledNode, authority_of
from shardcompute.node.reach.cluster_relays import RelayOptions
from shardcompute.security import parse_token

Cli = Callable[..., Any]
NOWHERE = "127.0.0.1:1"


def test_a_driver_joins_through_a_door_and_finds_its_coordinator_again(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[DriverArguments, EnrolledNode]] = []
    monkeypatch.setattr(
        driver_command, "run_driver", lambda folder, given, member, *_: served.append((given, member))
    )
    options = ClusterOptions(tmp_path / "cluster", port=0, join_port=0, relays=RelayOptions(0))
    with Cluster(options) as cluster:
        [door] = cluster.relay_doors
        token = replace(parse_token(cluster.access.create_token()), addresses=(NOWHERE,)).encode()
        folder = ("--data-dir", str(tmp_path / "driver"))
        done = cli("driver", token, "--through", door, *folder)
        assert done.exit_code == 0, done.stderr
        [(given, member)] = served
        assert member.control_urls == (door, cluster.url)
        own = NearbyCluster("home", cluster.fingerprint, ("10.0.0.7",), 7421, 7420)
        monkeypatch.setattr(
            nearby, "find_nearby", lambda seconds, is_wanted, first_only: [own] if is_wanted(own) else []
        )
        opened = given.options(member, Settings(data_dir=tmp_path))
    assert authority_of(member.credentials) == own.fingerprint
    assert opened.find_again() == ["tcp://10.0.0.7:7420"]
    assert opened.follows_address
    pinned = replace(given, host="127.0.0.1").options(member, Settings(data_dir=tmp_path))
    assert not pinned.follows_address


def test_a_door_without_a_token_is_said(cli: Cli) -> None:
    refused = cli("driver", "--through", "wss://127.0.0.1:1")
    assert refused.exit_code == 2
    assert "--through is for joining" in refused.stderr

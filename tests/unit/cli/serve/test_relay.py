"""`shardcompute relay`, and what a cluster is told about relays."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcompute.cli.options.cluster import RELAY_PORT, ClusterArguments, ServingArguments
from shardcompute.cli.serve.foreground import ClusterPlan
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings
from shardcompute.node.reach.cluster_relays import ClusterRelays, RelayOptions
from shardcompute.relay.tickets import parse_cluster_key
from shardcompute.security import ClusterAuthority
from support.network.relays import key_of

Cli = Callable[..., Any]


def test_the_key_for_a_relay_is_shown_where_the_cluster_is(cli: Cli, tmp_path: Path) -> None:
    authority = ClusterAuthority.create(tmp_path / "cluster" / "authority", "home", now_s=time.time())
    shown = cli("relay", "--show-key", "--data-dir", str(tmp_path / "cluster"))
    assert parse_cluster_key(shown.stdout) == key_of(authority)
    missing = cli("relay", "--show-key", "--data-dir", str(tmp_path / "elsewhere"))
    assert missing.exit_code == 2
    assert "there is no cluster in" in missing.stderr


@pytest.mark.parametrize(
    ("key", "problem"), [((), "needs the public key"), (("sck1.zz",), "no cluster's key")]
)
def test_a_relay_without_a_good_key_does_not_start(cli: Cli, key: tuple[str, ...], problem: str) -> None:
    result = cli("relay", *key)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("given", "port"),
    [
        ({}, RELAY_PORT),
        ({"cluster_port": 0}, 0),
        ({"cluster_port": 9000}, 9002),
        ({"relay_port": 443}, 443),
        ({"no_relay": True}, None),
    ],
)
def test_where_the_relay_beside_the_coordinator_is(
    given: dict[str, Any], port: int | None, tmp_path: Path
) -> None:
    cluster = ClusterArguments(data_dir=tmp_path, relay=["tcp://a:1,wss://a", "tcp://b:2"], **given)
    options = ClusterPlan(ServingArguments(port=0), cluster, "native").cluster_options(load_settings())
    assert options.relays == RelayOptions(port, (("tcp://a:1", "wss://a"), ("tcp://b:2",)))


def test_relays_that_are_none_are_said(tmp_path: Path) -> None:
    authority = ClusterAuthority.create(tmp_path, "home", now_s=time.time())
    with pytest.raises(UsageError, match="no relay's address"):
        ClusterRelays(
            authority, RelayOptions(None, (("http://a",),)), host="127.0.0.1", advertise="", entries={}
        )


def test_a_relay_has_no_tensor_library() -> None:
    program = (
        "import sys; import shardcompute.relay.server, shardcompute.cli.serve.relay; "
        "print([name for name in ('numpy', 'onnxruntime', 'torch', 'shardcompute.wire') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""`plan` on energy, cost and machines that are not there, as a command."""

from __future__ import annotations

import json

import pytest

from shardcompute.cli.cluster.plan import parse_machines
from shardcompute.control import events as happened
from shardcompute.control.state import Holding
from shardcompute.core.errors import UsageError
from support.swarm.fake_cluster import NOW_S

from ..cluster_lab import HERE


def test_what_nobody_knows_is_said_to_be_unknown(lab, cli) -> None:  # type: ignore[no-untyped-def]
    done = cli("plan", "org/tiny", "--weights", "int8", "--price-kwh", "0.3", "--what-if", "2x1GB@5G", *HERE)
    assert done.exit_code == 0
    assert "energy: unknown, nobody has said what" in done.stdout
    assert "with 2 more machines of 1.0 GiB (of the stated speed, else as " in done.stdout
    told = json.loads(
        cli("plan", "org/tiny", "--weights", "int8", "--json", "--what-if", "1GB", *HERE).stdout
    )
    assert told["chains"][0]["cost"]["watts"] is None
    assert told["what_if"]["kv_tokens_after"] >= told["what_if"]["kv_tokens_before"]
    assert json.loads(cli("plan", "org/tiny", "--weights", "int8", "--json", *HERE).stdout)["what_if"] is None


def test_machines_are_written_as_people_do() -> None:
    assert parse_machines("8GB") == {"count": 1, "memory_bytes": 8 << 30, "bytes_per_s": None}
    assert parse_machines("2x8G@20G/s") == {
        "count": 2,
        "memory_bytes": 8 << 30,
        "bytes_per_s": float(20 << 30),
    }


@pytest.mark.parametrize("text", ["", "x8G", "0x8G", "65x8G", "-1x8G", "8", "8G@", "twox8G", "8G@fast", "2x"])
def test_what_is_no_machine_is_refused(text: str) -> None:
    if text in ("8", "8G@", "x8G"):  # bytes, and what may be left out
        assert parse_machines(text)["count"] == 1
        return
    with pytest.raises(UsageError):
        parse_machines(text)


def test_machines_that_are_only_counted_have_no_price(cli) -> None:  # type: ignore[no-untyped-def]
    done = cli("plan", "smollm2", "--machines", "16G", "--price-kwh", "0.3")
    assert done.exit_code == 2
    assert "--price-kwh" in done.stderr


def test_nodes_say_what_a_machine_does_for_the_others(lab, cli) -> None:  # type: ignore[no-untyped-def]
    seed = Holding("org/tiny", 0, 2)
    lab.cluster.join("weak", name="phone", memory_bytes=1, seed_bytes=1 << 30)
    life = lab.cluster.coordinator.state.nodes["weak"].incarnation
    lab.cluster.coordinator.post(happened.SeedChosen("weak", life, seed))
    assert "phone fetches layers 0 to 1 of org/tiny to seed it" in cli("nodes", *HERE).stderr
    lab.cluster.coordinator.post(happened.WeightsSeeded("weak", life, "org/tiny", 0, 2))
    lab.cluster.coordinator.post(happened.NodeSeen("weak", life, NOW_S, seeded_bytes=3 << 20))
    shown = cli("nodes", *HERE)
    assert "seeds layers 0 to 1 of org/tiny, 3.0 MiB given so far: no ring needs it" in shown.stderr
    assert [line.split()[-1] for line in shown.stdout.splitlines() if line.startswith("phone ")] == ["seeds"]

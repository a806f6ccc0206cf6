"""`plan` on energy, cost and machines that are not there, as a command."""

from __future__ import annotations

import json

import pytest

from shardcompute.cli.cluster.plan import parse_machines
from shardcompute.core.errors import UsageError

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

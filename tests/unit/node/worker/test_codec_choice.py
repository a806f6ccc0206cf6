from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardcompute.control.events import LinkMeasured, NodeJoined
from shardcompute.control.state import ClusterState
from shardcompute.control.transitions.apply import apply
from shardcompute.core.errors import UsageError
from shardcompute.node.coordinator.chain_connector import wire_between
from shardcompute.node.rpc.commands import Wire
from shardcompute.node.worker.codec_choice import EXPECTED, QUALITY_BOUND, LinkPace, choose_codec
from shardcompute.wire import CODECS
from shardcompute.wire.codecs.mode import check_wire

RESULTS = Path(__file__).parents[4] / "bench" / "results" / "codecs.json"
ALL = tuple(CODECS)
WIDTH = 4096
LAN = Wire("auto", ALL, rtt_s=200e-6, bytes_per_s=1e9)
ETHERNET = Wire("auto", ALL, rtt_s=500e-6, bytes_per_s=110e6)
HOME = Wire("auto", ALL, rtt_s=40e-3, bytes_per_s=1.25e6)


def test_every_codec_has_a_measured_loss() -> None:
    assert set(EXPECTED) == set(CODECS)
    assert all(EXPECTED[name].kl == 0 for name in ("exact", "exact+deflate"))
    assert all(EXPECTED[name].kl > 0 for name in CODECS if not name.startswith("exact"))


def test_the_table_is_what_was_measured() -> None:
    results = json.loads(RESULTS.read_text())["results"]
    measured = {
        (each["codec"], each["metric"]): each["value"]
        for each in results
        if each["weights"] == "native" and each["cuts"] == 5
    }
    for name, expected in EXPECTED.items():
        assert expected.kl == pytest.approx(measured[name, "mean_kl"], rel=0.05)
        body_bytes = 5 * CODECS[name].body_bytes(1, 576)
        assert expected.share == pytest.approx(measured[name, "bytes_per_token"] / body_bytes, rel=0.02)


@pytest.mark.parametrize("wire", [LAN, ETHERNET, HOME])
@pytest.mark.parametrize("rows", [1, 512])
def test_exact_and_names_are_obeyed(wire: Wire, rows: int) -> None:
    for name in CODECS:
        told = Wire(name, ALL, wire.rtt_s, wire.bytes_per_s)
        assert choose_codec(told, rows, WIDTH) == name


def test_a_small_frame_on_a_fast_link_stays_exact() -> None:
    assert choose_codec(LAN, 1, WIDTH) == "exact"
    assert choose_codec(HOME, 1, 64) == "exact", "40 ms of latency hide a few bytes"


def test_a_big_frame_on_a_thin_link_gets_the_narrowest_that_is_good_enough() -> None:
    chosen = choose_codec(HOME, 512, WIDTH)
    good = [name for name in CODECS if EXPECTED[name].kl <= QUALITY_BOUND]

    def size(name: str) -> float:
        return EXPECTED[name].share * CODECS[name].body_bytes(512, WIDTH)

    assert chosen == min(good, key=size)
    assert size(chosen) < 0.3 * size("exact")


def test_what_saves_less_than_it_costs_is_not_used() -> None:
    # At 110 MB/s a byte takes 9 ns: less than deflate takes for a value.
    assert "+deflate" not in choose_codec(ETHERNET, 512, WIDTH)
    assert choose_codec(Wire("auto", ALL, 1e-4, 1e12), 512, WIDTH) == "exact"


def test_the_bound_is_kept() -> None:
    for bound in (0.0, *sorted(expected.kl for expected in EXPECTED.values())):
        assert EXPECTED[choose_codec(HOME, 512, WIDTH, bound=bound)].kl <= bound
    assert choose_codec(HOME, 512, WIDTH, bound=0.0) == "exact+deflate"


def test_a_codec_that_the_next_stage_does_not_know_is_never_sent() -> None:
    older = ("exact", "bf16", "int5")
    assert choose_codec(Wire("int8", older), 512, WIDTH) == "exact"
    assert choose_codec(Wire("int5", older), 512, WIDTH) == "exact", "nor one that we do not know"
    assert choose_codec(Wire("auto", older, 0.04, 1e6), 512, WIDTH) == "bf16"
    assert choose_codec(Wire("auto", (), 0.04, 1e6), 512, WIDTH) == "exact"


def test_newer_measurements_count_and_none_leave_it_exact() -> None:
    unknown = Wire("auto", ALL)
    assert choose_codec(unknown, 512, WIDTH) == "exact"
    assert choose_codec(unknown, 512, WIDTH, bytes_per_s=1e6) == choose_codec(HOME, 512, WIDTH)
    assert choose_codec(HOME, 1, WIDTH, bytes_per_s=1e10) == "exact"


def test_only_sends_that_had_to_wait_tell_how_fast_a_link_is() -> None:
    pace = LinkPace()
    pace.saw(1 << 20, 0.001)
    pace.saw(1000, 0.5)
    assert pace.bytes_per_s is None
    pace.saw(1_000_000, 0.5)
    assert pace.bytes_per_s == 2e6
    for _ in range(50):
        pace.saw(1_000_000, 0.1)
    assert pace.bytes_per_s == pytest.approx(1e7, rel=0.01)


def test_names_are_checked() -> None:
    for name in ("auto", *CODECS):
        assert check_wire(name) == name
    with pytest.raises(UsageError, match="'int3'"):
        check_wire("int3")


def joined(node: str, **described: tuple[str, ...]) -> NodeJoined:
    return NodeJoined(
        node=node,
        name=node,
        role="worker",
        address=f"tcp://{node}:1",
        device="cpu",
        memory_bytes=1 << 30,
        threads=1,
        version="1",
        incarnation=1,
        now_s=0.0,
        **described,  # type: ignore[arg-type]
    )


def test_a_stage_is_told_what_is_known_of_its_link() -> None:
    state = ClusterState(driver="d")
    for event in (joined("a", codecs=ALL), joined("b", codecs=("exact", "fp8")), joined("old")):
        state = apply(state, event)
    state = apply(state, LinkMeasured("b", "a", 0.01, 2e6))
    assert wire_between(state, "auto", "a", "b") == Wire("auto", ("exact", "fp8"), 0.01, 2e6)
    assert wire_between(state, "auto", "b", "a") == Wire("auto", ALL, 0.01, 2e6)
    assert wire_between(state, "int8", "a", "old") == Wire("int8", ("exact",), 0.0, 0.0)
    assert wire_between(state, "int8", "a", "d") == Wire("int8", ("exact",), 0.0, 0.0)

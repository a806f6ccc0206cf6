"""Activations in other forms than float32: chains answer, and what was lost once is lost the same way again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardcompute.core.generation import GenerationRequest
from shardcompute.node.rpc.link_probe import LinkQuality
from shardcompute.node.worker import worker as worker_room
from shardcompute.node.worker.codec_choice import EXPECTED, QUALITY_BOUND
from support.models.requests import mixture
from support.swarm import lab as lab_room
from support.swarm.lab import Alone, Answer, LabSwarm, swarm

STANDBYS = (2, 2, 2, 2, 2, 2)
"""Three stages, and a standby for each."""
TOKENS, ARRIVED = 60, 5


def answers(lab: LabSwarm, requests: Sequence[GenerationRequest]) -> list[Answer]:
    return [talk.result() for talk in [lab.start(request) for request in requests]]


def codecs_of(lab: LabSwarm) -> list[str]:
    """In which form each stage sent the newest step on."""
    return [timing.codec for timing in lab.cluster.pool.timings()[lab.chain().id]]


@pytest.mark.parametrize("stage", [1, 2], ids=["middle", "last"])
def test_a_worker_dies_and_the_text_stays_that_of_the_lossy_chain(
    tmp_path: Path, tiny: Path, alone: Alone, stage: int
) -> None:
    requests = mixture(alone, 4, TOKENS)
    with swarm(tmp_path / "calm", tiny, layers=(2, 2, 2), stages=3, wire="int8") as lab:
        # One after the other, so that no two of them share a frame.
        expected = [answers(lab, [request])[0] for request in requests]
        assert codecs_of(lab) == ["int8", "int8", ""]
    assert expected != [alone.answer(request) for request in requests], (
        "int8 must show, or this proves nothing"
    )
    with swarm(tmp_path / "harmed", tiny, layers=STANDBYS, stages=3, standbys=3, wire="int8") as lab:
        talks = [lab.start(request) for request in requests]
        lab.wait_until(lambda: all(len(talk.tokens) >= ARRIVED for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(stage))
        assert [talk.result() for talk in talks] == expected
        resumption = lab.activations[-1].resumption
        assert resumption is not None
        assert len(resumption.lengths or ()) >= len(requests), "sessions were replayed, not computed again"


@pytest.mark.parametrize("wire", ["exact", "exact+deflate"])
def test_lossless_wires_change_nothing(tmp_path: Path, tiny: Path, alone: Alone, wire: str) -> None:
    requests = mixture(alone, 3, 30)
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, wire=wire) as lab:
        assert answers(lab, requests) == [alone.answer(request) for request in requests]
        assert codecs_of(lab) == [wire, wire, ""]


def test_auto_leaves_fast_links_exact(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    requests = mixture(alone, 3, 30)
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, wire="auto") as lab:
        assert answers(lab, requests) == [alone.answer(request) for request in requests]
        assert codecs_of(lab) == ["exact", "exact", ""]


def test_auto_narrows_what_goes_over_thin_links(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_room, "LinkQuality", lambda rtt_s, bytes_per_s: LinkQuality(1e-4, 10_000.0))
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, wire="auto") as lab:
        [answer] = answers(lab, mixture(alone, 1, 30))
        assert answer.tokens
        *sent, last = codecs_of(lab)
        hops = lab.cluster.pool.load().traffic
    assert last == ""
    assert all(name != "exact" and EXPECTED[name].kl <= QUALITY_BOUND for name in sent)
    # Frames of a prompt may go in another form than those of single tokens, but none as they are.
    assert set(sent) <= {hop.codec for hop in hops} <= set(EXPECTED) - {"exact"}
    assert len({(hop.sender, hop.receiver) for hop in hops}) == 2
    assert all(hop.frames > 0 and hop.size_bytes > 0 for hop in hops)


def test_a_worker_that_reads_only_floats_is_sent_nothing_else(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_room, "CODECS", ("exact",))
    requests = mixture(alone, 2, 30)
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, wire="int8") as lab:
        assert answers(lab, requests) == [alone.answer(request) for request in requests]
        assert codecs_of(lab) == ["exact", "exact", ""]


def test_a_standby_that_reads_only_floats_is_told_the_same_values(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that went out in int8 are told to it as what they had become, and what follows stays lossless."""
    request = mixture(alone, 1, TOKENS)[0]
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, wire="int8") as lab:
        monkeypatch.setattr(worker_room, "CODECS", ("exact",))
        lab.add_worker(2)
        lab.wait_serving(stages=3, standbys=1)
        talk = lab.start(request)
        lab.wait_until(lambda: len(talk.tokens) >= ARRIVED, "some tokens")
        replaced = lab.chain().standbys[0]
        position = [stage.start for stage in lab.chain().stages].index(replaced.start)
        lab.kill(lab.stage(position))
        assert talk.result().finish is not None
        codecs = codecs_of(lab)
    expected = ["int8", "int8", ""]
    if position:
        expected[position - 1] = "exact"
    assert codecs == expected

"""Receipts of answers that a swarm computed: they verify, whatever befell the swarm meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest, Speculation
from shardcompute.security.receipts import (
    Receipt,
    ReceiptVerdict,
    new_receipt_id,
    read_receipt,
    verify_receipt,
)
from shardcompute.security.receipts.trust import authority_by_fingerprint
from support.models.drafters import Oracle
from support.models.requests import greedy, mixture, prompts
from support.swarm.lab import SPREAD, Alone, LabSwarm, Talk, swarm

STANDBYS = (2, 2, 2, 2, 2, 2)
"""Three stages, and a standby for each."""
TOKENS, ARRIVED = 80, 35
"""By then every stage has signed for some rows, and has others to sign for."""


def start(lab: LabSwarm, requests: Sequence[GenerationRequest]) -> list[Talk]:
    return [lab.start(replace(each, receipt=new_receipt_id())) for each in requests]


def check(lab: LabSwarm, talk: Talk) -> tuple[Receipt, ReceiptVerdict]:
    """The receipt of an answer, verified against the cluster's own authority."""
    answer = [choice.id for choice in talk.result().tokens]
    content = lab.cluster.pool.receipts.find(talk.request.receipt, "", wait_s=30.0)
    assert content is not None
    receipt = read_receipt(content)
    assert receipt.tokens == [*talk.request.prompt, *answer]
    return receipt, verify_receipt(receipt, authority_by_fingerprint(receipt, lab.cluster.fingerprint))


def wait_for_tokens(lab: LabSwarm, talks: Sequence[Talk]) -> None:
    lab.wait_until(lambda: all(len(talk.tokens) >= ARRIVED for talk in talks), "tokens of all streams")


def assert_whole(lab: LabSwarm, talks: Sequence[Talk], stages: int) -> None:
    for talk in talks:
        receipt, verdict = check(lab, talk)
        assert [len(run.nodes) for run in receipt.runs] == [stages]
        assert (verdict.unsigned, verdict.picked) == ((), len(talk.tokens))
        claims = {each.header.claim.node: each.header.claim for each in receipt.transcripts}
        assert list(claims) == receipt.runs[0].nodes
        assert {claim.model for claim in claims.values()} == {lab.model}
        assert all(claim.exactness.startswith("onnx-") for claim in claims.values())


def test_three_stages_with_packed_wires(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, wire="int8") as lab:
        assert_whole(lab, start(lab, mixture(alone, 3, TOKENS)), 3)
        # What an answer shares with an earlier one is not signed for again.
        shared = max(prompts(alone.service.tokenizer), key=len)[:100]
        for end, reused in ((70, 0), (80, 100)):
            [talk] = start(lab, [greedy((*shared, end), 10)])
            receipt, verdict = check(lab, talk)
            assert receipt.reused_rows == reused
            assert verdict.rows == len(receipt.tokens) - 1 - reused


def test_one_stage_that_goes_on_by_itself(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(6,), stages=1) as lab:
        assert_whole(lab, start(lab, mixture(alone, 2, TOKENS)), 1)


class Guesses:
    """A drafter that is often right, and often not."""

    def __init__(self, alone: Alone, requests: Sequence[GenerationRequest]) -> None:
        self._answers = {
            each.prompt: [choice.id for choice in alone.answer(each).tokens] for each in requests
        }

    def open(self, tokenizer: object, vocab_size: int) -> list[Oracle]:
        return [Oracle(self._answers.__getitem__, lambda at: at % 7 in (3, 5), vocabulary=vocab_size)]


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_machine_is_lost_amid_answers_with_drafts(
    tmp_path: Path, tiny: Path, alone: Alone, stage: int
) -> None:
    requests = mixture(alone, 3, TOKENS)
    guesses = Guesses(alone, requests)
    wishes = [Speculation("model", 6, 3), Speculation("off"), Speculation("model", 2, 1)]
    asked = [replace(each, speculation=wish) for each, wish in zip(requests, wishes, strict=True)]
    with swarm(
        tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3, kv_tokens=8192, open_drafters=guesses.open
    ) as lab:
        talks = start(lab, asked)
        wait_for_tokens(lab, talks)
        before = lab.chain().nodes
        lab.kill(lab.stage(stage))
        for talk, request in zip(talks, requests, strict=True):
            assert talk.result() == alone.answer(request)
        after = lab.chain().nodes
        assert any(talk.timings is not None and talk.timings.drafted_tokens for talk in talks)
        told = [check(lab, talk) for talk in talks]
    lost = set(before) - set(after)
    interrupted = [(receipt, verdict) for receipt, verdict in told if len(receipt.runs) > 1]
    assert interrupted, "some answer was under way"
    for receipt, verdict in told:
        assert {each.node for each in verdict.unsigned} <= lost
        assert receipt.runs[0].nodes == list(before)
    for receipt, verdict in interrupted:
        assert receipt.runs[-1].nodes == list(after)
        assert receipt.runs[-1].epoch > receipt.runs[0].epoch
        assert lost <= {*verdict.nodes, *(each.node for each in verdict.unsigned)}


def test_survivors_that_share_the_layers_start_again(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(4, 4, 4), stages=3, placing=SPREAD) as lab:
        talks = start(lab, mixture(alone, 2, TOKENS))
        wait_for_tokens(lab, talks)
        lab.kill(lab.stage(1))
        for talk in talks:
            receipt, verdict = check(lab, talk)
            first, *_, last = receipt.runs
            assert (len(first.nodes), len(last.nodes)) == (3, 2)
            assert (last.start, last.stop) == (0, len(receipt.tokens) - 1), "all of it was computed again"
            assert verdict.picked == len(talk.tokens)


def test_sessions_that_give_up_their_memory(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, kv_tokens=448) as lab:
        talks = start(lab, mixture(alone, 4, 150))
        told = [check(lab, talk) for talk in talks]
    assert any(len(receipt.runs) > 1 for receipt, _ in told), "some had to start again"
    for talk, (_, verdict) in zip(talks, told, strict=True):
        assert (verdict.unsigned, verdict.picked) == ((), len(talk.tokens))


def test_a_driver_on_another_machine_that_is_lost(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1, home_rtt_s=0.05) as lab:
        host = lab.wait_hosted()
        talks = start(lab, mixture(alone, 2, 20))
        for talk in talks:
            receipt, verdict = check(lab, talk)
            assert receipt.driver == host.node
            assert not verdict.unsigned
        talks = start(lab, mixture(alone, 2, TOKENS))
        wait_for_tokens(lab, talks)
        lab.kill(host)
        for talk in talks:
            receipt, verdict = check(lab, talk)
            assert receipt.driver == lab.cluster.node
            assert receipt.given_tokens >= receipt.prompt_tokens + ARRIVED
            assert verdict.picked == len(receipt.tokens) - receipt.given_tokens


def test_one_process_alone_has_nobody_to_sign(alone: Alone) -> None:
    request = replace(mixture(alone, 1, 4)[0], receipt=new_receipt_id())
    with pytest.raises(UsageError, match="alone"):
        list(alone.service.stream(request))

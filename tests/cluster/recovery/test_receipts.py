"""Receipts of answers that a swarm computed: they verify, whatever befell the swarm meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardcompute.core.generation import GenerationRequest
from shardcompute.security.receipts import (
    Receipt,
    ReceiptVerdict,
    new_receipt_id,
    read_receipt,
    verify_receipt,
)
from support.models.requests import mixture
from support.swarm.lab import Alone, LabSwarm, Talk, swarm

STANDBYS = (2, 2, 2, 2, 2, 2)
TOKENS = 100


def with_receipt(request: GenerationRequest) -> GenerationRequest:
    return replace(request, receipt=new_receipt_id())


def receipt_of(lab: LabSwarm, talk: Talk) -> Receipt:
    content = lab.cluster.pool.receipts.find(talk.request.receipt, None, wait_s=20.0)
    assert content is not None
    return read_receipt(content)


def check(lab: LabSwarm, talk: Talk) -> tuple[Receipt, ReceiptVerdict]:
    receipt = receipt_of(lab, talk)
    answer = [choice.id for choice in talk.result().tokens]
    assert receipt.tokens == [*talk.request.prompt, *answer]
    return receipt, verify_receipt(receipt, receipt.authority)


def test_three_stages(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        talks = [lab.start(with_receipt(each)) for each in mixture(alone, 4, TOKENS)]
        for talk in talks:
            assert talk.result() == alone.answer(replace(talk.request, receipt=""))
        for talk in talks:
            receipt, verdict = check(lab, talk)
            assert [len(run.nodes) for run in receipt.runs] == [3]
            assert not verdict.unsigned
            assert verdict.picked == len(talk.tokens)

"""Crediting: the work that a receipt shows, machine by machine, and what an audit takes back of it. Pure.

A row counts for a stage that signed for it where it computed and sent it on, once, times its layers. Rows that a stage
was only told when it took over are not counted, nor are rows known from an earlier answer: nobody signs for having sent
those. Where several compute a stage its work is shared out evenly among them; the remainder is the first one's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from shardcompute.core.generation import GenerationRequest
from shardcompute.security.receipts.records import Receipt, ReceiptRun, StageClaim
from shardcompute.security.receipts.verification import ReceiptVerdict
from shardcompute.trust.judgement import Judgement
from shardcompute.trust.ledger import TokenWork
from shardcompute.trust.ledger.records import NO_WORK

WorkShown = dict[str, TokenWork]


def work_of(receipt: Receipt, verdict: ReceiptVerdict | None = None) -> WorkShown:
    """By node. Without a verdict: what the receipt claims, whether it fits or not."""
    found: defaultdict[str, TokenWork] = defaultdict(TokenWork)
    unsigned = () if verdict is None else verdict.unsigned
    for run in receipt.runs:
        for node in run.nodes:
            claim = _claim_of(receipt, run, node)
            if claim is None or claim.stop <= claim.start:
                continue
            missing = sum(
                max(0, min(each.stop, run.stop) - max(each.start, run.start))
                for each in unsigned
                if (each.node, each.epoch) == (node, run.epoch)
            )
            rows = max(0, run.stop - run.start - missing)
            for member, work in _shared(claim, rows):
                found[member] += work
    return {node: work for node, work in found.items() if work != NO_WORK}


def is_answer_of(receipt: Receipt, request: GenerationRequest) -> bool:
    """Whether a receipt is of what was asked for: one that nobody asked for could be made up by those it credits."""
    prompt = tuple(request.prompt)
    is_so_long = len(prompt) < len(receipt.tokens) <= len(prompt) + request.max_tokens
    return receipt.id == request.receipt and is_so_long and tuple(receipt.tokens[: len(prompt)]) == prompt


def contradicted(node: str, auditors: Collection[str], judgement: Judgement) -> list[str]:
    """Whose work in the answer an audit of `node` contradicts: all that it blames but auditors, who are blamed for what
    they computed for the audit."""
    return [
        blame.node
        for blame in judgement.blames
        if blame.finding != "passed" and (blame.node == node or blame.node not in auditors)
    ]


def _claim_of(receipt: Receipt, run: ReceiptRun, node: str) -> StageClaim | None:
    """With which layers a node took part in a run: by the transcript that it began last until then."""
    headers = [
        each.header
        for each in receipt.transcripts
        if each.header.claim.node == node
        and each.header.session == run.session
        and each.header.opened_epoch <= run.epoch
    ]
    return max(headers, key=lambda each: each.opened_epoch).claim if headers else None


def _shared(claim: StageClaim, rows: int) -> list[tuple[str, TokenWork]]:
    layers, members = claim.stop - claim.start, claim.ranks or (claim.node,)
    each, rest = divmod(rows * layers, len(members))
    return [
        (member, TokenWork(rows, each + (rest if place == 0 else 0))) for place, member in enumerate(members)
    ]

"""A tape signs for what is kept, in blocks that every stage cuts alike."""

from __future__ import annotations

from pathlib import Path

from shardcompute.security.receipts import BlockCommitment, verify_receipt
from shardcompute.security.receipts.records import blocks_of, digest_ids
from support.paper_chain import PaperChain, interrupted_receipt, plain_receipt, tokens_of


def spans(commitments: list[BlockCommitment]) -> list[tuple[int, int]]:
    return [(each.start, each.stop) for each in commitments]


def test_blocks_end_at_multiples_whatever_they_begin_with() -> None:
    assert list(blocks_of(20, 70)) == [(20, 32), (32, 64), (64, 70)]
    assert list(blocks_of(64, 64)) == []


def test_whole_blocks_are_signed_for_as_soon_as_rows_follow_them(tmp_path: Path) -> None:
    chain = PaperChain(tmp_path)
    chain.begin(tokens_of(200), 40)
    first = chain.stages[0]
    assert spans(first.signed) == []
    chain.decode(40, 41)
    assert spans(first.signed) == [(0, 32)]
    chain.decode(41, 64)
    assert spans(first.signed) == [(0, 32)], "row 64 has not come yet"
    chain.decode(64, 65)
    assert spans(first.signed) == [(0, 32), (32, 64)]
    chain.cut(65)
    assert spans(first.signed) == [(0, 32), (32, 64), (64, 65)]


def test_a_draft_that_was_rejected_is_signed_for_by_nobody(tmp_path: Path) -> None:
    chain, receipt = PaperChain(tmp_path), tokens_of(70)
    chain.begin(receipt, 30)
    rows = chain.decode(30, 69, drafts=4)
    chain.cut(rows)
    first = chain.stages[0].signed
    assert spans(first) == [(0, 32), (32, 64), (64, 69)]
    kept = [digest_ids(receipt[start:stop]) for start, stop in blocks_of(0, 69)]
    assert [digest for each in first for digest in each.inputs] == kept


def test_what_was_signed_for_too_early_is_signed_for_again(tmp_path: Path) -> None:
    """Frames that are ahead of what is known may fill a block with drafts that turn out wrong."""
    chain = PaperChain(tmp_path)
    chain.begin(tokens_of(120), 40)
    rows = chain.decode(40, 119, drafts=3, ahead=9)
    chain.cut(rows)
    signed = spans(chain.stages[1].signed)
    assert len(signed) > len(set(signed)), "some block was signed for twice"
    receipt = chain.receipt()
    verdict = verify_receipt(receipt, receipt.authority)
    assert not verdict.unsigned
    assert verdict.picked == 80


def test_rows_that_leave_a_gap_end_the_tape(tmp_path: Path) -> None:
    chain = PaperChain(tmp_path)
    chain.begin(tokens_of(100), 40)
    stage = chain.stages[0]
    made = stage.tape.write(90, 99, chain.epoch, [1], [b"row"], [b"row"], stage.identity.sign)
    assert made == []
    assert stage.tape.is_broken
    assert stage.tape.cut(40, stage.identity.sign) == []


def test_long_answers_forget_rows_that_were_signed_for(tmp_path: Path) -> None:
    chain = PaperChain(tmp_path, stages=1)
    tokens = tokens_of(5000)
    chain.begin(tokens, 4990, chunk=512)
    rows = chain.decode(4990, 4999)
    chain.cut(rows)
    assert len(chain.stages[0].tape._inputs) < 2 * 1024 + 512
    receipt = chain.receipt()
    assert verify_receipt(receipt, receipt.authority).rows == 4999


def test_a_pick_stands_where_its_row_is_computed_again_in_silence(tmp_path: Path) -> None:
    chain = PaperChain(tmp_path)
    tokens = tokens_of(60)
    chain.begin(tokens, 40)
    rows = chain.decode(40, 50)
    chain.step(45, tokens[45:50], [None] * 5)
    rows = chain.decode(rows, 59)
    chain.cut(rows)
    receipt = chain.receipt()
    assert verify_receipt(receipt, receipt.authority).picked == 20


def test_whoever_took_over_signs_for_what_it_was_told(tmp_path: Path) -> None:
    chain, receipt = interrupted_receipt(tmp_path)
    replayed = [each for each in chain.stages[1].signed if each.is_replay]
    assert spans(replayed) == [(0, 32), (32, 64), (64, 90)]
    assert all(not each.outputs for each in replayed)
    assert [run.epoch for run in receipt.runs] == [3, 4]
    assert receipt.runs[0].nodes[1] != receipt.runs[1].nodes[1]


def test_answers_of_one_stage_have_receipts_too(tmp_path: Path) -> None:
    chain = PaperChain(tmp_path, stages=1)
    chain.begin(tokens_of(60), 10)
    chain.cut(chain.decode(10, 59))
    receipt = chain.receipt()
    assert verify_receipt(receipt, receipt.authority).compared == 4


def test_commitments_are_a_chain(tmp_path: Path) -> None:
    _, receipt = plain_receipt(tmp_path)
    for transcript in receipt.transcripts:
        assert [each.number for each in transcript.commitments] == list(range(len(transcript.commitments)))
        assert len({each.previous for each in transcript.commitments}) == len(transcript.commitments)

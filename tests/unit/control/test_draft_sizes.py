"""A first stage that drafts needs room for the head, and nobody else does."""

from __future__ import annotations

from shardcompute.control.sizes import sizes_of
from support.models.plain_model import plain_model

PLAIN = plain_model(layer_bytes=(100,) * 4, embedding_bytes=70)
DRAFTING = plain_model(layer_bytes=(100,) * 4, embedding_bytes=70, draft_bytes=55)


def test_only_a_first_stage_with_others_behind_it_needs_more() -> None:
    plain, drafting = sizes_of(PLAIN), sizes_of(DRAFTING)
    more = {
        (start, stop): drafting.memory_bytes(start, stop) - plain.memory_bytes(start, stop)
        for start in range(4)
        for stop in range(start + 1, 5)
    }
    assert more == {(start, stop): 55 if start == 0 and stop < 4 else 0 for start, stop in more}
    assert drafting.total_bytes == plain.total_bytes
    assert DRAFTING.can_self_draft
    assert not PLAIN.can_self_draft


def test_the_head_is_fetched_with_a_new_first_stage() -> None:
    plain, drafting = sizes_of(PLAIN), sizes_of(DRAFTING)
    assert drafting.bytes_to_move(0, 2, []) == plain.bytes_to_move(0, 2, []) + 55
    assert drafting.bytes_to_move(0, 2, [(0, 2)]) == 0
    assert drafting.bytes_to_move(0, 4, []) == plain.bytes_to_move(0, 4, [])

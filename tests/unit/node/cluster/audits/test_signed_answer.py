"""What a stage shows of an answer is held against what it signed for, in whatever pieces it comes."""

from __future__ import annotations

import hashlib

import numpy as np

from shardcompute.node.cluster.audits.signed_answer import SignedStage
from shardcompute.security.receipts.records import StageClaim, digest_rows

ROWS = np.random.default_rng(1).standard_normal((32, 6)).astype("<f4")
CLAIM = StageClaim(
    node="b",
    start=0,
    stop=2,
    is_last=False,
    model="m",
    fingerprint="f",
    form="native",
    exactness="x",
    version="1",
)


def signed() -> SignedStage:
    digest = digest_rows([hashlib.sha256(row.data).digest() for row in ROWS])
    return SignedStage(CLAIM, b"", {0: digest})


def test_rows_are_known_in_any_pieces() -> None:
    assert signed().has_sent([ROWS])
    assert signed().has_sent([ROWS[:5], ROWS[5:]])


def test_other_rows_and_rows_of_other_widths_are_not_what_was_signed() -> None:
    assert not signed().has_sent([ROWS[:5], ROWS[6:], ROWS[:1]])
    assert not signed().has_sent([ROWS[:5], ROWS[5:, :3]]), "nobody escapes by what cannot be joined"

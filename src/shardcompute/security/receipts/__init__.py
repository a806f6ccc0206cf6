"""Receipts: who claims to have computed an answer from what, signed by each stage and checked without any of them.

    tape = SessionTape(header)                       # at a stage: what came in and went out, row by row
    signed = tape.cut(length, identity.sign)         # commitments to blocks of rows, chained and signed
    receipt = sign_receipt(Receipt(…), identity)     # at the driver: what all stages signed, joined
    verdict = verify_receipt(receipt, authority_pem) # anywhere: raises ReceiptError that names a field

Pure values and functions: no clock, no files, no links. A receipt shows that adjacent stages signed for the same bytes
and that the last one signed for these tokens; it does not show that the computing in between was right.
"""

from __future__ import annotations

from shardcompute.security.receipts.records import (
    BLOCK_ROWS,
    BlockCommitment,
    Receipt,
    ReceiptRun,
    StageClaim,
    StageTranscript,
    TranscriptHeader,
    id_of,
    new_receipt_id,
    read_receipt,
    sign_receipt,
    write_receipt,
)
from shardcompute.security.receipts.tape import NO_PICK, SessionTape
from shardcompute.security.receipts.verification import (
    ReceiptError,
    ReceiptVerdict,
    UnsignedRows,
    verify_receipt,
)

__all__ = [
    "BLOCK_ROWS",
    "NO_PICK",
    "BlockCommitment",
    "Receipt",
    "ReceiptError",
    "ReceiptRun",
    "ReceiptVerdict",
    "SessionTape",
    "StageClaim",
    "StageTranscript",
    "TranscriptHeader",
    "UnsignedRows",
    "id_of",
    "new_receipt_id",
    "read_receipt",
    "sign_receipt",
    "verify_receipt",
    "write_receipt",
]

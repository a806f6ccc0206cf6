"""`run --receipt FILE`: has the cluster sign for an answer, and keeps what it signed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardcompute.core.errors import SourceError, UsageError

if TYPE_CHECKING:
    from shardcompute.cli.chat.remote import RemoteModel
    from shardcompute.core.generation import GenerationRequest


def check_receipt_option(file: Path | None, remote: RemoteModel | None, *, is_question: bool) -> None:
    """UsageError where there is nobody to sign, or no one answer to sign for."""
    if file is None:
        return
    if remote is None:
        raise UsageError(
            "--receipt needs a cluster that answers: this process has no key that anybody knows",
            hint="start one with `shardcompute up`, or give --url",
        )
    if not is_question:
        raise UsageError("--receipt is for one answer", hint="give a prompt")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", hint="make it, or name another file")


@dataclass(frozen=True, slots=True)
class ReceiptFile:
    """Where the receipt of one answer goes, and who answers."""

    path: Path
    remote: RemoteModel | None

    def asked_for(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, receipt="asked for")

    def write(self) -> str:
        """Fetch the receipt and write it down; what there is to say of that."""
        assert self.remote is not None
        client = self.remote.client
        if not client.receipt_id:
            raise UsageError(
                "the server gave no receipt for this answer",
                hint="it may run an older release of ShardCompute",
            )
        try:
            self.path.write_bytes(client.receipt(client.receipt_id))
        except OSError as error:
            raise SourceError(
                f"{self.path} cannot be written: {error.strerror}", hint="choose another file"
            ) from error
        return f"receipt: {self.path} (check it with: shardcompute receipt verify {self.path})"

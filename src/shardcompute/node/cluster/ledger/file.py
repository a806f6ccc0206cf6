"""Ledger file: lines that are only ever added, on the disk before anybody is told of the head over them.

What is written at once is some entries and a head over all so far. A crash amid that leaves entries without a head, or
part of a line: nobody was told of those, and they are cut off when the file is opened again. Anything else that does
not fit is damage, and named.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

import msgspec

from shardcompute.core.errors import SourceError
from shardcompute.security.private_files import make_private
from shardcompute.trust.ledger import Accounts, Contribution, Entry, LedgerError, LedgerHeader, TreeHead
from shardcompute.trust.ledger.records import MOST_LINE_BYTES, head_bytes, read_line, write_line
from shardcompute.trust.ledger.replay import CheckSignature, LedgerReplay
from shardcompute.trust.ledger.tree import hash_leaf

log = logging.getLogger(__name__)
LEDGER_FILE = "ledger.jsonl"
Sign = Callable[[bytes], bytes]


class LedgerFile:
    """An open ledger. Methods may be called from any thread."""

    def __init__(
        self,
        path: Path,
        header: LedgerHeader,
        sign: Sign,
        check: CheckSignature,
        clock: Callable[[], float],
    ) -> None:
        """Goes on with the file, or begins it with `header`. SourceError where it is damaged or another's."""
        self.path = path
        self._own = header
        self._sign = sign
        self._clock = clock
        self._lock = threading.Lock()
        self._length = 0
        """Bytes up to the last head."""
        self._replay = LedgerReplay(lambda *signed: True)
        make_private(path)
        try:
            self._file = FileIO(path, "r+")
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._recover(check)
        except LedgerError as error:
            self._file.close()
            raise SourceError(
                f"the ledger {path} is damaged at {error}",
                hint="put back a copy of it that a member's last head goes on from; nothing is added to it until then",
            ) from error
        except OSError as error:
            self._file.close()
            raise _unusable(path, error) from error
        except BaseException:
            self._file.close()
            raise

    @property
    def head(self) -> TreeHead | None:
        """The last that was acknowledged; None: nothing was ever written."""
        with self._lock:
            return self._replay.head

    @property
    def accounts(self) -> Accounts:
        """As of that head. They are replaced by what is added, and never changed."""
        with self._lock:
            return self._replay.accounts

    @property
    def header(self) -> LedgerHeader:
        return self._own

    @property
    def length_bytes(self) -> int:
        with self._lock:
            return self._length

    def contributions(self) -> tuple[Contribution, ...]:
        return self.accounts.contributions(int(self._clock()))

    def append(self, entries: Sequence[Entry]) -> TreeHead:
        """Number and date these, and add them; all or none. When this returns they are on the disk under the head that
        it gives. SourceError where that cannot be done, LedgerError for what cannot follow."""
        with self._lock:
            accounts = copy.deepcopy(self._replay.accounts)
            size = self._replay.tree.size
            now_s = max(int(self._clock()), accounts.last_s)
            try:
                lines = self._lines_of(entries, now_s, accounts)
                head = self._head(now_s)
                self._write(b"".join(line + b"\n" for line in (*lines, write_line(head))))
            except OSError as error:
                self._replay.tree.truncate(size)
                raise _unusable(self.path, error) from error
            except BaseException:
                self._replay.tree.truncate(size)
                raise
            self._replay.accounts, self._replay.head = accounts, head
            self._replay.header = self._own
            return head

    def prove_since(self, size: int) -> tuple[TreeHead | None, list[bytes]]:
        """The last head, and the proof that the tree goes on from its first `size` entries; none where it has not so
        many."""
        with self._lock:
            head = self._replay.head
            if head is None or not 0 <= size <= head.size:
                return head, []
            return head, self._replay.tree.prove_consistency(size, head.size)

    def prove_entry(self, number: int) -> tuple[TreeHead, bytes, list[bytes]]:
        """The last head, an entry's line, and the proof that it is under that head. LedgerError where there is none."""
        with self._lock:
            head = self._replay.head
            if head is None or not 0 <= number < head.size:
                raise LedgerError(f"entry {number}", "the ledger has no such entry")
            return head, self._line_of(number), self._replay.tree.prove_inclusion(number, head.size)

    def content(self) -> bytes:
        """The whole file, up to the last head."""
        with self._lock:
            return self.path.read_bytes()[: self._length]

    def close(self) -> None:
        with self._lock:
            self._file.close()

    # With the lock held

    def _lines_of(self, entries: Sequence[Entry], now_s: int, accounts: Accounts) -> list[bytes]:
        """Number, date and count these, and put them into the tree."""
        lines = [] if self._length else [write_line(self._own)]
        for number, entry in enumerate(entries, self._replay.tree.size):
            numbered = msgspec.structs.replace(entry, number=number, at_s=now_s)
            accounts.take(numbered, f"entry {number}")
            line = write_line(numbered)
            # What would not be read again must not be written.
            read_line(line, f"entry {number}")
            lines.append(line)
            self._replay.tree.append(hash_leaf(line))
        return lines

    def _head(self, now_s: int) -> TreeHead:
        tree, own = self._replay.tree, self._own
        unsigned = TreeHead(
            cluster=own.cluster, log=own.log, size=tree.size, root=tree.root().hex(), signed_s=now_s
        )
        return msgspec.structs.replace(unsigned, signature=self._sign(head_bytes(unsigned)).hex())

    def _write(self, content: bytes) -> None:
        # What an earlier attempt may have left is not to stand before it.
        self._file.truncate(self._length)
        self._file.seek(self._length)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        os.fsync(self._file.fileno())
        self._length += len(content)

    def _line_of(self, number: int) -> bytes:
        with self.path.open("rb") as lines:
            for line in lines:
                record = read_line(line[:-1], f"entry {number}")
                if not isinstance(record, LedgerHeader | TreeHead) and record.number == number:
                    return line[:-1]
        raise LedgerError(f"entry {number}", "it is not in the file")

    def _recover(self, check: CheckSignature) -> None:
        """Read all that is under a head, and cut off what is not."""
        offset = 0
        pending: list[bytes] = []
        with self.path.open("rb") as lines:
            while line := lines.readline(MOST_LINE_BYTES + 2):
                if not line.endswith(b"\n") and len(line) <= MOST_LINE_BYTES + 1:
                    break
                try:
                    record = read_line(line[:-1], f"entry {self._replay.tree.size + len(pending)}")
                except LedgerError:
                    # Where a machine lost its power amid a write, parts of what was not acknowledged may be zeros.
                    lines.seek(self._length)
                    if b"\x00" in lines.read():
                        break
                    raise
                pending.append(line[:-1])
                offset += len(line)
                if isinstance(record, TreeHead):
                    for each in pending:
                        self._replay.take(each)
                    pending, self._length = [], offset
        self._check_owner(check)
        behind = os.fstat(self._file.fileno()).st_size - self._length
        if behind:
            log.warning(
                "%d bytes behind the last head of the ledger were never acknowledged: cut off", behind
            )
            self._file.truncate(self._length)
            os.fsync(self._file.fileno())

    def _check_owner(self, check: CheckSignature) -> None:
        header, head = self._replay.header, self._replay.head
        if header is None or head is None:
            return
        if header != self._own:
            raise SourceError(
                f"the ledger {self.path} is that of {header.log} in cluster {header.cluster}",
                hint="put it aside: this coordinator begins its own",
            )
        if not check(header.authority, bytes.fromhex(head.signature), head_bytes(head)):
            raise LedgerError(
                f"head over {head.size}.signature", "the cluster's authority has not signed this"
            )


def _unusable(path: Path, error: OSError) -> SourceError:
    return SourceError(
        f"the ledger {path} cannot be written: {error.strerror}",
        hint="free some disk space, and check that this folder can be written to",
    )

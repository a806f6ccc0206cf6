"""Ledger follower: a node asks its coordinator for the head of the ledger now and then, keeps the last one that goes on
from the one before it, and says it aloud where one does not.

What was seen is in the node's folder, so that a coordinator that forgets, or tells another story after a restart, is
noticed by whoever was there before. A head that does not fit is kept beside the good one: both are signed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shardcompute.core.errors import SourceError
from shardcompute.security.authority import is_signed_by_authority
from shardcompute.security.credentials import Credentials
from shardcompute.security.private_files import read_private, replace_private
from shardcompute.trust.ledger import Doubt, LedgerError, SeenLedger, TreeHead, judge_head
from shardcompute.trust.ledger.following import MOST_LOGS
from shardcompute.trust.ledger.records import head_bytes, read_line
from shardcompute.wire.control import LedgerDoubted, LedgerShown, LookAtLedger

log = logging.getLogger(__name__)
SEEN_FILE = "ledger-seen.json"
LOOK_EVERY_S = 30.0
_SAY_EVERY_S = 3600.0


class LedgerFollower:
    """Methods may be called from any thread."""

    def __init__(
        self,
        credentials: Callable[[], Credentials],
        seeded_bytes: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seeded_bytes` says what the node has sent to others of weights."""
        self._seeded_bytes = seeded_bytes
        self._credentials = credentials
        self._clock = clock
        self._lock = threading.Lock()
        self._has_ledger = False
        self._look_at_s = 0.0
        self._seen: SeenLedger | None = None
        self._said: tuple[Doubt, float] | None = None
        """What was said last, and when."""

    def begin(self, *, has_ledger: bool) -> None:
        """The node was registered by a coordinator: it is asked at once."""
        with self._lock:
            self._has_ledger, self._look_at_s = has_ledger, 0.0

    def next_look(self, coordinator: str) -> LookAtLedger | None:
        """What to ask this coordinator now; None: nothing yet."""
        with self._lock:
            if not self._has_ledger or self._clock() < self._look_at_s:
                return None
            self._look_at_s = self._clock() + LOOK_EVERY_S
            known = self._load().heads.get(coordinator)
            return LookAtLedger(0 if known is None else known.size, self._seeded_bytes())

    def take(self, message: LedgerShown, coordinator: str) -> LedgerDoubted | None:
        """Check what a coordinator shows, and keep it where it fits. What to tell it; None: nothing new."""
        with self._lock:
            seen = self._load()
            known = seen.heads.get(coordinator)
            shown = self._read(message, coordinator)
            if shown is None:
                doubt: Doubt | None = Doubt("forged", "what is shown as the head of the ledger is none")
            else:
                doubt = judge_head(known, shown, message.proof, is_signed=self._is_signed(shown))
            if doubt is not None:
                return self._refuse(seen, coordinator, shown, doubt)
            if shown is not None and (known is None or shown.size > known.size):
                heads = {**seen.heads, coordinator: shown}
                while len(heads) > MOST_LOGS:
                    del heads[next(each for each in heads if each != coordinator)]
                self._keep(SeenLedger(heads=heads, broken=seen.broken))
            was_said, self._said = self._said, None
            if was_said is not None:
                log.warning("the ledger of %s goes on again from what was seen before", coordinator)
                return LedgerDoubted("")
            return None

    # With the lock held

    def _refuse(
        self, seen: SeenLedger, coordinator: str, shown: TreeHead | None, doubt: Doubt
    ) -> LedgerDoubted:
        """The head that was good stays. Said aloud when it is new, and every hour."""
        now_s = self._clock()
        if self._said is None or self._said[0] != doubt or now_s - self._said[1] >= _SAY_EVERY_S:
            self._said = (doubt, now_s)
            log.error(
                "the ledger of %s is not believed (%s): %s. Ask its operator why; the head that was seen before is "
                "kept in %s, and is forgotten if that file is deleted",
                coordinator,
                doubt.kind,
                doubt.reason,
                self._path,
            )
        is_signed = shown is not None and doubt.kind != "forged"
        if (
            shown is not None
            and is_signed
            and coordinator not in seen.broken
            and len(seen.broken) < MOST_LOGS
        ):
            self._keep(SeenLedger(heads=seen.heads, broken={**seen.broken, coordinator: shown}))
        return LedgerDoubted(f"{doubt.kind}: {doubt.reason}")

    def _read(self, message: LedgerShown, coordinator: str) -> TreeHead | None:
        try:
            record = read_line(message.head, "head")
        except LedgerError:
            return None
        own = self._credentials().own.cluster
        is_own = isinstance(record, TreeHead) and (record.cluster, record.log) == (own, coordinator)
        return record if is_own and isinstance(record, TreeHead) else None

    def _is_signed(self, head: TreeHead) -> bool:
        authority_pem = self._credentials().authority_pem
        return is_signed_by_authority(authority_pem, bytes.fromhex(head.signature), head_bytes(head))

    @property
    def _path(self) -> Path:
        return self._credentials().identity.key_path.parent / SEEN_FILE

    def _load(self) -> SeenLedger:
        if self._seen is None:
            try:
                self._seen = msgspec.json.decode(read_private(self._path), type=SeenLedger)
            except FileNotFoundError:
                self._seen = SeenLedger()
            except (ValueError, SourceError) as error:
                log.error("what was seen of the ledger cannot be read (%s), and is begun anew", error)
                self._seen = SeenLedger()
        return self._seen

    def _keep(self, seen: SeenLedger) -> None:
        self._seen = seen
        try:
            replace_private(self._path, msgspec.json.format(msgspec.json.encode(seen), indent=1) + b"\n")
        except SourceError as error:
            log.warning("what was seen of the ledger is lost with this process: %s", error.message)

"""Ledger follower: a member notices a fork, a rollback, a gap and a forgery, also after a restart, and says so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from shardcompute.node.cluster.ledger.file import LedgerFile
from shardcompute.node.rpc.ledger_follower import LOOK_EVERY_S, SEEN_FILE, LedgerFollower
from shardcompute.security.credentials import Credentials
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.names import Role
from shardcompute.trust.ledger import Entry, SeenLedger
from shardcompute.trust.ledger.records import write_line
from shardcompute.wire.control import LedgerShown, LookAtLedger
from support.ledgers import BATCHES, COORDINATOR, LedgerLab, SetClock, layout, member, opened


class Member:
    """A node's folder, and what it makes of a ledger over several lives."""

    def __init__(self, folder: Path, lab: LedgerLab) -> None:
        identity = NodeIdentity.open(folder)
        pem = lab.authority.issue(
            identity.certificate_request(),
            node_id=identity.node_id,
            roles={Role.WORKER},
            now_s=1_000_000.0,
        )
        self._credentials = Credentials(identity, pem, lab.authority.certificate_pem)
        self.path = folder / SEEN_FILE
        self.clock = SetClock(0.0)
        self.restart()

    def restart(self) -> None:
        self.follower = LedgerFollower(lambda: self._credentials, lambda: 7, self.clock)
        self.follower.begin(has_ledger=True)

    def look(self, file: LedgerFile) -> str | None:
        """What the member says to what the coordinator shows; None: nothing."""
        self.clock.now_s += LOOK_EVERY_S
        asked = self.follower.next_look(COORDINATOR)
        assert isinstance(asked, LookAtLedger)
        head, proof = file.prove_since(asked.size)
        assert head is not None
        return self.take(LedgerShown(write_line(head), proof))

    def take(self, shown: LedgerShown) -> str | None:
        said = self.follower.take(shown, COORDINATOR)
        return None if said is None else said.reason

    @property
    def seen(self) -> SeenLedger:
        return msgspec.json.decode(self.path.read_bytes(), type=SeenLedger)


@pytest.fixture
def lab(tmp_path: Path) -> LedgerLab:
    return LedgerLab(tmp_path / "cluster")


@pytest.fixture
def node(tmp_path: Path, lab: LedgerLab) -> Member:
    (tmp_path / "member").mkdir(mode=0o700)
    return Member(tmp_path / "member", lab)


def anew(lab: LedgerLab, batches: Sequence[Sequence[Entry]]) -> LedgerFile:
    """The coordinator's file, replaced by one with these entries, signed by the same key."""
    lab.path.unlink(missing_ok=True)
    file = lab.open()
    for batch in batches:
        file.append(batch)
    return file


def test_a_ledger_that_grows_is_believed_and_its_last_head_kept(lab: LedgerLab, node: Member) -> None:
    file = lab.open()
    for batch in BATCHES:
        head = file.append(batch)
        assert node.look(file) is None
        assert node.seen.heads[COORDINATOR] == head
    file.close()


@pytest.mark.parametrize("has_restarted", [False, True])
def test_a_rollback_is_noticed_and_not_adopted(
    lab: LedgerLab, node: Member, has_restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = anew(lab, BATCHES)
    assert node.look(file) is None
    known = node.seen.heads[COORDINATOR]
    file.close()
    shorter = anew(lab, BATCHES[:2])
    if has_restarted:
        node.restart()
    with caplog.at_level(logging.ERROR):
        said = node.look(shorter)
    assert said is not None
    assert said.startswith("rollback: the ledger has 4 entries and had 10")
    assert "is not believed (rollback)" in caplog.text
    assert node.seen.heads[COORDINATOR] == known
    assert node.seen.broken[COORDINATOR] == shorter.head, "the proof against who signed both"
    shorter.close()


@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_fork_is_noticed_and_not_adopted(lab: LedgerLab, node: Member, more: int) -> None:
    file = anew(lab, BATCHES[:3])
    assert node.look(file) is None
    known = node.seen.heads[COORDINATOR]
    file.close()
    other = anew(lab, [(opened(),), (member("a"), member("x"), layout(1, "a", "x")), *BATCHES[2:3]])
    for number in range(more):
        other.append([member(f"more-{number}")])
    node.restart()
    said = node.look(other)
    assert said is not None
    assert said.startswith("fork: ")
    assert node.seen.heads[COORDINATOR] == known
    other.close()


def test_a_gap_is_noticed(lab: LedgerLab, node: Member) -> None:
    file = anew(lab, BATCHES[:2])
    assert node.look(file) is None
    known = node.seen.heads[COORDINATOR]
    head = file.append(BATCHES[2])
    said = node.take(LedgerShown(write_line(head), []))
    assert said is not None
    assert said.startswith("gap: the ledger has 6 entries")
    assert node.seen.heads[COORDINATOR] == known
    file.close()


def test_what_the_authority_has_not_signed_is_not_believed(
    lab: LedgerLab, node: Member, tmp_path: Path
) -> None:
    other = LedgerLab(tmp_path / "other")
    file = anew(other, BATCHES)
    said = node.look(file)
    assert said is not None
    assert said.startswith("forged: ")
    assert not node.path.exists()
    head = file.head
    file.close()
    assert head is not None
    for line in (
        b"",
        b"{}",
        b"\xff" * 40,
        write_line(lab.header),
        write_line(msgspec.structs.replace(head, log="x")),
    ):
        said = node.take(LedgerShown(line, []))
        assert said is not None
        assert said.startswith("forged: ")


def test_a_ledger_that_was_put_right_is_believed_again(lab: LedgerLab, node: Member) -> None:
    file = anew(lab, BATCHES)
    assert node.look(file) is None
    whole = lab.path.read_bytes()
    file.close()
    shorter = anew(lab, BATCHES[:2])
    assert node.look(shorter)
    shorter.close()
    lab.path.write_bytes(whole)
    right = lab.open()
    assert node.look(right) == ""
    assert node.look(right) is None
    right.close()


def test_nothing_is_asked_of_a_coordinator_without_a_ledger_or_too_often(node: Member) -> None:
    node.follower.begin(has_ledger=False)
    assert node.follower.next_look(COORDINATOR) is None
    node.follower.begin(has_ledger=True)
    assert node.follower.next_look(COORDINATOR) == LookAtLedger(0, 7)
    assert node.follower.next_look(COORDINATOR) is None


def test_a_file_of_heads_that_is_damaged_is_said_and_begun_anew(
    lab: LedgerLab, node: Member, caplog: pytest.LogCaptureFixture
) -> None:
    file = anew(lab, BATCHES)
    node.look(file)
    node.path.write_bytes(b"{")
    node.restart()
    with caplog.at_level(logging.ERROR):
        assert node.look(file) is None
    assert "cannot be read" in caplog.text
    assert node.seen.heads[COORDINATOR] == file.head
    file.close()

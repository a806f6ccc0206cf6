"""Other users of the same machine: what they may not read, and folders that they could have prepared for us."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcompute.core.errors import SourceError, UsageError
from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.node.enrolment.stored import join_from, open_enrolled
from shardcompute.node.process.pidfile import CLUSTER_FILE, claim
from shardcompute.security import Role, parse_token
from shardcompute.security.private_files import open_private_folder, read_private, replace_private
from support.swarm.siege import Siege

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes and owners")
ANOTHER_USER = 4711
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file to another user"
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def start_cluster(folder: Path) -> None:
    with Cluster(ClusterOptions(folder, port=0, join_port=0)):
        pass


def start_from(folder: Path) -> None:
    with claim(folder / CLUSTER_FILE):
        pass


STARTS: dict[str, Callable[[Path], None]] = {
    "a cluster": start_cluster,
    "a process": start_from,
    "an enrolled node": lambda folder: open_enrolled(folder) and None,
}


@pytest.fixture
def loose_umask() -> Iterator[None]:
    """As in many containers: whatever does not say otherwise is for everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("loose_umask")
def test_new_folders_and_all_in_them_are_for_their_owner(tmp_path: Path) -> None:
    home = tmp_path / "home"
    start_cluster(home / "cluster")
    assert mode_of(home) == 0o700, "also what lies above was made by us"
    found = [home / "cluster", *(home / "cluster").rglob("*")]
    loose = {str(path): oct(mode_of(path)) for path in found if mode_of(path) & 0o077}
    assert loose == {}
    assert len(found) > 5


def test_shards_and_served_weights_are_for_their_owner(besieged: Siege) -> None:
    found = [
        path
        for pattern in ("*/shards/**/*", "cluster/served/**/*", "cluster/journal*")
        for path in besieged.lab.folder.glob(pattern)
        if path.is_file()
    ]
    assert len(found) > 10
    assert {oct(mode_of(path)) for path in found} == {"0o600"}


def test_what_was_open_is_closed_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cluster"
    start_cluster(folder)
    for path in (folder, folder / "journal.sqlite", folder / "authority" / "authority.pem"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            start_cluster(folder)
        assert mode_of(path) & 0o077 == 0
        assert f"{path}: other users could" in caplog.text


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
class TestFoldersThatOthersCouldHavePrepared:
    def test_everybody_can_write_to_it(self, tmp_path: Path, start: Callable[[Path], None]) -> None:
        folder = tmp_path / "open"
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(UsageError, match="everybody can write to") as caught:
            start(folder)
        assert f"chmod 700 {folder}" in caught.value.hint
        assert list(folder.iterdir()) == [], "nothing was put there"

    def test_it_is_a_link(self, tmp_path: Path, start: Callable[[Path], None]) -> None:
        target = tmp_path / "elsewhere"
        target.mkdir(mode=0o700)
        (tmp_path / "link").symlink_to(target)
        with pytest.raises(UsageError, match="is a link") as caught:
            start(tmp_path / "link")
        assert str(target) in caught.value.hint
        assert list(target.iterdir()) == []

    @needs_root
    def test_it_belongs_to_another_user(self, tmp_path: Path, start: Callable[[Path], None]) -> None:
        folder = tmp_path / "theirs"
        folder.mkdir(mode=0o700)
        os.chown(folder, ANOTHER_USER, ANOTHER_USER)
        with pytest.raises(UsageError, match=f"belongs to another user \\(id {ANOTHER_USER}\\)") as caught:
            start(folder)
        assert "chown" in caught.value.hint

    @needs_root
    def test_a_link_of_another_user_leads_there(self, tmp_path: Path, start: Callable[[Path], None]) -> None:
        (tmp_path / "mine" / "cluster").mkdir(parents=True, mode=0o700)
        link = tmp_path / "theirs"
        link.symlink_to(tmp_path / "mine")
        os.chown(link, ANOTHER_USER, ANOTHER_USER, follow_symlinks=False)
        with pytest.raises(UsageError, match="is a link of another user"):
            start(link / "cluster")


def test_as_another_user_it_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without being root: the folder stays, and we are somebody else."""
    replace_private(tmp_path / "mine" / "node.key", b"secret")
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
    with pytest.raises(UsageError, match="belongs to another user"):
        open_private_folder(tmp_path / "mine")
    if (tmp_path / "mine").stat().st_uid != 0:  # root may have put a key there, nobody else
        with pytest.raises(SourceError, match="belongs to another user"):
            read_private(tmp_path / "mine" / "node.key")


def test_a_home_behind_a_link_of_ones_own_is_fine(tmp_path: Path) -> None:
    (tmp_path / "disk2" / "me").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk2" / "me")
    start_cluster(tmp_path / "home" / ".local" / "share" / "cluster")
    assert (tmp_path / "disk2" / "me" / ".local" / "share" / "cluster" / "journal.sqlite").exists()


def test_shards_may_lie_on_another_disk(besieged: Siege, tmp_path: Path) -> None:
    """A link inside one's own folder is one's own decision."""
    folder = tmp_path / "worker"
    join_from(folder, besieged.lab.token)
    (tmp_path / "big disk").mkdir()
    (folder / "shards").symlink_to(tmp_path / "big disk")
    assert open_enrolled(folder).control_urls


def test_a_journal_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    start_cluster(folder)
    (folder / "journal.sqlite").rename(tmp_path / "elsewhere.sqlite")
    (folder / "journal.sqlite").symlink_to(tmp_path / "elsewhere.sqlite")
    with pytest.raises(SourceError, match="is a link"):
        start_cluster(folder)


def test_strangers_get_nothing_by_joining_into_an_open_folder(besieged: Siege, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="everybody can write to"):
        join_from(folder, parse_token(besieged.lab.cluster.access.create_token()))
    credentials, _ = join_cluster(besieged.lab.token, tmp_path / "good", Role.WORKER)
    assert mode_of(credentials.identity.key_path) == 0o600

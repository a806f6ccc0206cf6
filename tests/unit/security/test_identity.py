from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shardcompute.core.errors import DiskFullError, SourceError
from shardcompute.security import NodeIdentity, node_id_of, verify_signature
from shardcompute.security.private_files import create_private, read_private, replace_private


def test_first_use_makes_a_key_for_the_owner_alone_and_later_uses_keep_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "node"
    first = NodeIdentity.open(folder)
    assert NodeIdentity.open(folder) == first
    assert [path.name for path in folder.iterdir()] == ["node.key"]
    assert stat.S_IMODE(first.key_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert NodeIdentity.open(tmp_path / "other").node_id != first.node_id


def test_node_id_is_a_known_function_of_the_key() -> None:
    assert node_id_of(bytes(32)) == "nmzuhvlpymk6xo3epygfy"
    assert len(node_id_of(b"\1" * 32)) == 21


def test_private_part_stays_out_of_repr(tmp_path: Path) -> None:
    assert "private_key" not in repr(NodeIdentity.open(tmp_path))


def test_when_another_process_is_first_its_key_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = create_private

    def late(path: Path, content: bytes) -> None:
        monkeypatch.undo()
        NodeIdentity.open(tmp_path)
        real(path, content)

    monkeypatch.setattr("shardcompute.security.identity.create_private", late)
    assert NodeIdentity.open(tmp_path) == NodeIdentity.load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["node.key"]


def _p256_pem() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"-----BEGIN PRIVATE KEY-----\nMC4C", _p256_pem()])
def test_damaged_key_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    create_private(tmp_path / "node.key", content)
    with pytest.raises(SourceError, match=r"node\.key is damaged") as caught:
        NodeIdentity.open(tmp_path)
    assert "join the cluster again" in caught.value.hint
    assert (tmp_path / "node.key").read_bytes() == content


def test_key_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "node.key").mkdir()
    with pytest.raises(SourceError, match="cannot be read: Is a directory"):
        NodeIdentity.open(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize(
    ("mode", "is_warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)]
)
def test_key_that_others_can_read_is_closed_to_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    NodeIdentity.open(tmp_path).key_path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        NodeIdentity.load(tmp_path)
    assert ("for its owner alone" in caplog.text) is is_warned
    assert (tmp_path / "node.key").stat().st_mode & 0o777 == (0o600 if is_warned else mode)


def test_signature_is_for_one_key_and_one_message(tmp_path: Path) -> None:
    mine, other = NodeIdentity.open(tmp_path / "a"), NodeIdentity.open(tmp_path / "b")
    signature = mine.sign(b"receipt")
    assert verify_signature(mine.public_key, signature, b"receipt")
    assert not verify_signature(mine.public_key, signature, b"receipt!")
    assert not verify_signature(other.public_key, signature, b"receipt")
    assert not verify_signature(mine.public_key, signature[:-1], b"receipt")
    assert not verify_signature(b"short", signature, b"receipt")


def test_signature_is_not_one_over_the_bare_message(tmp_path: Path) -> None:
    identity = NodeIdentity.open(tmp_path)
    assert identity.sign(b"x") != identity.private_key.sign(b"x")


def test_private_files_are_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    create_private(path, b"old")
    with pytest.raises(FileExistsError):
        create_private(path, b"new")
    assert read_private(path) == b"old"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="cannot be written"):
        replace_private(path, b"new")
    assert read_private(path) == b"old"
    monkeypatch.undo()
    replace_private(path, b"new")
    assert read_private(path) == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_private_files_are_created_where_links_are_not_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    create_private(tmp_path / "secret", b"one")
    with pytest.raises(FileExistsError):
        create_private(tmp_path / "secret", b"two")
    assert read_private(tmp_path / "secret") == b"one"


def test_private_file_in_an_impossible_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match="cannot be written"):
        create_private(tmp_path / "file" / "secret", b"x")


def test_huge_private_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(SourceError, match="too large"):
        read_private(tmp_path / "secret")

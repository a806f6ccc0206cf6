"""Joining from a folder: once with a token, then without; never into two clusters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.errors import AuthError, LinkError, SourceError, UsageError
from shardcompute.node import launch
from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.membership import MEMBER_FILE, authority_of, is_enrolled, join_from, open_member
from shardcompute.security.tokens import JoinToken, parse_token


def _options(folder: Path, name: str = "home") -> ClusterOptions:
    return ClusterOptions(folder, name=name, port=0, join_port=0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(_options(tmp_path / "cluster")) as cluster:
        yield cluster


@pytest.fixture
def token(cluster: Cluster) -> JoinToken:
    return parse_token(cluster.create_token())


def test_folder_remembers_its_cluster(cluster: Cluster, token: JoinToken, tmp_path: Path) -> None:
    folder = tmp_path / "worker"
    with pytest.raises(UsageError, match="no cluster has been joined"):
        open_member(folder)
    joined = join_from(folder, token)
    assert joined.control_urls == (cluster.url,)
    assert (folder / MEMBER_FILE).stat().st_mode & 0o077 == 0
    again = open_member(folder)
    assert again.credentials.identity.node_id == joined.credentials.identity.node_id
    assert authority_of(again.credentials) == token.fingerprint
    assert is_enrolled(folder, token.fingerprint)
    assert not is_enrolled(folder, "0" * 64)
    assert not is_enrolled(tmp_path / "elsewhere", token.fingerprint)
    assert join_from(folder, token).credentials.identity.node_id == joined.credentials.identity.node_id


def test_folder_belongs_to_one_cluster(token: JoinToken, tmp_path: Path) -> None:
    folder = tmp_path / "worker"
    join_from(folder, token)
    with Cluster(_options(tmp_path / "other", "office")) as other:
        foreign = parse_token(other.create_token())
        with pytest.raises(UsageError, match="belongs to another cluster, 'home'"):
            join_from(folder, foreign)
    assert is_enrolled(folder, token.fingerprint)


def test_tokens_that_do_not_admit(cluster: Cluster, token: JoinToken, tmp_path: Path) -> None:
    cluster.revoke_token(token.token_id)
    with pytest.raises(AuthError, match="revoked"):
        join_from(tmp_path / "worker", token)
    with pytest.raises(LinkError, match="cannot be reached"):
        join_from(tmp_path / "worker", replace(token, addresses=("127.0.0.1:1",)))
    with pytest.raises(AuthError, match="another cluster"):
        join_from(tmp_path / "worker", replace(token, fingerprint="0" * 64))


def test_damaged_and_expired_papers_are_named(
    token: JoinToken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "worker"
    join_from(folder, token)
    monkeypatch.setattr("shardcompute.node.membership.time.time", lambda: 9e9)
    assert not is_enrolled(folder, token.fingerprint)
    with pytest.raises(AuthError, match="has run out"):
        open_member(folder)
    (folder / MEMBER_FILE).write_text("{")
    with pytest.raises(SourceError, match="is damaged"):
        open_member(folder)


def test_own_api_key_stays_until_it_is_revoked(cluster: Cluster) -> None:
    key = launch.api_key_of(cluster)
    assert launch.api_key_of(cluster) == key
    cluster.verify_key(key)
    [summary] = cluster.keys()
    cluster.revoke_key(summary.key_id)
    other = launch.api_key_of(cluster)
    assert other != key
    cluster.verify_key(other)


def test_cluster_keeps_its_name(cluster: Cluster, tmp_path: Path) -> None:
    launch.check_cluster_name_of(tmp_path / "cluster", "home")
    launch.check_cluster_name_of(tmp_path / "none", "office")
    with pytest.raises(UsageError, match="'home'"):
        launch.check_cluster_name_of(tmp_path / "cluster", "office")
    with pytest.raises(UsageError):
        launch.check_cluster_name_of(tmp_path / "none", "Not a name")


def test_machine_is_shared_out() -> None:
    assert [launch.choose_worker_count(n << 30) for n in (0, 1, 3, 4, 5, 64)] == [1, 1, 2, 2, 3, 3]
    shared = launch.share_machine(count=4)
    assert (shared.count, shared.threads >= 1) == (4, True)
    chosen = launch.share_machine(count=2, threads=3, max_memory_bytes=7)
    assert (chosen.count, chosen.threads, chosen.max_memory_bytes) == (2, 3, 7)

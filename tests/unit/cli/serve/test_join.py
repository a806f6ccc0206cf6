"""`join` without a token: which cluster is meant, what is asked, and where a code is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardcompute.cli.serve import join as joining
from shardcompute.cli.serve.foreground import is_announced
from shardcompute.core.errors import AuthError
from shardcompute.node.discovery import nearby
from shardcompute.node.discovery.nearby import NearbyCluster
from shardcompute.node.enrolment import pairing_client

Cli = Callable[..., Any]
HOME = NearbyCluster("home", "ab" * 16, ("10.0.0.1", "10.0.0.2"), 7421, 7420)
LAB = NearbyCluster("lab", "cd" * 16, ("10.0.0.3",), 9000, 7420)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Where codes were tried; they are wrong."""
    seen: list[tuple[str, str]] = []

    def pair(address: str, code: str, machine: str, *, others: Sequence[str] = ()) -> None:
        seen.extend((each, code) for each in (address, *others))
        raise AuthError("the code is wrong")

    monkeypatch.setattr(pairing_client, "pair", pair)
    return seen


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> list[NearbyCluster]:
    """The clusters that announce themselves."""
    found: list[NearbyCluster] = []
    monkeypatch.setattr(nearby, "find_nearby", lambda timeout_s: tuple(found))
    return found


def test_the_only_cluster_nearby_is_meant(cli: Cli, tried: list[Any], around: list[NearbyCluster]) -> None:
    around.append(HOME)
    done = cli("join", "--code", "1234 5678")
    assert done.exit_code == 10
    assert "pairing with home at 10.0.0.1 (abababab)" in done.stderr
    assert tried == [("10.0.0.1:7421", "1234 5678"), ("10.0.0.2:7421", "1234 5678")]


def test_a_wrong_code_is_tried_at_one_address_only(
    cli: Cli, tried: list[Any], around: list[NearbyCluster]
) -> None:
    around += [LAB, HOME]
    assert cli("join", "--cluster", "lab", "--code", "1").exit_code == 10
    assert tried == [("10.0.0.3:9000", "1")]


def test_of_several_one_must_be_named_where_nobody_can_be_asked(
    cli: Cli, tried: list[Any], around: list[NearbyCluster]
) -> None:
    around += [HOME, LAB]
    done = cli("join", "--code", "1")
    assert done.exit_code == 2
    assert "1  home at 10.0.0.1" in done.stderr
    assert "2  lab at 10.0.0.3" in done.stderr
    assert "--cluster NAME" in done.stderr
    assert tried == []


def test_of_several_one_is_asked_for(
    cli: Cli, tried: list[Any], around: list[NearbyCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    around += [HOME, LAB]
    monkeypatch.setattr(joining, "has_terminal_input", lambda stream: True)
    answers = ["2", "8765 4321"]
    monkeypatch.setattr("builtins.input", lambda: answers.pop(0))
    assert cli("join").exit_code == 10
    assert tried == [("10.0.0.3:9000", "8765 4321")]
    for wrong in ("0", "3", "x", "", "²"):
        answers[:] = [wrong]
        assert cli("join").exit_code == 2


def test_nobody_nearby(cli: Cli, tried: list[Any], around: list[NearbyCluster]) -> None:
    around.append(HOME)
    done = cli("join", "--cluster", "other", "--code", "1")
    assert done.exit_code == 2
    assert "no such cluster announces itself nearby" in done.stderr
    assert "--at HOST" in done.stderr


@pytest.mark.parametrize(
    ("at", "address"),
    [
        ("10.0.0.9", "10.0.0.9:7421"),
        ("10.0.0.9:80", "10.0.0.9:80"),
        ("host.example", "host.example:7421"),
        ("[fd00::1]", "[fd00::1]:7421"),
        ("[fd00::1]:80", "[fd00::1]:80"),
        ("fd00::1", "[fd00::1]:7421"),
    ],
)
def test_a_cluster_that_does_not_announce_itself(cli: Cli, tried: list[Any], at: str, address: str) -> None:
    assert cli("join", "--at", at, "--code", "1").exit_code == 10
    assert tried == [(address, "1")]


def test_without_a_code_and_a_terminal_it_says_where_one_is_shown(cli: Cli, tried: list[Any]) -> None:
    done = cli("join", "--at", "10.0.0.9")
    assert done.exit_code == 2
    assert "--code" in done.stderr
    assert tried == []


@pytest.mark.parametrize("other", [("--at", "x"), ("--cluster", "x"), ("--code", "1")])
def test_a_token_names_its_cluster_itself(cli: Cli, other: tuple[str, str]) -> None:
    done = cli("join", "sc1.x", *other)
    assert done.exit_code == 2
    assert "a token names its cluster itself" in done.stderr


def test_a_cluster_is_announced_where_others_can_come() -> None:
    assert is_announced(None, "0.0.0.0")
    assert is_announced(None, "192.168.1.5")
    assert not is_announced(None, "127.0.0.1")
    assert not is_announced(False, "0.0.0.0")
    assert is_announced(True, "127.0.0.1")

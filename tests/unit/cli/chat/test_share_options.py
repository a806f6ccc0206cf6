"""`run --share-layers`: which layers and which workers are meant."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardcompute.cli.chat.shares import choose_workers, describe
from shardcompute.cli.options.shares import ShareArguments
from shardcompute.core.errors import CapacityError, UsageError
from shardcompute.node.admin.views import NodeView


def node(name: str, host: str) -> NodeView:
    return cast(NodeView, SimpleNamespace(id=f"n{name}", name=name, address=f"tcp://{host}:7000"))


NODES = [node("a", "10.0.0.1"), node("b", "10.0.0.1"), node("c", "10.0.0.2")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-1", (0, 2, False)), ("3", (3, 4, False)), ("all", (0, 6, True)), ("5-5", (5, 6, False))],
)
def test_layers(text: str, expected: tuple[int, int, bool]) -> None:
    assert ShareArguments(text).layers(6) == expected


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "2-1", "0-6", "9", "1-2-3", "²"])
def test_layers_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--share-layers"):
        ShareArguments(text).layers(6)


def test_two_machines_are_preferred_to_one() -> None:
    assert [each.name for each in choose_workers(NODES, ())] == ["a", "c"]
    assert [each.name for each in choose_workers(NODES[:2], ())] == ["a", "b"]
    assert [each.name for each in choose_workers(NODES, ("nb", "a"))] == ["b", "a"]
    with pytest.raises(CapacityError, match="two workers"):
        choose_workers(NODES[:1], ())
    with pytest.raises(UsageError, match="d is no worker"):
        choose_workers(NODES, ("a", "d"))
    with pytest.raises(UsageError, match="several"):
        choose_workers([*NODES, node("a", "10.0.0.3")], ("a", "b"))


def test_names_of_workers() -> None:
    assert ShareArguments("0", "a, b").names == ("a", "b")
    for text in ("a", "a,a", "a,b,c", "a,"):
        with pytest.raises(UsageError, match="two workers"):
            _ = ShareArguments("0", text).names
    with pytest.raises(UsageError, match="needs --share-layers"):
        _ = ShareArguments(None, "a,b").is_given


def test_what_is_hidden_is_said() -> None:
    told = describe(NODES[1:], 0, 2, has_head=True)
    assert "layers 0 to 1 and the head" in told
    assert "both together learn all" in told


def test_shares_need_a_cluster(cli: Callable[..., Any]) -> None:
    result = cli("run", "fake", "hello", "--share-layers", "0-1")
    assert result.exit_code == 2
    assert "no cluster runs on this machine" in result.stderr
    for useless in ("--local", "--stages=2"):
        result = cli("run", "fake", "hello", "--share-layers", "0-1", useless)
        assert result.exit_code == 2
        assert "leave out --local and --stages" in result.stderr

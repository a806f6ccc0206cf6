"""Every command is answered: by the node, by the end of its link, or at once where it is not here."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.node.coordinator.node_registry import ConnectedNode, NodeRegistry, await_answer
from shardcompute.node.rpc.commands import Leave, Retire
from shardcompute.wire.control import CommandReply

from .conftest import FakePump


@pytest.fixture
def registry() -> NodeRegistry:
    return NodeRegistry()


def connect(registry: NodeRegistry, node: str, incarnation: int = 1) -> FakePump:
    pump = FakePump(registry, node)
    registry.add(ConnectedNode(node, incarnation, pump))  # type: ignore[arg-type]
    return pump


def ask(registry: NodeRegistry, node: str) -> list[CommandReply]:
    replies: list[CommandReply] = []
    registry.command(node, Leave(), replies.append)
    return replies


def test_an_answer_comes_back(registry: NodeRegistry) -> None:
    pump = connect(registry, "a")
    pump.answers[Leave] = b"done"
    [reply] = ask(registry, "a")
    assert (reply.error, reply.result) == ("", b"done")
    assert pump.commands == [Leave()]


def test_who_is_not_here_does_nothing(registry: NodeRegistry) -> None:
    [reply] = ask(registry, "a")
    assert reply.error == "it is not here"


def test_what_cannot_be_sent_was_not_done(registry: NodeRegistry) -> None:
    connect(registry, "a").close()
    [reply] = ask(registry, "a")
    assert reply.error == "it could not be told"


def test_the_end_of_a_link_answers_what_was_asked_over_it(registry: NodeRegistry) -> None:
    a, b = connect(registry, "a"), connect(registry, "b")
    a.answers[Leave] = b.answers[Leave] = None
    of_a, of_b = ask(registry, "a"), ask(registry, "b")
    assert registry.remove("a", a) is not None  # type: ignore[arg-type]
    assert [reply.error for reply in of_a] == ["its control link ended"]
    assert of_b == []
    assert registry.remove("a", a) is None, "it has left already"  # type: ignore[arg-type]


def test_a_node_that_dials_again_replaces_its_former_link(registry: NodeRegistry) -> None:
    former = connect(registry, "a")
    former.answers[Leave] = None
    replies = ask(registry, "a")
    newer = connect(registry, "a", 2)
    assert former.is_closed
    assert [reply.error for reply in replies] == ["its control link ended"]
    assert registry.remove("a", former) is None, "the end of the old link is not the node's"  # type: ignore[arg-type]
    assert [(each.incarnation, each.pump) for each in registry.all()] == [(2, newer)]


def test_an_answer_over_another_nodes_link_is_none(registry: NodeRegistry) -> None:
    a, b = connect(registry, "a"), connect(registry, "b")
    a.answers[Leave] = None
    replies = ask(registry, "a")
    number = a.messages[-1].number
    registry.answered(b, CommandReply(number, "", b"forged"))  # type: ignore[arg-type]
    assert replies == []
    registry.answered(a, CommandReply(number, "", b"true"))  # type: ignore[arg-type]
    registry.answered(a, CommandReply(number, "", b"again"))  # type: ignore[arg-type]
    assert [reply.result for reply in replies] == [b"true"]


def test_awaited_answers_are_results_or_errors(registry: NodeRegistry) -> None:
    pump = connect(registry, "a")
    pump.answers = {Leave: b"done", Retire: "no such chain"}
    assert await_answer("a", registry.ask("a", Leave())) == b"done"
    with pytest.raises(LinkError, match="a: no such chain"):
        await_answer("a", registry.ask("a", Retire("m#1")))
    pump.answers[Leave] = None
    with pytest.raises(LinkError, match="in time"):
        await_answer("a", registry.ask("a", Leave()), timeout_s=0.001)


def test_closing_ends_all_links(registry: NodeRegistry) -> None:
    pumps = [connect(registry, node) for node in "ab"]
    registry.close()
    assert all(pump.is_closed for pump in pumps)
    assert registry.all() == []

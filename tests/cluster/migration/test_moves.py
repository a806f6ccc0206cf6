"""Chains that move amid streams, with the KV of their sessions: the same tokens, and nothing computed again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcompute.control.events import NodeDrained
from shardcompute.node.rpc.commands import Connect, Connected, Peer
from shardcompute.node.rpc.session_ids import Resumption
from shardcompute.node.worker.migration import receiver, sender
from shardcompute.node.worker.stages.peer_links import PeerLinks
from shardcompute.node.worker.stages.stage_server import StageServer
from shardcompute.wire import KvPiece, LinkPump
from support.swarm.lab import SPREAD, STILL, Alone, LabSwarm, LabWorker, Talk, open_alone, swarm
from support.swarm.streams import assert_undisturbed, start_streams

ROOMY = (45, 45, 45)
"""Layers that machines have room for which hold a new stage beside the one that serves."""


def moved(lab: LabSwarm, leave: Callable[[], None]) -> Resumption | None:
    """What the chain still knew of its sessions after a machine was emptied."""
    before = len(lab.activations)
    leave()
    lab.wait_until(lambda: len(lab.activations) > before, lab.describe)
    return lab.activations[-1].resumption


def goes_on_with(resumed: Resumption | None, talks: list[Talk]) -> bool:
    """Whether all sessions that had begun go on from where they were, with nobody to be told anything."""
    return (
        resumed is not None
        and not resumed.has_new_first
        and resumed.lengths is not None
        and len(resumed.lengths) >= len([talk for talk in talks if not talk.is_over])
    )


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("has_standby", [True, False], ids=["to a standby", "to the others"])
def test_a_machine_that_leaves_gives_its_sessions_along(
    tmp_path: Path, tiny: Path, alone: Alone, stage: int, has_standby: bool
) -> None:
    """Greedy and sampled, with drafts and grammars; to a machine with the same layers, or to others with other cuts."""
    layers, placing = ((2, 2, 2, 2), STILL) if has_standby else (ROOMY, SPREAD)
    with swarm(tmp_path, tiny, layers=layers, stages=3, standbys=int(has_standby), placing=placing) as lab:
        talks = start_streams(lab, alone, 8)
        resumed = moved(lab, lambda: lab.leave(lab.stage(stage)))
        assert goes_on_with(resumed, talks)
        assert_undisturbed(lab, alone, talks)


def test_codes_and_their_scales_move(tmp_path: Path, tiny: Path) -> None:
    with (
        open_alone(tiny, kv_type="int8") as service,
        swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1, kv_type="int8") as lab,
    ):
        truth = Alone(service)
        talks = start_streams(lab, truth, 4)
        assert goes_on_with(moved(lab, lambda: lab.leave(_relieved(lab))), talks)
        assert_undisturbed(lab, truth, talks)


def test_damaged_rows_are_refused_and_sessions_replayed(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amid the copy a piece is not what its digest says: nothing of it is believed, and every answer is the same."""
    sent: list[KvPiece] = []
    message = sender._ReadRows.message

    def damaged(piece: sender._ReadRows) -> KvPiece:
        sent.append(message(piece))
        if len(sent) >= 3:
            object.__setattr__(piece, "content", memoryview(bytes(piece.content.nbytes)))
        return sent[-1]

    monkeypatch.setattr(sender._ReadRows, "message", damaged)
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = start_streams(lab, alone, 4)
        moved(lab, lambda: lab.leave(_relieved(lab)))
        assert len(sent) >= 3
        assert_undisturbed(lab, alone, talks)


def _relieved(lab: LabSwarm) -> LabWorker:
    """The machine whose layers the standby holds."""
    chain = lab.chain()
    standby = chain.standbys[0]
    stage = next(each for each in chain.stages if (each.start, each.stop) == (standby.start, standby.stop))
    return lab.worker(stage.node)


@pytest.mark.parametrize("dies", ["source", "target"])
def test_whoever_dies_amid_a_copy_costs_no_token(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2, 2), stages=3, standbys=2) as lab:
        talks = start_streams(lab, alone, 4)
        source = _relieved(lab)
        target = lab.worker(lab.chain().standbys[0].node)
        victim = source if dies == "source" else target
        write = receiver.ReceivedKv.write
        killed: list[str] = []

        def die(copy: receiver.ReceivedKv, *rows: object) -> None:
            if not killed:
                killed.append(victim.node)
                lab.network.kill(victim.node)
            write(copy, *rows)  # type: ignore[arg-type]

        monkeypatch.setattr(receiver.ReceivedKv, "write", die)
        lab.cluster.coordinator.post(NodeDrained(source.node))
        lab.wait_until(lambda: bool(killed), "rows of sessions on their way")
        lab.workers.remove(victim)
        victim.close()
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)


def test_nobody_is_dialled_while_answers_wait_for_the_switch(
    tmp_path: Path, tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links of the new layout are opened while sessions travel: between the last token of the old one and the first of
    the new one there are no handshakes."""
    connecting = threading.local()
    dialled: list[bool] = []
    connect, open_link = StageServer.connect, PeerLinks.open

    def connected(server: StageServer, command: Connect) -> Connected:
        connecting.is_so = command.kv_copy != 0 or command.keeps_sessions
        try:
            return connect(server, command)
        finally:
            connecting.is_so = False

    def opened(links: PeerLinks, to: Peer) -> LinkPump:
        if not links.has(to):
            dialled.append(getattr(connecting, "is_so", False))
        return open_link(links, to)

    monkeypatch.setattr(StageServer, "connect", connected)
    monkeypatch.setattr(PeerLinks, "open", opened)
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = start_streams(lab, alone, 4)
        before = len(dialled)
        assert goes_on_with(moved(lab, lambda: lab.leave(_relieved(lab))), talks)
        assert len(dialled) > before
        assert not any(dialled[before:])
        assert_undisturbed(lab, alone, talks)

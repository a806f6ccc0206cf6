"""A worker can say where each frame is, and whether what it computes is stuck, while it computes."""

from __future__ import annotations

from shardcompute.node.rpc.commands import StepTraced, TraceStep
from shardcompute.node.rpc.session_ids import first_session
from shardcompute.node.worker.stages.step_trace import StepTrace
from shardcompute.wire import SegmentHeader, StepFrame, pack_ids

NAMESPACE = 7


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def frame(sequence: int, *, epoch: int = 1, replay: bool = False) -> StepFrame:
    segment = SegmentHeader(first_session(NAMESPACE), 0, 1, 1, pack_ids([1]))
    return StepFrame("c", epoch, sequence, [segment], 1, 0, "", replay)


def find(trace: StepTrace, sequence: int, *, sender: str = "a", epoch: int = 1) -> str:
    command = TraceStep(chain="c", epoch=epoch, session_namespace=NAMESPACE, sequence=sequence, sender=sender)
    return trace.find(command).place


def test_a_frame_is_followed_and_others_are_not_mistaken_for_it() -> None:
    trace = StepTrace()
    assert find(trace, 5) == "away"
    for place in ("queued", "computing", "sending", "sent"):
        trace.place(frame(5), "a", place)  # type: ignore[arg-type]
        assert find(trace, 5) == place
    assert find(trace, 4) == find(trace, 6) == "away"
    assert find(trace, 5, sender="b") == "away", "only what the stage before sent counts"
    assert find(trace, 5, epoch=2) == "away"


def test_the_same_frame_once_more_does_not_hide_that_it_was_sent() -> None:
    trace = StepTrace()
    trace.place(frame(5), "a", "sent")
    trace.place(frame(5), "a", "queued")
    trace.place(frame(5), "a", "dropped")
    assert find(trace, 5) == "sent"


def test_what_is_remembered_is_bounded() -> None:
    trace = StepTrace()
    for sequence in range(1, 2000):
        trace.place(frame(sequence), "a", "sent")
    assert find(trace, 1999) == "sent"
    assert find(trace, 1) == "away"
    for sender in range(100):
        trace.place(frame(1), f"stranger {sender}", "queued")
    assert sum(find(trace, 1, sender=f"stranger {sender}") == "queued" for sender in range(100)) == 64


def test_stuck_is_who_is_at_one_thing_for_longer_than_that_takes() -> None:
    clock = Clock()
    trace = StepTrace(clock)
    assert trace.look() == StepTraced("away", 0.0, 0.0, 0)
    with trace.busy(10.0):
        clock.now_s += 9.0
        assert not trace.look().is_stuck
        clock.now_s += 2.0
        assert trace.look().is_stuck
        trace.advance()
        assert not trace.look().is_stuck, "a part of it is done"
    clock.now_s += 100.0
    assert trace.look() == StepTraced("away", 0.0, 10.0, 2)

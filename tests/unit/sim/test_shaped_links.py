"""Links that are shaped: frames come later, in order, all of them; a cut path holds them back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardcompute.core.errors import LinkClosedError, LinkError, SourceError, UsageError
from shardcompute.sim import Change, Conditions, apply_change, initial_conditions, ring_topology
from shardcompute.sim.shape_file import NetworkShape, ShapeReader, parse_shape_option, write_shape
from shardcompute.sim.shaped_links import ShapedLink, ShapedListener, ShapedTransport, Uplink
from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, InprocTransport, LinkOptions, Ping
from shardcompute.wire.control import TensorBytes
from support.network.lab_links import wait_until

NEAR = initial_conditions(ring_topology(2, 10, 1000), ["a", "b"])
PATIENCE_S = 10.0


class Weather:
    """Conditions that a test changes."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions

    def change(self, change: Change) -> None:
        self.conditions = apply_change(self.conditions, change)

    def shape(self) -> NetworkShape:
        return NetworkShape(self.conditions, {"b": "b"})


def hello(node: str, role: str = "stage") -> Hello:
    return Hello(VERSION_MIN, VERSION_MAX, node, role, "home")


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def weather() -> Weather:
    return Weather(NEAR)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextmanager
def opened(
    weather: Weather, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[ShapedLink, ShapedLink]]:
    inner = InprocTransport()
    with (
        ShapedTransport(inner, "b", weather, clock).listen("inproc://b", hello("nb", "")) as listener,
        ShapedTransport(inner, "a", weather, clock).dial("inproc://b", hello("na")) as near,
        listener.accept(PATIENCE_S) as far,
    ):
        yield near, far


@pytest.fixture
def ends(weather: Weather) -> Iterator[tuple[ShapedLink, ShapedLink]]:
    with opened(weather) as ends:
        yield ends


def test_ends_know_each_other(ends: tuple[ShapedLink, ShapedLink]) -> None:
    near, far = ends
    assert (near.peer, near.role) == ("nb", "")
    assert (far.peer, far.role) == ("na", "stage")
    assert near.version == far.version == VERSION_MAX


@pytest.mark.parametrize("is_back", [False, True], ids=["there", "back"])
def test_frames_arrive_late_and_in_order(weather: Weather, clock: Clock, is_back: bool) -> None:
    with opened(weather, clock) as ends:
        sender, receiver = ends[::-1] if is_back else ends
        weather.change(Change(delay_ms=40, jitter_ms=20))
        way = weather.conditions.path("a", "b")
        assert way.delay_s >= 0.04
        # While time stands still nothing arrives; the sender does not wait for it.
        for number in range(20):
            sender.send(Ping(number, 0.0))
        clock.now_s += 0.9 * way.delay_s
        with pytest.raises(TimeoutError):
            receiver.receive(0.2)
        clock.now_s += 0.1 * way.delay_s + way.jitter_s + 0.01
        assert [receiver.receive(PATIENCE_S)[0] for _ in range(20)] == [Ping(n, 0.0) for n in range(20)]


def test_what_a_machine_sends_to_itself_never_leaves_it(weather: Weather) -> None:
    weather.change(Change(delay_ms=60_000, is_cut=True))
    inner = InprocTransport()
    machine = ShapedTransport(inner, "b", weather)
    with (
        machine.listen("inproc://b", hello("nb", "")) as listener,
        machine.dial("inproc://b", hello("nb")) as near,
        listener.accept(PATIENCE_S) as far,
    ):
        near.send(Ping(1, 0.0))
        assert far.receive(PATIENCE_S)[0] == Ping(1, 0.0)


def test_rate_is_that_of_the_uplink(weather: Weather, clock: Clock) -> None:
    weather.change(Change(machines=("a",), uplink_mbit=8))
    uplink = Uplink("a", weather, clock)
    way_s = weather.conditions.path("a", "b").delay_s
    arrivals = [uplink.arrival_s("b", 50_000) - clock.now_s for _ in range(3)]
    assert arrivals == pytest.approx([0.05 + way_s, 0.1 + way_s, 0.15 + way_s])
    clock.now_s += 1.0
    assert uplink.arrival_s("b", 50_000) - clock.now_s == pytest.approx(0.05 + way_s), (
        "it has been idle since"
    )


def test_buffers_are_the_callers_own_again(ends: tuple[ShapedLink, ShapedLink]) -> None:
    near, far = ends
    buffer = bytearray(b"kept")
    near.send(TensorBytes(0, 4), (memoryview(buffer),))
    buffer[:] = b"lost"
    assert bytes(far.receive(PATIENCE_S)[1]) == b"kept"


def test_cut_path_holds_frames_back(ends: tuple[ShapedLink, ShapedLink], weather: Weather) -> None:
    near, far = ends
    weather.change(Change(is_cut=True))
    near.send(Ping(1, 0.0))
    near.send(Ping(2, 0.0))
    with pytest.raises(TimeoutError):
        far.receive(0.2)
    weather.change(Change(is_cut=False))
    assert [far.receive(PATIENCE_S)[0] for _ in range(2)] == [Ping(1, 0.0), Ping(2, 0.0)]


def test_a_full_buffer_blocks_the_sender(ends: tuple[ShapedLink, ShapedLink], weather: Weather) -> None:
    near, far = ends
    weather.change(Change(is_cut=True))
    body = memoryview(bytes(1 << 20))
    sent = []

    def send() -> None:
        for number in range(8):
            near.send(TensorBytes(number, len(body)), (body,))
            sent.append(number)

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: len(sent) == 3, "a full buffer", PATIENCE_S)
    thread.join(0.2)
    assert thread.is_alive()
    assert sent == [0, 1, 2], "the buffer has four mebibytes, and frames have headers"
    weather.change(Change(is_cut=False))
    assert [far.receive(PATIENCE_S)[0] for _ in range(8)] == [TensorBytes(n, len(body)) for n in range(8)]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_what_was_sent_before_closing_arrives(ends: tuple[ShapedLink, ShapedLink]) -> None:
    near, far = ends
    near.send(Ping(7, 0.0))
    near.close()
    assert far.receive(PATIENCE_S)[0] == Ping(7, 0.0)
    with pytest.raises(LinkClosedError):
        far.receive(PATIENCE_S)
    with pytest.raises(LinkClosedError):
        near.send(Ping(8, 0.0))


def test_sending_fails_after_the_other_end_has_closed(ends: tuple[ShapedLink, ShapedLink]) -> None:
    near, far = ends
    far.close()

    def fails() -> bool:
        try:
            near.send(Ping(1, 0.0))
        except LinkClosedError:
            return True
        return False

    wait_until(fails, "the news", PATIENCE_S)


def test_strangers_to_the_network_are_refused(weather: Weather) -> None:
    inner = InprocTransport()
    with (
        ShapedTransport(inner, "b", weather).listen("inproc://b", hello("nb", "")),
        pytest.raises(LinkError, match="emulated network"),
    ):
        inner.dial("inproc://b", hello("na"))
    with pytest.raises(LinkError, match="no machine"):
        ShapedTransport(inner, "a", weather).dial("inproc://c", hello("na"))
    with pytest.raises(UsageError, match="no machine 'z'"):
        ShapedTransport(inner, "z", weather)


def test_admission_sees_the_real_role(weather: Weather) -> None:
    inner, seen = InprocTransport(), []

    def admit(theirs: Hello, certificate: bytes | None) -> str | None:
        seen.append(theirs.role)
        return "not today"

    listener: ShapedListener = ShapedTransport(inner, "b", weather).listen(
        "inproc://b", hello("nb", ""), LinkOptions(), admit
    )
    with listener, pytest.raises(LinkError, match="not today"):
        ShapedTransport(inner, "a", weather).dial("inproc://b", hello("na"))
    assert seen == ["stage"]


def test_dialling_over_a_cut_path_times_out(weather: Weather) -> None:
    weather.change(Change(is_cut=True))
    with pytest.raises(LinkError, match="timed out"):
        ShapedTransport(InprocTransport(), "a", weather).dial(
            "inproc://b", hello("na"), LinkOptions(handshake_timeout_s=0.05)
        )


def test_shape_file_is_read_again(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "shape.json"
    write_shape(path, NetworkShape(NEAR, {}))
    reader = ShapeReader(path, clock)
    assert not reader.shape().conditions.path("a", "b").is_cut
    write_shape(path, NetworkShape(apply_change(NEAR, Change(is_cut=True)), {"x:1": "a"}))
    clock.now_s += 0.04
    assert not reader.shape().conditions.path("a", "b").is_cut, "it is not looked at all the time"
    clock.now_s += 0.02
    assert reader.shape().conditions.path("a", "b").is_cut
    assert reader.shape().addresses == {"x:1": "a"}
    path.unlink()
    clock.now_s += 0.06
    assert reader.shape().addresses == {"x:1": "a"}, "a network that is taken down keeps its last conditions"


def test_shape_option(tmp_path: Path) -> None:
    assert parse_shape_option("a@/x/y") == ("a", Path("/x/y"))
    with pytest.raises(UsageError, match="MACHINE@FILE"):
        parse_shape_option("a")
    with pytest.raises(SourceError, match="cannot be read"):
        ShapeReader(tmp_path / "missing.json")

"""Deltas on their way from a driver's threads to an event loop: in order, none lost, together where the loop lags."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shardcompute.core.errors import BackendError
from shardcompute.core.generation import Delta, Interruption, TokenChoice
from shardcompute.node.driver.generation import DeltaStream


def delta(number: int, **more: object) -> Delta:
    return Delta(f"{number} ", (TokenChoice(number),), **more)  # type: ignore[arg-type]


def test_what_came_while_the_loop_was_busy_is_one_delta() -> None:
    async def listen() -> list[Delta]:
        stream = DeltaStream()
        for number in range(4):
            stream.emit(delta(number))
        stream.emit(delta(4, finish="stop"))
        return [each async for each in stream]

    [whole] = asyncio.run(listen())
    assert whole.text == "0 1 2 3 4 "
    assert [choice.id for choice in whole.tokens] == [0, 1, 2, 3, 4]
    assert whole.finish == "stop"


def test_what_was_waited_for_begins_a_delta_of_its_own() -> None:
    pause = Interruption(("a",), ("b",), 1.0, 2)

    async def listen() -> list[Delta]:
        stream = DeltaStream()
        stream.emit(delta(0))
        stream.emit(delta(1, interruption=pause))
        stream.emit(delta(2, finish="length"))
        return [each async for each in stream]

    first, second = asyncio.run(listen())
    assert (first.text, first.interruption) == ("0 ", None)
    assert (second.text, second.interruption, second.finish) == ("1 2 ", pause, "length")


def test_an_error_comes_after_what_was_said_before_it() -> None:
    async def listen() -> str:
        stream = DeltaStream()
        stream.emit(delta(0))
        stream.emit(BackendError("broken"))
        said = (await anext(stream)).text
        with pytest.raises(BackendError):
            await anext(stream)
        return said

    assert asyncio.run(listen()) == "0 "


def test_a_frame_rings_the_loop_once() -> None:
    async def listen() -> int:
        loop, rung = asyncio.get_running_loop(), 0
        call = loop.call_soon_threadsafe

        def ring(*args: object, **more: object) -> object:
            nonlocal rung
            rung += 1
            return call(*args, **more)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = ring  # type: ignore[assignment,method-assign]
        streams = [DeltaStream() for _ in range(20)]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        for stream in streams:
            stream.emit(delta(1))
        assert [(await each).text for each in waiting] == ["1 "] * 20
        return rung

    assert asyncio.run(listen()) == 1


def test_nothing_is_lost_between_threads() -> None:
    count = 3000

    async def listen() -> list[int]:
        stream = DeltaStream()

        def talk() -> None:
            for number in range(count):
                stream.emit(delta(number, finish="stop" if number == count - 1 else None))

        thread = threading.Thread(target=talk)
        thread.start()
        heard = [choice.id async for each in stream for choice in each.tokens]
        thread.join()
        return heard

    async def bounded() -> list[int]:
        return await asyncio.wait_for(listen(), 30)

    assert asyncio.run(bounded()) == list(range(count))


def test_a_listener_that_gave_up_can_listen_again() -> None:
    async def listen() -> str:
        stream = DeltaStream()
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stream.emit(delta(1, finish="stop"))
        return (await anext(stream)).text

    assert asyncio.run(listen()) == "1 "

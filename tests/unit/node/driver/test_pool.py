"""The driver pool's answers to those who come too early: what is missing, and what they can do about it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from shardcompute.core.errors import CapacityError
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.driver.pool import DriverPool, PoolModel
from shardcompute.node.rpc.commands import Unservable

WANTS = Unservable("big", 5 << 30, ["big needs 6.0 GiB, 1 machine offers 1.0 GiB"], [])


@pytest.fixture
def pool() -> Iterator[DriverPool]:
    with closing(DriverPool(_dial, "inproc://driver", lambda node: None)) as pool:
        yield pool


def _dial(peer: object) -> Any:
    raise AssertionError("nobody is dialled")


def _model(name: str) -> PoolModel:
    return PoolModel(
        name, SimpleNamespace(), vocab_size=8, context_length=64, created_s=0, digest="", size_bytes=0
    )  # type: ignore[arg-type]


def _ask(pool: DriverPool, model: str) -> CapacityError:
    async def first() -> None:
        async for _ in pool.generate(model, GenerationRequest((1,), 1)):
            raise AssertionError("it answers")

    with pytest.raises(CapacityError) as raised:
        asyncio.run(first())
    return raised.value


def test_a_pool_without_models_says_how_to_get_one(pool: DriverPool) -> None:
    told = pool.obstacle()
    assert told is not None
    assert "no model" in told.message
    assert "shardcompute load" in told.hint


def test_what_cannot_be_placed_is_not_said_to_be_loading(pool: DriverPool) -> None:
    pool.add_model(_model("big"))
    loading = pool.obstacle()
    assert loading is not None
    assert "big is still being loaded" in loading.message
    pool.report_unservable(WANTS)
    for told in (pool.obstacle(), _ask(pool, "big")):
        assert told is not None
        assert "5.0 GiB are missing" in told.message
        assert "1 machine offers 1.0 GiB" in told.message
        assert "join a machine that offers 5.0 GiB" in told.hint
    pool.remove_model("big")
    assert "no model" in str(pool.obstacle())


def test_the_same_refusal_does_not_grow(pool: DriverPool) -> None:
    pool.add_model(_model("big"))
    pool.report_unservable(WANTS)
    depths = {len(traceback.extract_tb(_ask(pool, "big").__traceback__)) for _ in range(5)}
    assert len(depths) == 1


def test_a_model_that_gives_way_takes_nothing_new(pool: DriverPool) -> None:
    pool.add_model(_model("old"))
    pool.pause("old", "new")
    assert "replaced by new" in _ask(pool, "old").message
    pool.resume("old")
    assert "still being loaded" in _ask(pool, "old").message
    assert pool.answering("old") == 0

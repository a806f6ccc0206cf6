"""Work off the event loop: what a client can make large runs in few threads of its own, while others are answered.

A thread leaves the loop its turns only between two steps of Python, so that each single step must be bounded as well:
bodies by the values in them (`body`), texts by the tokens that fit (`node.service.TextCodec`), lists by the schemas.
The threads are few, because each that computes makes the loop wait a little longer for its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

_THREADS = 4
_SMALL = 16_384
PIECE_COST = 64
"""What an object of a body costs beside its text, in characters: making a message out of nothing takes time too."""
Result = TypeVar("Result")


async def offload(work: Callable[[], Result]) -> Result:
    """Runs work whose size a client chose; it waits its turn behind that of others."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), work)


async def run_sized(work: Callable[[], Result], *, characters: int) -> Result:
    """Runs the work on so many characters: at once where they are few, off the event loop otherwise."""
    return await offload(work) if characters > _SMALL else work()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="request work")

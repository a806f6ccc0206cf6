"""Parallelism: how a person wants a model cut, by machines that share each stage and by stages. Pure.

`auto`, or parts of `tp=2,pp=3`: so many machines compute every stage together (tensor ranks), in so many stages one
after the other (pipeline). Ranks gather, which keeps the bits of one process; `tp=2:reduce` has them add up.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from shardcompute.core.errors import UsageError

MOST_RANKS = 16
_PARTS = re.compile(
    r"tp=(?P<tp>\d{1,4})(?::(?P<exchange>reduce|gather))?(?:,pp=(?P<pp>\d{1,4}))?|pp=(?P<alone>\d{1,4})"
)
_FORMS = "auto, tp=2, pp=3 or tp=2,pp=3 (tp=2:reduce: ranks that add up instead of gathering)"


class Parallelism(Struct, frozen=True):
    """0: as many as pay."""

    tp: int = 1
    """Machines that compute each stage together."""
    pp: int = 0
    """Stages, one after the other."""
    exchange: Literal["reduce", "gather"] = "gather"
    """How those of one stage put a block's answer together, see `models.tensor_share`."""

    @property
    def is_shaped(self) -> bool:
        """Whether a person asked for something that not every layout has."""
        return self.tp > 1 or self.pp > 0

    def __str__(self) -> str:
        if self == AUTO:
            return "auto"
        way = ":reduce" if self.exchange == "reduce" else ""
        parts = [f"tp={self.tp}{way}"] if self.tp != 1 or not self.pp else []
        return ",".join([*parts, *([f"pp={self.pp}"] if self.pp else [])])


AUTO = Parallelism(tp=0)
"""Whatever measurement says is quickest."""
PIPELINE = Parallelism()
"""As many stages as pay, each on one machine."""


def parse_parallelism(text: str) -> Parallelism:
    """UsageError for what is no such text."""
    if text == "auto":
        return AUTO
    found = _PARTS.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} does not say how to cut a model", hint=f"use {_FORMS}")
    tp, exchange, pp = (int(found["tp"] or 1), found["exchange"], found["pp"] or found["alone"])
    if tp < 1 or (pp is not None and int(pp) < 1):
        raise UsageError(f"{text!r} asks for nothing", hint="count from 1, or say auto: as many as pay")
    if tp > MOST_RANKS:
        raise UsageError(
            f"{text!r} asks for too much: at most {MOST_RANKS} machines compute a stage together",
            hint="use more stages instead, such as tp=4,pp=4",
        )
    return Parallelism(tp, int(pp or 0), "reduce" if exchange == "reduce" else "gather")

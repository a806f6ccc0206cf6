"""Options of layers that are computed on shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from shardcompute.core.errors import UsageError

_PRIVACY = "Privacy"
_ALL = "all"

ShareLayers = Annotated[
    str | None,
    typer.Option(
        "--share-layers",
        metavar="LAYERS",
        help="Compute the linear maps of these layers (0-1, or all) by two workers of the cluster, on shares that tell "
        "neither of them anything; the rest here.",
        rich_help_panel=_PRIVACY,
    ),
]
ShareWith = Annotated[
    str | None,
    typer.Option(
        "--share-with",
        metavar="NODE,NODE",
        help="Which two workers; by default two that are on different machines.",
        rich_help_panel=_PRIVACY,
    ),
]


@dataclass(frozen=True, slots=True)
class ShareArguments:
    """Which layers are computed on shares, and by whom."""

    share_layers: ShareLayers = None
    share_with: ShareWith = None

    @property
    def is_given(self) -> bool:
        if self.share_layers is None and self.share_with is not None:
            raise UsageError("--share-with needs --share-layers", hint="such as --share-layers 0-1")
        return self.share_layers is not None

    def layers(self, count: int) -> tuple[int, int, bool]:
        """First, behind the last, and whether the head is among what is shared, of a model of so many layers."""
        text = self.share_layers or ""
        if text == _ALL:
            return 0, count, True
        first, mark, last = text.partition("-")
        last = last if mark else first
        if not all(each.isascii() and each.isdecimal() for each in (first, last)):
            raise UsageError(
                f"--share-layers {text!r} are no layers", hint="write 0-1, a single number, or all"
            )
        start, stop = int(first), int(last) + 1
        if not start < stop <= count:
            raise UsageError(
                f"--share-layers {text!r} are not in the model", hint=f"it has layers 0 to {count - 1}"
            )
        return start, stop, False

    @property
    def names(self) -> tuple[str, ...]:
        """The two workers; none: they are to be chosen."""
        if self.share_with is None:
            return ()
        names = tuple(name.strip() for name in self.share_with.split(","))
        if len(names) != 2 or not all(names) or names[0] == names[1]:
            raise UsageError("--share-with names two workers", hint="see `shardcompute nodes`")
        return names

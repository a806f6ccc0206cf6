"""Journal store: where a journal is kept, in a file of this machine or in a store that coordinators share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from shardcompute.node.coordinator.journal.reserve import DiskReserve


class JournalStore(Protocol):
    """Events in their order, and small notes. Methods may be called from any thread; all of them raise SourceError
    where what is asked for cannot be done."""

    @property
    def place(self) -> str:
        """For people: which file, or where else."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether another coordinator may go on from here. Then nothing is done before it is on record."""
        ...

    @property
    def may_act(self) -> bool:
        """Whether no other coordinator can be acting."""
        ...

    @property
    def reserve(self) -> DiskReserve | None:
        """Room for bad times, where it takes room of this machine."""
        ...

    def append(self, *events: bytes) -> None: ...

    def events(self) -> Iterator[bytes]: ...

    def numbered_events(self) -> list[tuple[int, bytes]]: ...

    def compact(self, events: Sequence[bytes], *, keeping: Collection[int] = ()) -> None:
        """Replace all events by these, which give the same state; all or nothing. Those `keeping` names by their
        numbers stay as well."""
        ...

    def shrink(self) -> None:
        """Give room that is no longer needed back, where that is worth the while."""
        ...

    def read_note(self, name: str) -> bytes | None: ...

    def read_notes(self) -> dict[str, bytes]:
        """All of them, by name."""
        ...

    def write_note(self, name: str, value: bytes) -> None:
        """It survives a power cut when this returns."""
        ...

    def close(self) -> None: ...

"""Split GGUF: one model in several files, each a GGUF file of its own, as llama.cpp's `gguf-split` writes them.

Files are called `name-00002-of-00003.gguf` and say `split.no` (from 0), `split.count` and `split.tensors.count` (of the
whole model). The first has all metadata of the model. What parts say must agree with their names and with each other,
and together they must hold every tensor once; anything else is a `CorruptModelError` that names the part.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.bytes import ByteSource
from shardcompute.weights.formats.gguf_file import GgufFile, open_gguf, read_gguf
from shardcompute.weights.formats.tensor_file import Strand, TensorEntry, find_entry

MAX_PARTS = 256
"""More than any model that was published has; each is an open file."""
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class PartName:
    """What the name of a part says: it is `number` (from 1) of `count`."""

    stem: str
    number: int
    count: int

    def sibling(self, number: int) -> str:
        return f"{self.stem}-{number:05d}-of-{self.count:05d}.gguf"


def parse_part_name(name: str) -> PartName | None:
    """None for the name of a file that is a whole model."""
    match = _PART.fullmatch(name)
    return None if match is None else PartName(match["stem"], int(match["number"]), int(match["count"]))


def parts_with(name: str, names: Collection[str]) -> tuple[str, ...]:
    """All files of the model that `name` is one of, in order, among `names`; `(name,)` for a whole model.

    CorruptModelError says which parts are missing.
    """
    part = parse_part_name(name)
    if part is None:
        return (name,)
    if not 1 <= part.number <= part.count <= MAX_PARTS:
        raise UnsupportedModelError(
            f"{name} is called part {part.number} of {part.count}, and a model can have up to {MAX_PARTS} parts",
            hint="merge the parts first: llama-gguf-split --merge <first part> <whole file>",
        )
    found: dict[int, str] = {}
    for each in sorted(names):
        other = parse_part_name(each)
        if other is not None and (other.stem, other.count) == (part.stem, part.count):
            if other.number in found:
                raise _corrupt(each, f"and {found[other.number]} are both part {other.number}")
            found[other.number] = each
    absent = [part.sibling(number) for number in range(1, part.count + 1) if number not in found]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise CorruptModelError(
            f"{name} is part {part.number} of {part.count}, and {', '.join(absent[:3])}{more} "
            f"{'is' if len(absent) == 1 else 'are'} not beside it",
            hint="put all parts into one folder under the names they were published with",
        )
    return tuple(found[number] for number in range(1, part.count + 1))


class GgufParts:
    """A `TensorFile` over the parts of a split model; `stored` are the first one's key-values (see `GgufFile`)."""

    def __init__(self, parts: Sequence[GgufFile]) -> None:
        self.name = parts[0].name
        self.metadata: Mapping[str, Any] = parts[0].metadata
        self.stored = parts[0].stored
        self._parts = parts
        self._holders = {name: part for part in parts for name in part.entries}
        self.entries: Mapping[str, TensorEntry] = {
            name: part.entries[name] for name, part in self._holders.items()
        }

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        find_entry(self, name)
        return self._holders[name].read_bytes(name, offset, length)

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        find_entry(self, name)
        return self._holders[name].read_rows(name, start, stop)

    def locate(self, name: str) -> tuple[Strand, ...]:
        find_entry(self, name)
        return self._holders[name].locate(name)

    def lasting(self, name: str) -> ByteSource | None:
        return self._holders[name].lasting(name)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def open_gguf_files(
    open_source: Callable[[str], ByteSource], names: Sequence[str], *, with_tokenizer: bool = True
) -> GgufFile | GgufParts:
    """The model in these files: one, or all parts in order. Headers are read, and no tensor."""
    with contextlib.ExitStack() as on_error:
        sources = []
        for name in names:
            source = open_source(name)
            on_error.callback(source.close)
            sources.append(source)
        if len(sources) == 1:
            opened: GgufFile | GgufParts = open_gguf(sources[0], with_tokenizer=with_tokenizer)
        else:
            opened = _open_parts(sources, with_tokenizer)
        on_error.pop_all()
        return opened


def _open_parts(sources: Sequence[ByteSource], with_tokenizer: bool) -> GgufParts:
    first = read_gguf(sources[0], with_tokenizer=with_tokenizer)
    tensors = _split_number(first, first.metadata, _TENSORS)
    parts, holders = [first], dict.fromkeys(first.entries, first)
    _check_part(first, first.metadata, 0, len(sources), tensors)
    for number, source in enumerate(sources[1:], start=1):
        part = read_gguf(source, with_tokenizer=with_tokenizer)
        _check_part(part, part.metadata, number, len(sources), tensors)
        _check_metadata(first, part)
        for name in part.entries:
            if name in holders:
                raise _corrupt(part.name, f"has the tensor {name!r}, which is also in {holders[name].name}")
            holders[name] = part
        # Of these, only the first one's is of use.
        part.forget_metadata()
        parts.append(part)
    if len(holders) != tensors:
        raise _corrupt(
            first.name, f"and the other parts hold {len(holders)} tensors, where {_TENSORS} is {tensors}"
        )
    return GgufParts(parts)


def _check_part(part: GgufFile, metadata: Mapping[str, Any], number: int, count: int, tensors: int) -> None:
    for key, expected, what in (
        (_COUNT, count, "parts, as its name says"),
        (_NUMBER, number, "its place, counted from 0, by its name"),
        (_TENSORS, tensors, "tensors in all, as the first part says"),
    ):
        said = _split_number(part, metadata, key)
        if said != expected:
            raise _corrupt(part.name, f"says {key} {said}, where {expected} is right ({what})")


def _check_metadata(first: GgufFile, part: GgufFile) -> None:
    for key, value in part.metadata.items():
        if key != _NUMBER and key in first.metadata and first.metadata[key] != value:
            raise _corrupt(
                part.name, f"says another {key} than {first.name}; they belong to different models"
            )


def _split_number(part: GgufFile, metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    if type(value) is not int or value < 0:
        fault = "does not say" if value is None else f"says {value!r} for"
        raise _corrupt(part.name, f"is called one of several parts of a model and {fault} {key}")
    return value


def _corrupt(file: str, fault: str) -> CorruptModelError:
    return CorruptModelError(
        f"{file} {fault}", hint="fetch all parts of the model again; they are damaged, renamed or mixed up"
    )

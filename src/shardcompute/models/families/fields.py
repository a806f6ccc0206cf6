"""Field reader: a model's description field by field, so that nothing in it is silently overlooked.

Every read checks type and range (CorruptModelError names the field) and marks the field as honoured;
`refuse_unread` then refuses whatever was neither read nor declared harmless. Except where a reader tells them
apart, a field that is null counts as absent, as it does for those who write such files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError

FALLBACK_HINT = (
    "a safetensors checkpoint in 16 or 32 bits would run through transformers "
    '(pip install "shardcompute[torch]")'
)

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 4096
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 28
MAX_EXPERTS = 1024
MAX_LAYER_EXPERTS = 1 << 16
"""Experts of all layers together: bounds what a lying file can make us build."""

_MAX_LIST = 1 << 16
_SHOWN_CHARACTERS = 60

T = TypeVar("T")


class Fields:
    """A mapping whose reads are checked and remembered. `where` is what messages call it."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()
        self.where = where

    def is_list(self, name: str) -> bool:
        value = self._values.get(self._prefix + name)
        return isinstance(value, Sequence) and not isinstance(value, str)

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_WIDTH) -> int:
        """An integer in `[low, high]`; required when there is no default."""
        value = self.optional_integer(name, low=low, high=high)
        return self._or_default(name, value, default)

    def optional_integer(
        self, name: str, absent: int | None = None, *, low: int = 1, high: int = MAX_WIDTH
    ) -> int | None:
        """None when the field says so; `absent` when it is not there at all."""
        value = self._take(name, absent)
        if value is None:
            return None
        if not _is_integer(value) or not low <= value <= high:
            raise self.corrupt(name, value, f"an integer from {low} to {high}")
        return int(value)

    def number(
        self, name: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12
    ) -> float:
        """A finite number in `(low, high]`; required when there is no default."""
        return self._or_default(name, self.optional_number(name, low=low, high=high), default)

    def optional_number(
        self, name: str, absent: float | None = None, *, low: float = 0.0, high: float = 1e12
    ) -> float | None:
        """None when the field says so; `absent` when it is not there at all."""
        value = self._take(name, absent)
        if value is None:
            return None
        if not _is_number(value) or not low < value <= high:
            raise self.corrupt(name, value, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def uniform_integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_WIDTH
    ) -> int:
        """An integer that may be written once or once per layer; layers that differ are refused."""
        if not self.is_list(name):
            return self.integer(name, default, low=low, high=high)
        values = self.integers(name, low=low, high=high) or []
        if len(set(values)) != 1:
            raise self.unsupported(name, values, "supported: the same value in all layers")
        return values[0]

    def flags(self, name: str) -> list[bool] | None:
        return self._list(name, lambda item: isinstance(item, bool), "a list of true and false")

    def flag(self, name: str, default: bool) -> bool:
        value = self._take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.corrupt(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._take(name)
        if value is not None and not isinstance(value, str):
            raise self.corrupt(name, value, "a text")
        return self._or_default(name, value, default)

    def texts(self, name: str) -> list[str] | None:
        return self._list(name, lambda item: isinstance(item, str), "a list of texts")

    def integers(self, name: str, *, low: int = 0, high: int = MAX_WIDTH) -> list[int] | None:
        what = f"a list of integers from {low} to {high}"
        return self._list(name, lambda item: _is_integer(item) and low <= item <= high, what)

    def numbers(self, name: str) -> list[float] | None:
        what = "a list of positive numbers"
        return self._list(name, lambda item: _is_number(item) and 1e-6 < item <= 1e12, what)

    def length(self, name: str) -> int | None:
        """How many elements a list has, whatever they are."""
        value = self._take(name)
        if value is None:
            return None
        if not self.is_list(name):
            raise self.corrupt(name, value, "a list")
        return len(value)

    def child(self, name: str) -> Fields | None:
        """A mapping inside this one, whose fields want to be read too; None when it is empty."""
        value = self._take(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.corrupt(name, value, "a mapping")
        if not value:
            return None
        return Fields(value, f"{self.where}: {self._prefix}{name}")

    def one_of(self, name: str, value: T, choices: Collection[T]) -> T:
        """`value`, already read from `name`, if we support it."""
        if value not in choices:
            known = ", ".join(sorted(str(choice) for choice in choices))
            raise self.unsupported(name, value, f"supported: {known}")
        return value

    def refuse_unread(self, harmless: Collection[str]) -> None:
        """Refuse any field with a telling value that was neither read nor is harmless."""
        for key, value in self._values.items():
            if not isinstance(key, str) or not key.startswith(self._prefix):
                continue
            name = key[len(self._prefix) :]
            if name in self._read or name in harmless or _says_nothing(value):
                continue
            raise self.unsupported(name, value, f"a field that may change the result; {FALLBACK_HINT}")

    def corrupt(self, name: str, value: object, expected: str) -> CorruptModelError:
        return CorruptModelError(
            f"{self.where}: {self._prefix}{name} is {_show(value)}, expected {expected}",
            hint="the file is damaged or was edited; fetch the model again",
        )

    def unsupported(self, name: str, value: object, hint: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.where}: {self._prefix}{name} = {_show(value)} is not supported", hint=hint
        )

    def _take(self, name: str, absent: object = None) -> Any:
        self._read.add(name)
        return self._values.get(self._prefix + name, absent)

    def _list(self, name: str, accepts: Callable[[Any], bool], expected: str) -> list[Any] | None:
        value = self._take(name)
        if value is None:
            return None
        if not self.is_list(name) or len(value) > _MAX_LIST or not all(accepts(item) for item in value):
            raise self.corrupt(name, value, expected)
        return list(value)

    def _or_default(self, name: str, value: T | None, default: T | None) -> T:
        if value is not None:
            return value
        if default is None:
            raise CorruptModelError(
                f"{self.where}: {self._prefix}{name} is missing",
                hint="the file is incomplete; fetch the model again",
            )
        return default


def shown(names: Iterable[str], limit: int = 3) -> str:
    """A few of many names, for a message."""
    ordered = sorted(names)
    return ", ".join(ordered[:limit]) + (f" and {len(ordered) - limit} more" if len(ordered) > limit else "")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _says_nothing(value: object) -> bool:
    is_zero = isinstance(value, int | float) and value == 0
    return value is None or is_zero or (isinstance(value, Sequence | Mapping) and not value)


def _show(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**30:  # printing a huge integer is slow, or refused
        return "an enormous integer"
    if isinstance(value, Sequence | Mapping) and len(value) > _SHOWN_CHARACTERS:
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"

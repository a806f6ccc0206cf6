"""Sampling parameters that `/set` changes, with the names and bounds that the command's options have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from shardcompute.cli.chat.answer import AnswerOptions
from shardcompute.cli.options import generation
from shardcompute.cli.options.cluster import Drafting
from shardcompute.core.errors import UsageError

_NONE = ("off", "none", "default")


@dataclass(frozen=True, slots=True)
class _Setting:
    """`parse` raises ValueError for what it cannot read; `show` tells the value in use."""

    meaning: str
    parse: Callable[[str], Any]
    change: Callable[[AnswerOptions, Any], AnswerOptions]
    show: Callable[[AnswerOptions], Any]


def change_setting(answer_options: AnswerOptions, name: str, text: str) -> AnswerOptions:
    """The options with one of them set as the user wrote it. UsageError for a name or value that is none."""
    setting = _SETTINGS.get(name.replace("-", "_").lower())
    if setting is None:
        raise UsageError(f"there is no parameter {name!r}", hint=f"there are: {', '.join(_SETTINGS)}")
    try:
        value = setting.parse(text.strip())
    except ValueError as error:
        raise UsageError(
            f"{name} cannot be {text!r}{f': {error}' if str(error) else ''}", hint=setting.meaning
        ) from error
    return setting.change(answer_options, value)


def setting_rows(answer_options: AnswerOptions) -> list[tuple[str, str, str]]:
    """Name, value and meaning of every parameter."""
    return [(name, str(setting.show(answer_options)), setting.meaning) for name, setting in _SETTINGS.items()]


def _bounded(option: Any, kind: type[int] | type[float]) -> Callable[[str], Any]:
    """A number within the bounds of a command's option."""
    declared = get_args(option)[1]

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"not a {'whole ' if kind is int else ''}number") from None
        low, high = declared.min, declared.max
        # Written so that nan, which is neither above nor below anything, is refused too.
        if not ((low is None or value >= low) and (high is None or value <= high)):
            raise ValueError(f"use {low} or more" if high is None else f"use {low} to {high}")
        return value

    return parse


def _meaning(option: Any) -> str:
    return str(get_args(option)[1].help)


def _sampling(option: Any, field: str, kind: type[int] | type[float]) -> _Setting:
    return _Setting(
        _meaning(option),
        _bounded(option, kind),
        lambda old, value: replace(old, sampling=replace(old.sampling, **{field: value})),
        lambda old: getattr(old.sampling, field),
    )


def _parse_seed(text: str) -> int | None:
    return None if text.lower() in _NONE else int(text)


def _parse_stop(text: str) -> tuple[str, ...]:
    return () if not text or text.lower() in _NONE else (text.replace("\\n", "\n"),)


def _parse_drafting(text: str) -> Drafting | None:
    if text.lower() == "default":
        return None
    try:
        return Drafting(text.lower())
    except ValueError:
        raise ValueError(f"use default, {', '.join(Drafting)}") from None


def _show_drafting(old: AnswerOptions) -> str:
    return "default" if old.speculation is None else old.speculation.drafter


_SETTINGS: Mapping[str, _Setting] = {
    "temperature": _sampling(generation.Temperature, "temperature", float),
    "top_p": _sampling(generation.TopP, "top_p", float),
    "top_k": _sampling(generation.TopK, "top_k", int),
    "min_p": _sampling(generation.MinP, "min_p", float),
    "repeat_penalty": _sampling(generation.RepeatPenalty, "repetition_penalty", float),
    "max_tokens": _Setting(
        _meaning(generation.MaxTokens),
        _bounded(generation.MaxTokens, int),
        lambda old, value: replace(old, max_tokens=value),
        lambda old: old.max_tokens,
    ),
    "seed": _Setting(
        "Makes a drawn answer repeatable; off: another one for every answer.",
        _parse_seed,
        lambda old, value: replace(old, seed=value),
        lambda old: "off" if old.seed is None else old.seed,
    ),
    "stop": _Setting(
        "End the answer where this text would come; off: nowhere.",
        _parse_stop,
        lambda old, value: replace(old, stop=value),
        lambda old: ", ".join(map(repr, old.stop)) or "off",
    ),
    "speculate": _Setting(
        "What may draft tokens ahead; default: as the server was told.",
        _parse_drafting,
        lambda old, value: replace(old, speculation=generation.speculation_for(value)),
        _show_drafting,
    ),
}

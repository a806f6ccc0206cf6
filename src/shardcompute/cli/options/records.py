"""Options declared once, as fields of a dataclass, and expanded into the signature of every command that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Result = TypeVar("Result")


def with_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """A command whose parameters that are dataclasses stand for their fields, each of them an option, in place."""
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return", None)
    records: dict[str, type[DataclassInstance]] = {
        name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in records:
            parameters += _parameters_of(records[parameter.name])
        else:
            parameters.append(
                parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            )

    @functools.wraps(command)
    def call(**given: Any) -> Result:
        for name, kind in records.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return command(**given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def changed_options(record: DataclassInstance) -> list[str]:
    """Names of the options that were given another value than their default."""
    hints = get_type_hints(type(record), include_extras=True)
    return [
        # Typer keeps an annotated option's first name as its default.
        get_args(hints[field.name])[1].default.split("/")[0]
        for field in fields(record)
        if getattr(record, field.name) != field.default
    ]


def _parameters_of(kind: type[DataclassInstance]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    ]

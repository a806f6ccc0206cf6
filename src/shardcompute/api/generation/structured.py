"""Structured outputs: the grammar that a request asks for, by any of the names that servers have for it.

A grammar that becomes too complex in the middle of an answer ends it where it stands. Such an answer must not pass for
a whole one, so what ended by itself is compared with its grammar before it is called finished.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.schemas import ChatCompletionRequest, GenerationBody
from shardcompute.api.offload import offload
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import MAX_GRAMMAR_CHARS, Grammar
from shardcompute.decoding import compiler_of
from shardcompute.node.service import TextCodec

GRAMMAR_TOO_COMPLEX = "grammar_too_complex"
_ANY_OBJECT = '{"type":"object"}'


def requested_grammar(body: GenerationBody) -> tuple[str, Grammar] | None:
    """The parameter that asks for a form, and the grammar it comes to; None where any text will do."""
    forms = [(param, grammar) for param, grammar in _forms(body) if grammar is not None]
    if len(forms) > 1:
        message = f"{forms[0][0]} and {forms[1][0]} contradict each other."
        raise RequestError(message, hint="send one of them", param=forms[1][0], code="invalid_value")
    if not forms:
        return None
    if body.ignore_eos:
        message = "An answer of a wanted form ends where the form does."
        raise RequestError(message, hint="leave ignore_eos out", param="ignore_eos", code="invalid_value")
    return forms[0]


async def check_grammar(codec: TextCodec, grammar: Grammar, param: str) -> None:
    """400 with the reason where a grammar cannot be used, before anything is generated."""
    try:
        # Compiling may take a moment, and so does the first look at a vocabulary.
        await offload(lambda: compiler_of(codec.vocabulary()).start(grammar))
    except UsageError as error:
        raise refused_grammar(error, param) from error


async def check_complete(codec: TextCodec, grammar: Grammar, tokens: Sequence[int]) -> None:
    """Raises where an answer that ended by itself, its last token included, is not all that its grammar asks for."""

    def is_complete() -> bool:
        state = compiler_of(codec.vocabulary()).start(grammar)
        state.extend(tokens[:-1])
        return state.is_complete

    if tokens and tokens[-1] in codec.eos_ids and not await asyncio.to_thread(is_complete):
        raise RequestError(
            "The answer was broken off before its form was complete: the grammar became too complex to follow.",
            hint="simplify the schema or the expression",
            code=GRAMMAR_TOO_COMPLEX,
        )


def refused_grammar(error: UsageError, param: str) -> RequestError:
    return RequestError(f"{param}: {error.message}", hint=error.hint, param=param, code="invalid_value")


def _forms(body: GenerationBody) -> Iterator[tuple[str, Grammar | None]]:
    if isinstance(body, ChatCompletionRequest) and body.response_format is not None:
        yield "response_format", _response_format(body)
    yield "guided_json", _schema(body.guided_json, "guided_json")
    yield "json_schema", _schema(body.json_schema, "json_schema")
    yield "guided_regex", _regex(body.guided_regex)
    yield "guided_choice", _choice(body.guided_choice)
    asked = body.structured_outputs
    if asked is not None:
        yield "structured_outputs.json", _schema(asked.json_, "structured_outputs.json")
        yield "structured_outputs.regex", _regex(asked.regex)
        yield "structured_outputs.choice", _choice(asked.choice)
        yield "structured_outputs.json_object", _any_object() if asked.json_object else None


def _response_format(body: ChatCompletionRequest) -> Grammar | None:
    asked = body.response_format
    assert asked is not None
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return _any_object()
    if asked.type != "json_schema":
        message = f"The response format {asked.type!r} is not supported."
        raise unsupported("response_format", message, hint="use text, json_object or json_schema")
    if asked.json_schema is None:
        raise RequestError(
            "response_format has no json_schema.",
            hint='send {"type": "json_schema", "json_schema": {"name": …, "schema": …}}',
            param="response_format.json_schema",
            code="invalid_value",
        )
    schema = asked.json_schema.schema_
    return _any_object() if schema is None else _schema(schema, "response_format.json_schema.schema")


def _any_object() -> Grammar:
    return Grammar("json_schema", _ANY_OBJECT)


def _schema(schema: dict[str, Any] | str | None, param: str) -> Grammar | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = json.loads(_bounded(schema, param))
        except (ValueError, RecursionError) as error:
            message = f"{param} is not JSON: {error}"
            raise RequestError(message, hint="send a schema", param=param, code="invalid_value") from error
    return Grammar("json_schema", _bounded(json.dumps(schema), param))


def _regex(pattern: str | None) -> Grammar | None:
    return None if pattern is None else Grammar("regex", _bounded(pattern, "guided_regex"))


def _choice(choices: list[str] | None) -> Grammar | None:
    if choices is None:
        return None
    return Grammar("choice", _bounded(json.dumps(choices, ensure_ascii=False), "guided_choice"))


def _bounded(text: str, param: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        message = f"{param} has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}."
        raise RequestError(message, hint="simplify it", param=param, code="invalid_value")
    return text

"""Tool call format of Qwen3-Coder and its kin, not JSON: `<tool_call>`, `<function=name>`, and each parameter as

    <parameter=city>
    Oslo
    </parameter>

then `</function>` and `</tool_call>`. A value is plain text; what it is in JSON is told by the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcompute.api.tools.call_format import (
    CallFormat,
    Marks,
    Tool,
    quoted,
)
from shardcompute.api.tools.events import (
    AnswerText,
    CallArguments,
    CallReader,
    CallStarted,
    Event,
    before_partial,
    merged,
    split_before,
)
from shardcompute.api.tools.hermes import CLOSE, OPEN, marked_calls, text_then_marked_calls
from shardcompute.core.errors import UsageError
from shardcompute.decoding import json_rule

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]{1,128})>")
_BEGUN = re.compile(r"(?:<tool_call>\s*)?<function=[^<>\n]{0,128}\Z|<tool_call>\s*(?:<[a-z=]{0,9})?\Z")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_DEFINITIONS = ("$defs", "definitions")
_UNENFORCED = frozenset({"pattern", "minLength", "maxLength", "format"})


class QwenCoderReader(CallReader):
    """Text, calls, text again. Models that leave `<tool_call>` out are understood."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas = {tool.name: tool.parameters for tool in tools}
        super().__init__()
        self._name: str | None = None
        self._given = 0
        """Parameters of the call under way."""
        self._has_called = False

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        events: list[Event] = []
        self.is_mid_call = self._name is not None
        if self._name is None:
            self._say(self._before_call() if is_cut else self._held, events)
        self._held = ""
        return merged(events)

    def _advance(self, events: list[Event]) -> bool:
        if self._name is not None:
            return self._follow_function(self._name, events)
        if self._has_called and (rest := self._held.lstrip()).startswith(CLOSE):
            self._held = rest[len(CLOSE) :]
            return True
        found = _FUNCTION.search(self._held)
        if found:
            self._say(self._held[: found.start()].rstrip(), events)
            self._held, self._name, self._given, self._has_called = (
                self._held[found.end() :],
                found[1],
                0,
                True,
            )
            events.append(CallStarted(found[1]))
            return True
        begun = _BEGUN.search(self._held)
        certain = len(self._held[: begun.start()].rstrip()) if begun else len(self._held)
        if self._has_called:
            certain = min(certain, split_before(self._held, CLOSE))
        certain = min(certain, split_before(self._held, OPEN), split_before(self._held, FUNCTION))
        self._say(self._held[:certain], events)
        self._held = self._held[certain:]
        return False

    def _before_call(self) -> str:
        """What is held, without the beginning of a call at its end."""
        if self._has_called and CLOSE.startswith(self._held.lstrip()):
            return ""
        begun = _BEGUN.search(self._held)
        held = self._held[: begun.start()].rstrip() if begun else self._held
        return before_partial(before_partial(held, OPEN), FUNCTION)

    def _say(self, text: str, events: list[Event]) -> None:
        """The line between two calls is not meant for anybody."""
        text = text.lstrip() if self._has_called else text
        self._has_called = self._has_called and not text
        events.append(AnswerText(text))

    def _follow_function(self, name: str, events: list[Event]) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(PARAMETER) and END_PARAMETER not in self._held:
            return False
        if found := _PARAMETER.match(self._held):
            schema = parameter_schema(self._schemas.get(name, {}), found[1])
            written = f"{json.dumps(found[1])}: {in_json(found[2], schema)}"
            events.append(CallArguments((", " if self._given else "{") + written))
            self._held, self._given = self._held[found.end() :], self._given + 1
            return True
        if self._held.startswith((END_FUNCTION, CLOSE)):
            events.append(CallArguments("}" if self._given else "{}"))
            self._held, self._name = self._held.removeprefix(END_FUNCTION), None
            return True
        if any(mark.startswith(self._held) for mark in (PARAMETER, END_FUNCTION, CLOSE)):
            return False
        # Something else between the parameters: nobody could say what it is.
        self._held = self._held[1:]
        return True


def parameter_schema(root: Mapping[str, Any], name: str) -> Any:
    """What a tool's schema says of one parameter."""
    described = _followed(root, root).get("properties") or {}
    return _followed(described.get(name), root)


def in_json(value: str, schema: object) -> str:
    """A parameter's text as JSON of its schema; where that leaves it open, as the JSON that it is, or as a string."""
    allowed = _types_of(schema)
    text = value.lower() if value in ("True", "False", "None", "Null") else value
    try:
        parsed = json.loads("null" if text == "none" else text)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    kind = _NAMES.get(type(parsed), "array" if isinstance(parsed, list) else "object")
    fits = kind in allowed or (kind == "integer" and "number" in allowed)
    if ("string" in allowed and kind != "null") or (allowed and not fits):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(parsed, ensure_ascii=False)


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema refers to, where that is a definition beside it."""
    where = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(where, str):
        return schema
    _, kind, name = (*where.split("/"), "", "")[:3]
    return (root.get(kind) or {}).get(name, schema) if kind in _DEFINITIONS else schema


def _types_of(schema: object) -> set[str]:
    """The types that a schema names; none where it leaves them open."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set(named or ())
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found |= _types_of(branch)
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    return found or {_NAMES[type(value)] for value in values if type(value) in _NAMES}


@dataclass(frozen=True, slots=True)
class Wording:
    """How a call is written down; `%s` stands for a name."""

    call: str
    end_call: str
    parameter: str
    end_parameter: str
    named: str
    """A Lark rule for the head of a parameter of any name."""


class QwenCoderFormat(CallFormat):
    marks: tuple[str, ...] = (OPEN, CLOSE)
    wording = Wording(
        call=f"{FUNCTION}%s>\n",
        end_call=END_FUNCTION,
        parameter=f"{PARAMETER}%s>\n",
        end_parameter=f"\n{END_PARAMETER}\n",
        named=f'{quoted(PARAMETER)} /[^<>\\n]+/ ">\\n"',
    )

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return QwenCoderReader(tools)

    def calls(self, tools: Sequence[Tool], marks: Marks, most: int) -> str:
        lines = [self._marked(marks, most)]
        lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
        for index, tool in enumerate(tools):
            lines += _call_rules(index, tool, self.wording)
        end = quoted(self.wording.end_parameter)
        lines += [f"words[suffix={end}]: /(.|\\n)*/", f"end: {end}"]
        return "\n".join(lines)

    def _marked(self, marks: Marks, most: int) -> str:
        return marked_calls(marks, most)

    def holds_text(self, tool: Tool) -> bool:
        described: Mapping[str, Any] = _followed(tool.parameters, tool.parameters).get("properties") or {}
        return not any(_is_limited(_followed(each, tool.parameters)) for each in described.values())

    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        return text_then_marked_calls(marks, most)


def _call_rules(index: int, tool: Tool, wording: Wording) -> Iterable[str]:
    """Lark rules for one function: its parameters in the schema's order, or any where it names none."""
    schema = _followed(tool.parameters, tool.parameters)
    properties: Mapping[str, Any] = schema.get("properties") or {}
    head = quoted(wording.call % tool.name)
    end = quoted(wording.end_call) if wording.end_call else ""
    if not properties and schema.get("additionalProperties") not in (None, False):
        yield f"call_{index}: {head} ({wording.named} words)* {end}"
        return
    required = schema.get("required") or ()
    parts = [f"given_{index}_{i}{'' if key in required else '?'}" for i, key in enumerate(properties)]
    yield f"call_{index}: {head} {' '.join(parts)} {end}"
    shared = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    for i, (key, schema) in enumerate(properties.items()):
        yield f"given_{index}_{i}: {quoted(wording.parameter % key)} {_value_rule(schema, shared, tool)}"


def _is_limited(schema: Any) -> bool:
    return isinstance(schema, Mapping) and bool(_UNENFORCED & schema.keys()) and "enum" not in schema


def _value_rule(schema: Any, shared: Mapping[str, Any], tool: Tool) -> str:
    known = _followed(schema, tool.parameters)
    if isinstance(known, Mapping):
        choices = [known["const"]] if "const" in known else known.get("enum")
        if choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(quoted(choice) for choice in choices)}) end"
    if not isinstance(known, Mapping) or "string" in (allowed := _types_of(known)) or not allowed:
        if tool.is_strict and _is_limited(known):
            message = f"The tool {tool.name!r} limits a text in ways that this model's format of calls cannot enforce."
            raise UsageError(message, hint="leave strict out, or limit the text by enum")
        return "words"
    return f"{json_rule({**schema, **shared}, is_lenient=not tool.is_strict)} end"

"""Tool calling for models whose chat template knows none: they are explained in the system message.

The model is taught the format of `hermes` in words. Calls and results of the conversation so far are written into
messages that any template takes: a call as the assistant's text, a result as the user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardcompute.api.tools.call_format import Tool
from shardcompute.api.tools.hermes import CLOSE, OPEN, HermesFormat

_INSTRUCTION = """You can call these tools, each given as JSON with a schema of its parameters:
{tools}

To call a tool, answer with nothing but its name and its arguments as JSON between marks, like this:
{open}
{{"name": "tool_name", "arguments": {{"parameter": "value"}}}}
{close}
The results come back to you between <tool_response> and </tool_response>. Call no tool when none is needed."""


class GenericFormat(HermesFormat):
    """A model that was never taught the format does not know when to stop either: held to it, it makes one call."""

    has_own_template = False
    most_calls = 1


def explain(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, has_system_role: bool = True
) -> list[dict[str, Any]]:
    """The messages, with the tools told to the model in the system message or, where there is no such role, at the
    start of the first one."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool.described()["function"], ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=described, open=OPEN, close=CLOSE)
    if plain[0]["role"] == "system" or not has_system_role:
        role = "user" if plain[0]["role"] == "system" and not has_system_role else plain[0]["role"]
        own = plain[0]["content"]
        texts = [own, instruction] if role == "system" else [instruction, own]
        first = {**plain[0], "role": role, "content": _joined(texts, "\n\n")}
        return [first, *plain[1:]]
    return [{"role": "system", "content": instruction}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a role and text alone."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        told = _joined(["<tool_response>", content, "</tool_response>"], "\n")
        return {"role": "user", "content": told}
    calls = message.get("tool_calls") or ()
    written = [
        f"{OPEN}\n{json.dumps({key: call['function'][key] for key in ('name', 'arguments')})}\n{CLOSE}"
        for call in calls
    ]
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    return {**kept, "content": _joined([each for each in (content, *written) if each], "\n")}


def _joined(contents: Sequence[Any], between: str) -> Any:
    """One content of several: a text, or a list of parts where one of them has images."""
    if all(isinstance(content, str) for content in contents):
        return between.join(contents)
    parts: list[Any] = []
    for index, content in enumerate(contents):
        if index:
            parts.append({"type": "text", "text": between})
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts

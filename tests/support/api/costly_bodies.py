"""Bodies that cost a server far more than they cost who sends them, each as large as a body may be.

By name: the path, and what makes the body. They are made when they are asked for: together they would not be small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shardcompute.api import Limits

BODY_BYTES = Limits().max_body_bytes - 4096
MILLION = 1_000_000
Body = Callable[[], bytes]


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _many(item: str, around: str, most: int = BODY_BYTES) -> bytes:
    """The body `around`, with as many items in the place of `@` as it has room for; `#` in one is its number."""
    items, size = [], len(around)
    while len(items) < most:
        items.append(item.replace("#", str(len(items))))
        size += len(items[-1]) + 1
        if size > BODY_BYTES:
            items.pop()
            break
    return around.replace("@", ",".join(items)).encode()


def _nested(before: str, core: str, after: str, depth: int) -> str:
    return before * depth + core + after * depth


def _chained(count: int) -> dict[str, Any]:
    """A schema that refers to one that refers to one."""
    links = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(count)
    }
    return {"$defs": {**links, f"a{count}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


def _chat(path: str, bodies: Mapping[str, Body]) -> dict[str, tuple[str, Body]]:
    return {name: (path, body) for name, body in bodies.items()}


_USER = [{"role": "user", "content": "Hi"}]
_HI = '"messages":[{"role":"user","content":"Hi"}],"max_tokens":1'
_SCHEMA = '{"type":"object","properties":{@}}'
_TOOL = '{"type":"function","function":{"name":"f#","parameters":{"type":"object","properties":{"a":{"enum":[1]}}}}}'
_ONE_TOOL = f'{{{_HI},"tools":[{{"type":"function","function":{{"name":"f","parameters":{_SCHEMA}}}}}]}}'
_LONG_WORDS = [
    {"type": "function", "function": {"name": f"f{i}", "description": "x" * 60_000}} for i in range(128)
]
_DEEP_TOOL = (
    '{"type":"function","function":{"name":"f","parameters":' + _nested('{"a":', "1", "}", 100) + "}}"
)
_WORDS = "x " * (BODY_BYTES // 2 - 100)
_BLOCK = '[{"type":"tool_result","tool_use_id":"a","content":'

_STOPS: dict[str, tuple[str, Body]] = {
    "a long stop string": (
        "/v1/completions",
        lambda: _json(prompt="Hi", max_tokens=1, n=64, stop="ab" * (MILLION // 2)),
    ),
    "long stop strings": (
        "/v1/chat/completions",
        lambda: _json(messages=_USER, n=12, stop=[f"{i:x}" * 60_000 for i in range(16)]),
    ),
    "long stops of Anthropic": (
        "/v1/messages",
        lambda: _json(messages=_USER, max_tokens=1, stop_sequences=["ab" * MILLION]),
    ),
    "long stops of Ollama": ("/api/chat", lambda: _json(messages=_USER, options={"stop": "ab" * MILLION})),
}
_MESSAGES = {
    **_chat(
        "/v1/chat/completions",
        {
            "empty messages": partial(_many, '{"role":"user"}', '{"messages":[@]}'),
            "empty parts": partial(
                _many, '{"type":"text","text":""}', '{"messages":[{"role":"user","content":[@]}]}'
            ),
            "empty calls": partial(
                _many,
                '{"id":"","function":{"name":"","arguments":"{}"}}',
                '{"messages":[{"role":"assistant","tool_calls":[@]}]}',
            ),
            "long arguments": partial(
                _many,
                "[" * (BODY_BYTES // 2),
                '{"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f",'
                '"arguments":"@"}}]}]}',
            ),
        },
    ),
    **_chat(
        "/v1/responses",
        {
            "empty items": partial(_many, '{"role":"user","content":""}', '{"input":[@]}'),
            "calls as items": partial(
                _many, '{"type":"function_call","call_id":"a","name":"f"}', '{"input":[@]}'
            ),
        },
    ),
    **_chat(
        "/v1/messages/count_tokens",
        {
            "empty messages of Anthropic": partial(_many, '{"role":"user","content":""}', '{"messages":[@]}'),
            "empty blocks": partial(
                _many, '{"type":"text","text":""}', '{"messages":[{"role":"user","content":[@]}]}'
            ),
            "results of tools": partial(
                _many,
                '{"type":"tool_result","tool_use_id":"a"}',
                '{"messages":[{"role":"user","content":[@]}]}',
            ),
            "input of tools": partial(
                _many,
                "{}",
                '{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f",'
                '"input":{"a":[@]}}]},{"role":"user","content":"Hi"}]}',
            ),
            "deep blocks": partial(
                _many,
                _nested(_BLOCK, '"x"', "}]", 60),
                '{"messages":[{"role":"user","content":@}]}',
                1,
            ),
            "deep blocks that are wrong": partial(
                _many, _nested(_BLOCK, "1", "}]", 60), '{"messages":[{"role":"user","content":@}]}', 1
            ),
        },
    ),
    "empty messages of Ollama": ("/api/chat", partial(_many, '{"role":"user"}', '{"messages":[@]}')),
    "empty messages to count": ("/tokenize", partial(_many, '{"role":"user"}', '{"messages":[@]}')),
}
_TOOLS = {
    **_chat(
        "/v1/chat/completions",
        {
            "512 tools": partial(_many, _TOOL, f'{{{_HI},"tools":[@]}}', 512),
            "more tools": partial(_many, _TOOL, f'{{{_HI},"tools":[@]}}'),
            "tools with long words": lambda: _json(messages=_USER, max_tokens=1, tools=_LONG_WORDS),
            "a tool of many properties": partial(_many, '"a#":{"type":"integer"}', _ONE_TOOL),
            "a tool of many choices": partial(_many, '"a#"', _ONE_TOOL.replace("@", '"a":{"enum":[@]}')),
            "deep tools": partial(_many, _DEEP_TOOL, f'{{{_HI},"tools":[@]}}'),
        },
    ),
    "tools of Responses": (
        "/v1/responses",
        partial(_many, '{"type":"function","name":"f#"}', '{"input":"Hi","tools":[@]}'),
    ),
    "tools of Anthropic": ("/v1/messages", partial(_many, '{"name":"f#"}', f'{{{_HI},"tools":[@]}}')),
    "tools of Ollama": ("/api/chat", partial(_many, _TOOL, f'{{{_HI},"tools":[@]}}')),
}
_GRAMMARS = {
    **_chat(
        "/v1/completions",
        {
            "a large schema": partial(
                _many, '"a#":{"type":"integer"}', f'{{"prompt":"Hi","guided_json":{_SCHEMA}}}'
            ),
            "a schema of 200 KB": partial(
                _many, '"a#":{"type":"integer"}', f'{{"prompt":"Hi","guided_json":{_SCHEMA}}}', 7000
            ),
            "a schema of expressions": partial(
                _many,
                f'"a#":{{"type":"string","pattern":"{"(a|b)*" * 2000}"}}',
                f'{{"prompt":"Hi","guided_json":{_SCHEMA}}}',
                20,
            ),
            "a large schema as text": lambda: _json(
                prompt="Hi", guided_json=f'{{"enum":[{",".join(["1"] * MILLION)}]}}'
            ),
            "a deep schema as text": lambda: _json(
                prompt="Hi", guided_json=_nested('{"items":', "{}", "}", 400_000)
            ),
            "a chain of references": lambda: _json(prompt="Hi", guided_json=_chained(2000)),
            "multiples of a large number": lambda: _json(
                prompt="Hi", guided_json={"type": "integer", "multipleOf": 999_983}
            ),
            "expressions that must agree": lambda: _json(
                prompt="Hi", guided_json={"allOf": [{"pattern": f"^.*a.{{{i}}}$"} for i in range(40)]}
            ),
            "a large expression": lambda: _json(prompt="Hi", guided_regex="(a|b)*" * 40_000),
            "a long expression": lambda: _json(prompt="Hi", guided_regex="a?" * 2000),
            "an expression that explodes": lambda: _json(
                prompt="Hi", guided_regex="(a|b)*a(a|b){30}" + "(.{0,1000}){0,1000}" * 20
            ),
            "many choices": lambda: _json(prompt="Hi", guided_choice=[f"{i:060}" for i in range(4096)]),
        },
    ),
    "a format of Responses": (
        "/v1/responses",
        partial(
            _many,
            '"a#"',
            '{"input":"Hi","text":{"format":{"type":"json_schema","schema":{"enum":[@]}}}}',
        ),
    ),
    "a format of Ollama": ("/api/chat", partial(_many, '"a#"', f'{{{_HI},"format":{{"enum":[@]}}}}')),
}
_TEXTS = {
    **_chat(
        "/v1/completions",
        {
            "a long prompt": lambda: _json(prompt=_WORDS),
            "many prompts": lambda: _json(prompt=["x " * 8000] * 128),
            "prompts without end": partial(_many, '""', '{"prompt":[@]}'),
            "prompts of ids": partial(_many, "[1]", '{"prompt":[@]}'),
            "a prompt of ids": partial(_many, "1", '{"prompt":[@]}'),
            "a prompt of ids to echo": partial(_many, "1", '{"echo":true,"prompt":[@]}'),
            "biases for each choice": lambda: _json(
                prompt="Hi",
                max_tokens=1,
                n=128,
                logit_bias={str(i): 1 for i in range(258)},
                stop_token_ids=list(range(1024)),
            ),
            "many biases": partial(_many, '"#":1', '{"prompt":"Hi","logit_bias":{@}}'),
            "biases that are none": partial(_many, '"#":[]', '{"prompt":"Hi","logit_bias":{@}}'),
        },
    ),
    "a long text": ("/tokenize", lambda: _json(prompt=_WORDS, return_token_strs=True)),
    "a text to count": ("/tokenize", lambda: _json(prompt="x" * MILLION, return_token_strs=True)),
    "a long message to count": (
        "/tokenize",
        lambda: _json(messages=[{"role": "user", "content": _WORDS}]),
    ),
    "many tokens": ("/detokenize", partial(_many, "1", '{"tokens":[@]}')),
    "a million tokens": ("/detokenize", partial(_many, "1", '{"tokens":[@]}', MILLION)),
    "long inputs": ("/v1/embeddings", lambda: _json(input=["x" * 4000] * 2048)),
    "an input of ids": ("/v1/embeddings", partial(_many, "1", '{"input":[@]}')),
    "long inputs of Ollama": ("/api/embed", lambda: _json(input=["x" * 4000] * 2048, truncate=False)),
    "a raw prompt": ("/api/generate", lambda: _json(prompt=_WORDS, raw=True)),
}
_UNKNOWN = {
    **_chat(
        "/v1/completions",
        {
            "unknown fields": partial(_many, '"a#":0', '{"prompt":"Hi",@}'),
            "fields that are forbidden": partial(_many, '"a#":0', '{"prompt":"Hi","structured_outputs":{@}}'),
            "empty objects": partial(_many, "{}", '{"prompt":"Hi","unknown":[@]}'),
            "numbers": partial(_many, "1e9", '{"prompt":"Hi","unknown":[@]}'),
            "long numbers": partial(_many, "9" * 4000, '{"prompt":"Hi","unknown":[@]}'),
            "a deep body": lambda: _nested("[", "", "]", BODY_BYTES // 2).encode(),
            "spaces": lambda: b" " * BODY_BYTES,
            "a text that never ends": lambda: b'{"prompt":"' + b"\\u0041" * (BODY_BYTES // 6 - 10),
            "quotes in a text": lambda: _json(unknown='"{[\\' * (BODY_BYTES // 8), prompt="Hi"),
        },
    ),
    **_chat(
        "/v1/responses",
        {
            "metadata that is none": partial(_many, '"a#":0', '{"input":"Hi","metadata":{@}}'),
            "inclusions that are none": partial(_many, "0", '{"input":"Hi","include":[@]}'),
        },
    ),
}
COSTLY: Mapping[str, tuple[str, Body]] = {
    **_STOPS,
    **_MESSAGES,
    **_TOOLS,
    **_GRAMMARS,
    **_TEXTS,
    **_UNKNOWN,
}

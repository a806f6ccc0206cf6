"""`haystack` generators: chat, streams, tools with and without parameters. Arguments: url, key, model."""

from __future__ import annotations

import sys

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

URL, KEY, MODEL = sys.argv[1:]
PLACE = {"api_key": Secret.from_token(KEY), "model": MODEL, "api_base_url": f"{URL}/v1"}
ASK = [ChatMessage.from_user("Say hello.")]

plain = OpenAIChatGenerator(**PLACE, generation_kwargs={"temperature": 0, "max_tokens": 12})
words = plain.run(ASK)["replies"][0].text
assert words
pieces: list[str] = []
streamed = plain.run(ASK, streaming_callback=lambda chunk: pieces.append(chunk.content))
assert "".join(pieces) == streamed["replies"][0].text == words

weather = Tool(
    name="weather",
    description="The weather in a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
    function=lambda city: "sunny",
)
clock = Tool(
    name="clock",
    description="The time of day.",
    parameters={"type": "object", "properties": {}},
    function=lambda: "noon",
)
for tool, keys in ((weather, {"city"}), (clock, set())):
    wish = {
        "tool_choice": {"type": "function", "function": {"name": tool.name}},
        "temperature": 0,
        "max_tokens": 100,
    }
    question = [ChatMessage.from_user("What is the weather in Rome, and what time is it?")]
    reply = plain.run(question, tools=[weather, clock], generation_kwargs=wish)["replies"][0]
    assert set(reply.tool_calls[0].arguments) == keys, reply.tool_calls
    result = ChatMessage.from_tool(tool_result="sunny", origin=reply.tool_calls[0])
    assert plain.run([*question, reply, result], tools=[weather, clock])["replies"]

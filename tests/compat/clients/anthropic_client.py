"""`anthropic` against a server: messages, streams, token counts, stop sequences, errors. Arguments: url, key, model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic

URL, KEY, MODEL = sys.argv[1:]
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
ASK = {
    "model": MODEL,
    # Long enough to be worth remembering.
    "system": "You are polite, patient and brief. You answer in one short sentence, whatever you are asked.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}],
}
# Newer releases have no parameter for it.
GREEDY = {**ASK, "max_tokens": 12, "extra_body": {"temperature": 0}}


def refusal(kind: Any, run: Callable[[], Any]) -> Any:
    try:
        run()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} did not come")


message = client.messages.create(**GREEDY)
assert message.role == "assistant"
assert message.content[0].type == "text"
words = message.content[0].text
assert words
assert message.stop_reason in ("end_turn", "max_tokens")

kinds: list[str] = []
with client.messages.stream(**GREEDY) as stream:
    kinds += [event.type for event in stream]
    final = stream.get_final_message()
assert final.content[0].text == words
assert final.usage.output_tokens == message.usage.output_tokens
assert kinds[0] == "message_start"
assert kinds[-1] == "message_stop"

with client.messages.stream(**GREEDY) as stream:
    assert "".join(stream.text_stream) == words

# Some releases take nothing but the output's count from the end of a stream.
whole, again = message.usage, client.messages.create(**GREEDY).usage
assert client.messages.count_tokens(**ASK).input_tokens == whole.input_tokens + whole.cache_read_input_tokens
assert again.cache_read_input_tokens > 0, "the second time the prompt is known"
assert (
    again.input_tokens + again.cache_read_input_tokens == whole.input_tokens + whole.cache_read_input_tokens
)

stop = words[3:5]
stopped = client.messages.create(**GREEDY, stop_sequences=[stop])
assert stopped.stop_reason == "stop_sequence", stopped
assert stopped.stop_sequence == stop
assert stopped.content[0].text == words[: words.index(stop)]

schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
weather = {"name": "weather", "description": "The weather in a city.", "input_schema": schema}
calling = {
    "model": MODEL,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": [weather],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "extra_body": {"temperature": 0},
}
used = client.messages.create(**calling)
assert used.stop_reason == "tool_use", used
block = next(block for block in used.content if block.type == "tool_use")
assert block.input["city"] in ("Rome", "Oslo")
with client.messages.stream(**calling) as stream:
    streamed = stream.get_final_message()
assert next(block for block in streamed.content if block.type == "tool_use").input["city"] in ("Rome", "Oslo")
found = [{"type": "tool_result", "tool_use_id": block.id, "content": "Sunny."}]
told = {"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"})]}
calling |= {"messages": [*calling["messages"], told, {"role": "user", "content": found}]}
assert client.messages.create(**{**calling, "tool_choice": {"type": "none"}}).content
config = {"format": {"type": "json_schema", "schema": schema}}
formed = client.messages.create(**{**GREEDY, "max_tokens": 100}, output_config=config)
assert json.loads(formed.content[0].text)["city"] in ("Rome", "Oslo")

unknown, wrong = {**GREEDY, "model": "no-such-model"}, {**GREEDY, "extra_body": {"temperature": 9}}
assert refusal(anthropic.NotFoundError, lambda: client.messages.create(**unknown)).body["type"] == "error"
assert refusal(anthropic.BadRequestError, lambda: client.messages.create(**wrong)).body["type"] == "error"
stranger = anthropic.Anthropic(base_url=URL, api_key="other", max_retries=0)
error = refusal(anthropic.AuthenticationError, lambda: stranger.messages.create(**GREEDY))
assert error.body["error"]["type"] == "authentication_error"

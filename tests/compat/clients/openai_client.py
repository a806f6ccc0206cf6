"""`openai` against a server: models, chat, responses, completions, embeddings, errors. Arguments: url, key, model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic

URL, KEY, MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
MESSAGES = [{"role": "user", "content": "Say hello."}]


def refusal(kind: Any, run: Callable[[], Any]) -> Any:
    try:
        run()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} did not come")


assert MODEL in [model.id for model in client.models.list()]

reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=64, temperature=0)
words = reply.choices[0].message.content
assert words
assert reply.usage.completion_tokens <= 64

with client.chat.completions.create(
    model=MODEL,
    messages=MESSAGES,
    max_tokens=64,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
) as stream:
    chunks = list(stream)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == words
assert chunks[-1].usage.total_tokens == reply.usage.total_tokens

response = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=64, temperature=0)
assert response.output_text == words, (response.output_text, words)
assert response.usage.output_tokens == reply.usage.completion_tokens

second = client.responses.create(
    model=MODEL, input="Again.", previous_response_id=response.id, max_output_tokens=16, temperature=0
)
assert second.usage.input_tokens > response.usage.input_tokens

kinds: list[str] = []
with client.responses.stream(
    model=MODEL, input=MESSAGES, instructions=None, max_output_tokens=64, temperature=0
) as stream:
    kinds += [event.type for event in stream]
    final = stream.get_final_response()
assert final.output_text == words
assert kinds[0] == "response.created"
assert kinds[-1] in ("response.completed", "response.incomplete")
assert kinds.count("response.output_text.done") == 1

completion = client.completions.create(
    model=MODEL, prompt="The sky is", max_tokens=4, temperature=0, logprobs=2, echo=True
)
assert completion.choices[0].text.startswith("The sky is")
assert len(completion.choices[0].logprobs.tokens) > 4

# The client asks for base64 by itself and unpacks it.
vectors = client.embeddings.create(model=MODEL, input=["one", "two"]).data
plain = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float").data
assert len(vectors) == 2
assert all(a.embedding == b.embedding for a, b in zip(vectors, plain, strict=True))
assert abs(sum(x * x for x in vectors[0].embedding) - 1) < 1e-4


class Place(pydantic.BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]


ask = [{"role": "user", "content": "What is the weather in Rome?"}]
weather = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": Place.model_json_schema(),
}
called = client.chat.completions.create(
    model=MODEL,
    messages=ask,
    tools=[{"type": "function", "function": weather}],
    tool_choice="required",
    parallel_tool_calls=False,
    temperature=0,
    max_tokens=200,
)
assert Place.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)

with client.responses.stream(
    model=MODEL,
    input=ask,
    tools=[{"type": "function", **weather, "strict": True}],
    tool_choice={"type": "function", "name": "weather"},
    parallel_tool_calls=False,
    temperature=0,
    max_output_tokens=200,
) as stream:
    for _ in stream:
        pass
    calls = [item for item in stream.get_final_response().output if item.type == "function_call"]
assert calls[0].name == "weather"
assert Place.model_validate_json(calls[0].arguments)

parsed = client.responses.parse(model=MODEL, input=ask, text_format=Place, max_output_tokens=200)
assert parsed.output_parsed.city in ("Rome", "Oslo")

lost = {"model": MODEL, "input": "x", "previous_response_id": "resp_1"}
error = refusal(openai.BadRequestError, lambda: client.responses.create(**lost))
assert error.param == "previous_response_id"
image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
shown = {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}
error = refusal(openai.BadRequestError, lambda: client.chat.completions.create(**shown))
assert error.param == "messages[0].content[0]"
assert "does not see images" in str(error)
unknown = {"model": "no-such-model", "messages": MESSAGES}
assert (
    refusal(openai.NotFoundError, lambda: client.chat.completions.create(**unknown)).code == "model_not_found"
)

"""`ollama` against a server: chat, generate, embed, models, refusals. Arguments: url, key, model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import ollama

URL, KEY, MODEL = sys.argv[1:]
client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=300)
GREEDY = {"temperature": 0, "num_predict": 12}
MESSAGES = [{"role": "user", "content": "Say hello."}]


def refusal(kind: Any, run: Callable[[], Any]) -> Any:
    try:
        run()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} did not come")


[listed] = client.list().models
assert listed.model == MODEL
assert len(listed.digest) == 64
assert listed.size > 1_000_000
assert MODEL in [model.model for model in client.ps().models]
shown = client.show(MODEL)
assert "completion" in shown.capabilities
assert shown.modelinfo["shardcompute.context_length"] > 0

reply = client.chat(MODEL, MESSAGES, options=GREEDY)
words = reply.message.content
assert words
assert reply.done
assert reply.eval_count <= 12
assert reply.eval_duration > 0

assert client.chat("smollm2:135m", MESSAGES, options=GREEDY).message.content == words
lines = list(client.chat(MODEL, MESSAGES, options=GREEDY, stream=True))
assert "".join(line.message.content for line in lines) == words
assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]

assert client.generate(MODEL, "Say hello.", options=GREEDY).response == words
raw = client.generate(MODEL, "The sky is", raw=True, options=GREEDY, stream=True)
assert "".join(line.response for line in raw)

schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
formed = client.chat(MODEL, MESSAGES, format=schema, options={"num_predict": 100})
assert json.loads(formed.message.content)["city"] in ("Rome", "Oslo")


def weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: Its name.
    """
    return "sunny"


# The model may call it or not; what comes must be understood either way.
answered = client.chat(MODEL, MESSAGES, tools=[weather], options={"num_predict": 60})
assert answered.done

embedded = client.embed(MODEL, ["one", "two"])
assert len(embedded.embeddings) == 2
assert list(client.embeddings(MODEL, "one").embedding) == list(embedded.embeddings[0])

assert client.pull(MODEL).status == "success"
assert refusal(ollama.ResponseError, lambda: client.delete(MODEL)).status_code == 400
assert refusal(ollama.ResponseError, lambda: client.chat("no-such-model", MESSAGES)).status_code == 404

"""`litellm` by all three protocols: chat, streams, embeddings, errors that it knows. Arguments: url, key, model."""

from __future__ import annotations

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

URL, KEY, MODEL = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Say hello."}]
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
GREEDY = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}

words = litellm.completion(**OPENAI, **GREEDY).choices[0].message.content
assert words
chunks = litellm.completion(**OPENAI, **GREEDY, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == words

# Ollama's names for models, and bodies that do not say that they are JSON.
for route in ("ollama", "ollama_chat"):
    reply = litellm.completion(model=f"{route}/smollm2", api_base=URL, api_key=KEY, **GREEDY)
    assert reply.choices[0].message.content, route
    chunks = litellm.completion(
        model=f"{route}/smollm2:135m", api_base=URL, api_key=KEY, **GREEDY, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks), route

claude = litellm.completion(model=f"anthropic/{MODEL}", api_base=URL, api_key=KEY, **GREEDY)
assert claude.choices[0].message.content == words

vectors = litellm.embedding(input=["one", "two"], encoding_format="float", **OPENAI).data
assert len(vectors) == 2

long = [{"role": "user", "content": "word " * 20_000}]
for place in (OPENAI, {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY}):
    try:
        litellm.completion(**place, messages=long, max_tokens=8)
    except litellm.ContextWindowExceededError:
        continue
    raise AssertionError(f"{place['model']}: a prompt that is too long was not known as one")

"""`langchain-openai` against a server: chat, streams, embeddings. Arguments: url, key, model."""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

URL, KEY, MODEL = sys.argv[1:]
PLACE = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL}

chat = ChatOpenAI(**PLACE, temperature=0, max_tokens=12)
words = chat.invoke("Say hello.").content
assert words
assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == words
assert [reply.content for reply in chat.batch(["Say hello.", "Say hello."])] == [words, words]

newer = ChatOpenAI(**PLACE, temperature=0, max_tokens=12, use_responses_api=True)
assert newer.invoke("Say hello.").text == words

assert OpenAI(**PLACE, temperature=0, max_tokens=4).invoke("The sky is")

# The tokenizer of another company's models must not cut our texts.
embeddings = OpenAIEmbeddings(**PLACE, check_embedding_ctx_length=False)
vectors = embeddings.embed_documents(["one", "two"])
assert len(vectors) == 2
assert vectors[0] == embeddings.embed_query("one")

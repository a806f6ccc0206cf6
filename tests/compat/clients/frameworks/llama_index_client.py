"""`llama-index` as an OpenAI-like model: chat, streams, completion, objects. Arguments: url, key, model."""

from __future__ import annotations

import sys
from typing import Literal

import pydantic
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike

URL, KEY, MODEL = sys.argv[1:]
llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=100,
    max_retries=0,
)
ASK = [ChatMessage(role="user", content="Say hello.")]


class Place(pydantic.BaseModel):
    """Where somebody lives."""

    city: Literal["Rome", "Oslo"]


words = llm.chat(ASK).message.content
assert words
assert [*llm.stream_chat(ASK)][-1].message.content == words
assert llm.complete("Say hello.").text
found = llm.structured_predict(
    Place, PromptTemplate("Anna lives in Rome."), llm_kwargs={"tool_choice": "required"}
)
assert found.city in ("Rome", "Oslo")

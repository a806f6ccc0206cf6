"""`pydantic-ai` over chat and responses: answers, objects, a tool. Arguments: url, key, model."""

from __future__ import annotations

import sys
from typing import Literal

import pydantic
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, MODEL = sys.argv[1:]
provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
SHORT = {"temperature": 0, "max_tokens": 100}


class Place(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]


called: list[bool] = []


def clock() -> str:
    """The time of day."""
    called.append(True)
    return "noon"


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL, provider=provider)
    words = Agent(model, model_settings=SHORT).run_sync("Say hello.").output
    assert words, kind

    found = Agent(model, output_type=Place, model_settings=SHORT).run_sync("Anna lives in Rome.")
    assert found.output.city in ("Rome", "Oslo"), kind
    more = Agent(model, model_settings=SHORT).run_sync("And now?", message_history=found.all_messages())
    assert isinstance(more.output, str), kind

    called.clear()
    agent = Agent(model, tools=[clock], model_settings=SHORT, retries=3)
    # A small model may call for ever; what it does must be understood.
    try:
        agent.run_sync("What time is it? Use the tool.", usage_limits=UsageLimits(request_limit=3))
    except (UsageLimitExceeded, UnexpectedModelBehavior):
        assert called

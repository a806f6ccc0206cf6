"""`openai-agents` over chat and responses: answers, a tool, second turns. Arguments: url, key, model."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import openai
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

URL, KEY, MODEL = sys.argv[1:]
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
called: list[bool] = []


@function_tool
def clock() -> str:
    """The time of day."""
    called.append(True)
    return "noon"


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=60)
        agent = Agent(name="a", instructions="Be brief.", model=model, model_settings=settings)
        first = await Runner.run(agent, "Say hello.")
        assert first.final_output, kind
        items = [*first.to_input_list(), {"role": "user", "content": "Again, please."}]
        assert (await Runner.run(agent, items)).final_output, kind
        if kind is OpenAIResponsesModel:
            second = await Runner.run(agent, "Again.", previous_response_id=first.last_response_id)
            assert second.final_output, kind
        streamed = Runner.run_streamed(agent, "Say hello.")
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds, kind
        assert streamed.final_output == first.final_output, kind

        called.clear()
        forced = ModelSettings(temperature=0, max_tokens=100, tool_choice="clock")
        tooled = Agent(name="b", model=model, tools=[clock], model_settings=forced)
        with contextlib.suppress(MaxTurnsExceeded):
            await Runner.run(tooled, "What time is it?", max_turns=2)
        assert called, kind


asyncio.run(main())

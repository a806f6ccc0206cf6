"""`smolagents` models and its tool-calling agent. Arguments: url, key, model."""

from __future__ import annotations

import json
import sys

from smolagents import AgentError, OpenAIModel, ToolCallingAgent, tool

URL, KEY, MODEL = sys.argv[1:]
model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY, temperature=0, max_tokens=200)
ASK = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]

words = model.generate(ASK).content
assert words
assert "".join(delta.content or "" for delta in model.generate_stream(ASK)) == words


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"sunny in {city}"


message = model.generate(ASK, tools_to_call_from=[weather])
assert message.tool_calls, message
call = message.tool_calls[0]
assert call.function.name == "weather"
arguments = call.function.arguments
assert set(arguments if isinstance(arguments, dict) else json.loads(arguments)) == {"city"}, arguments

# What a small model makes of its task is its own affair; that every step is understood is ours.
agent = ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
try:
    agent.run("What is the weather in Rome?")
except AgentError as error:
    raise AssertionError(str(error)) from error

"""`instructor` in its modes: answers as objects, by tools and by schemas. Arguments: url, key, model."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
import pydantic

URL, KEY, MODEL = sys.argv[1:]
ASK = [{"role": "user", "content": "Anna lives in Rome with her two cats."}]


class Place(pydantic.BaseModel):
    """Where somebody lives. Nothing here forbids other keys."""

    city: Literal["Rome", "Oslo"]
    has_pets: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300), mode=mode
    )
    place, reply = client.chat.completions.create_with_completion(
        model=MODEL, messages=ASK, response_model=Place, max_retries=0, temperature=0, max_tokens=200
    )
    assert isinstance(place, Place), mode
    message = reply.choices[0].message
    written = message.tool_calls[0].function.arguments if message.tool_calls else message.content
    assert set(pydantic.TypeAdapter(dict).validate_json(written)) == {"city", "has_pets"}, written

"""`dspy` with its JSON adapter: a signature is answered by schema. Arguments: url, key, model."""

from __future__ import annotations

import os
import sys
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy

URL, KEY, MODEL = sys.argv[1:]
lm = dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, temperature=0, max_tokens=200, cache=False)
assert lm("Say hello.")[0]


class Mood(dspy.Signature):
    """How the text sounds."""

    text: str = dspy.InputField()
    mood: Literal["glad", "sad"] = dspy.OutputField()


# It only sends schemas to models that it knows by name, so it is told to.
schema = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}},
    "required": ["mood"],
}
form = {"type": "json_schema", "json_schema": {"name": "mood", "schema": schema}}
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
judged = dspy.Predict(Mood)(text="What a lovely day!", config={"response_format": form})
assert judged.mood in ("glad", "sad")

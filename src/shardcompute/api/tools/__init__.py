"""Tool calling: how models are told of tools, how their calls are read, and how a call is enforced.

Owns a `CallFormat` for each family of models, with its streaming parser and its grammar. Calls `decoding` and a model's
vocabulary; `api.generation` calls it.
"""

from __future__ import annotations

from shardcompute.api.tools.call_format import CallFormat, Tool
from shardcompute.api.tools.detection import detect_format
from shardcompute.api.tools.events import (
    AnswerText,
    CallArguments,
    CallReader,
    CallStarted,
    Event,
    ReasoningText,
)
from shardcompute.api.tools.planning import ChatEncoder, Enforcement, ToolPlan, encode_with_tools, plan_tools

__all__ = [
    "AnswerText",
    "CallArguments",
    "CallFormat",
    "CallReader",
    "CallStarted",
    "ChatEncoder",
    "Enforcement",
    "Event",
    "ReasoningText",
    "Tool",
    "ToolPlan",
    "detect_format",
    "encode_with_tools",
    "plan_tools",
]

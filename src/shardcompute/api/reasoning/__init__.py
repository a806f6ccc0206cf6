"""Thinking: how models are told whether to think, and how what they think is told from what they answer.

Owns the marks of each family, the variables that chat templates know thinking by, the splitter of answers and the
grammar that lets thinking come first and ends it in time. Calls `api.tools` and `decoding`; `api.generation` calls it.
"""

from __future__ import annotations

from shardcompute.api.reasoning.channels import ChannelPlan
from shardcompute.api.reasoning.marks import ThinkingMarks, detect_marks
from shardcompute.api.reasoning.planning import ThinkingPlan, plan_thinking
from shardcompute.api.reasoning.splitter import ThinkingSplitter
from shardcompute.api.reasoning.variables import Effort, template_variables

__all__ = [
    "ChannelPlan",
    "Effort",
    "ThinkingMarks",
    "ThinkingPlan",
    "ThinkingSplitter",
    "detect_marks",
    "plan_thinking",
    "template_variables",
]

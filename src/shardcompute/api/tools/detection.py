"""Tool call format detection, from a model's chat template."""

from __future__ import annotations

import re

from shardcompute.api.tools.call_format import CallFormat
from shardcompute.api.tools.gemma import FUNCTION_GEMMA, GEMMA_4
from shardcompute.api.tools.generic import GenericFormat
from shardcompute.api.tools.glm import GlmFormat
from shardcompute.api.tools.harmony import HarmonyFormat, is_harmony
from shardcompute.api.tools.hermes import HermesFormat
from shardcompute.api.tools.listed import GRANITE, NEMOTRON
from shardcompute.api.tools.llama import LlamaFormat
from shardcompute.api.tools.mistral import MistralFormat
from shardcompute.api.tools.qwen_coder import QwenCoderFormat
from shardcompute.api.tools.sectioned import DEEPSEEK_V3, DEEPSEEK_V31, KIMI

_OTHER_CALLS = re.compile("<function=|<arg_key>|<invoke")
"""Stand between Hermes' marks in formats that are not Hermes'."""
_TAKES_TOOLS = re.compile(r"\btools\b")


def detect_format(template: str | None) -> CallFormat:
    """Templates that take no tools, or write calls in a way that we cannot read, get the generic format."""
    if template is None or not _TAKES_TOOLS.search(template):
        return GenericFormat()
    if is_harmony(template):
        return HarmonyFormat()
    if "[TOOL_CALLS]" in template:
        return MistralFormat(has_args_mark="[ARGS]" in template)
    if "<tool_call>" in template and "<function=" in template and "<parameter=" in template:
        return QwenCoderFormat()
    if "<tool_call>" in template and not _OTHER_CALLS.search(template):
        return HermesFormat()
    if "<tool_call>" in template and "<arg_key>" in template:
        return GlmFormat(has_lines="</arg_key><arg_value>" not in template)
    for sectioned in (KIMI, DEEPSEEK_V31):
        if sectioned.marks[0] in template:
            is_fenced = sectioned is DEEPSEEK_V31 and "```json" in template
            return DEEPSEEK_V3 if is_fenced else sectioned
    for gemma in (FUNCTION_GEMMA, GEMMA_4):
        if gemma.marks[0] in template and gemma.marks[1] in template:
            return gemma
    for listed in (GRANITE, NEMOTRON):
        if listed.marks[0] in template:
            return listed
    if "<|python_tag|>" in template or '{"name": function name, "parameters":' in template:
        return LlamaFormat()
    return GenericFormat()

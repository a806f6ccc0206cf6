"""Marks of thinking, by family: what stands before and behind it in an answer."""

from __future__ import annotations

from dataclasses import dataclass

from shardcompute.api.tools.harmony import is_harmony


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """Thinking stands at the beginning of an answer, between these."""

    open: str
    close: str


THINK = ThinkingMarks("<think>", "</think>")
MARKS: tuple[ThinkingMarks, ...] = (
    THINK,  # DeepSeek, Qwen, GLM, Kimi K2, MiniMax, Nemotron, Phi-4
    ThinkingMarks("[THINK]", "[/THINK]"),  # Mistral
    ThinkingMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingMarks("◁think▷", "◁/think▷"),  # Kimi-VL
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThinkingMarks("<thought>", "</thought>"),  # EXAONE Deep
    ThinkingMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ThinkingMarks("<|channel>thought", "<channel|>"),  # Gemma 4
)


def detect_marks(template: str | None) -> ThinkingMarks | None:
    """The marks that a chat template knows; None where it knows none, or writes channels (see `tools.harmony`)."""
    if template is None or is_harmony(template):
        return None
    return next((marks for marks in MARKS if marks.close in template or marks.open in template), None)

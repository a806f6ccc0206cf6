"""Prompts by kind of work, from Spec-Bench's file (JSON lines with `id`, `category` and `turns`)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcompute.core.errors import SourceError, UsageError


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    id: int
    category: str
    text: str
    """The first turn."""


def read_prompts(path: Path, *, most_chars: int = 6000) -> list[BenchPrompt]:
    """All prompts that are no longer than `most_chars`, as they stand in the file."""
    hint = "give Spec-Bench's questions with --data"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read {path}: {error}", hint=hint) from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = BenchPrompt(int(row["id"]), str(row["category"]), str(row["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UsageError(f"line {number} of {path} is no prompt: {error!r}", hint=hint) from error
        if len(prompt.text) <= most_chars:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path} holds no prompts of at most {most_chars} characters", hint=hint)
    return prompts


def sample_prompts(prompts: Sequence[BenchPrompt], per_category: int, seed: int) -> list[BenchPrompt]:
    """Some of each category (0: all), drawn by this seed, the categories in turn: a run that ends early has seen all of
    them."""
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    drawn = random.Random(seed)
    for chosen in by_category.values():
        drawn.shuffle(chosen)
    most = max(map(len, by_category.values()))
    turns = min(per_category, most) if per_category else most
    return [chosen[turn] for turn in range(turns) for chosen in by_category.values() if turn < len(chosen)]

"""Tasks of `bench paper`: BIG-bench questions with answers to choose from, scored by what a model holds likely.

Nothing is sampled: of the answers that a question allows, the one counts that is likeliest behind it. So a form of
weights is right or wrong about a question, and two forms can be compared question by question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardcompute.backends.executor import Executor
from shardcompute.backends.matrix import Array
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UsageError
from shardcompute.models.tokenizer import Tokenizer

MOST_ROWS = 512
_OPTION = re.compile(r"^\(([A-Z])\) ", re.MULTILINE)
_YES_NO = ("Yes", "No")


@dataclass(frozen=True, slots=True)
class Question:
    prompt: Array
    choices: tuple[tuple[int, ...], ...]
    right: int
    """Which of them is."""


def read_task(path: Path, tokenizer: Tokenizer, count: int) -> list[Question]:
    """The first `count` questions of a JSON-lines file with `input` and `target` that fit into the context."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}", hint="give a folder with bbh_*.jsonl") from error
    questions = []
    for row in rows:
        asked = _question(row["input"], row["target"], tokenizer)
        if asked is not None:
            questions.append(asked)
        if len(questions) == count:
            break
    return questions


def _question(text: str, target: str, tokenizer: Tokenizer) -> Question | None:
    """None where its answers are none to choose from, or it is too long."""
    words = [f"({letter})" for letter in _OPTION.findall(text)] or list(_YES_NO)
    if target not in words:
        return None
    prompt = tokenizer.encode(f"Question: {text}\nAnswer:")
    choices = tuple(tuple(tokenizer.encode(f" {word}", add_special=False)) for word in words)
    if len(prompt) + max(map(len, choices)) > MOST_ROWS:
        return None
    return Question(np.array(prompt, dtype=np.int64), choices, words.index(target))


def answer(executor: Executor, question: Question) -> int:
    """Which of its choices a model holds likeliest, token by token."""
    count = len(question.prompt)
    first = _log_likely(executor.step([Segment(0, 0, count, 1)], question.prompt))[0]
    likely = []
    for choice in question.choices:
        total = float(first[choice[0]])
        if len(choice) > 1:
            # Writing behind the prompt truncates: each choice takes the place of the one before.
            rows = len(choice) - 1
            told = executor.step([Segment(0, count, rows, rows)], np.array(choice[:-1], dtype=np.int64))
            total += float(_log_likely(told)[np.arange(rows), list(choice[1:])].sum())
        likely.append(total)
    executor.close_session(0)
    return int(np.argmax(likely))


def _log_likely(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)))


def task_files(data: Path) -> dict[str, Path]:
    """The tasks of a folder, by name."""
    return {path.stem.removeprefix("bbh_"): path for path in sorted(data.glob("bbh_*.jsonl"))}


def right_answers(executor: Executor, questions: Sequence[Question]) -> list[bool]:
    return [answer(executor, question) == question.right for question in questions]

"""Requests of every kind, for models whose tokenizer is bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.models.tokenizer import Tokenizer
from support.models.prompts import PROMPTS
from support.swarm.lab import Alone

SAMPLED = Sampling(
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    seed=20_240_229,
)
_MOST_PROMPT_BYTES = 300


def prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Two dozen: from one byte to a few hundred."""
    return [tuple(tokenizer.encode(prompt.text)[:_MOST_PROMPT_BYTES]) for prompt in PROMPTS]


def greedy(prompt: Sequence[int], tokens: int = 16) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), tokens)


def sampled(prompt: Sequence[int], tokens: int = 16, seed: int = SAMPLED.seed) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), tokens, replace(SAMPLED, seed=seed))


def scored(prompt: Sequence[int], tokens: int = 16) -> GenerationRequest:
    """With log-probabilities of the answer and of the prompt."""
    sampling = replace(SAMPLED, logprobs=3)
    return GenerationRequest(tuple(prompt), tokens, sampling, prompt_logprobs=2)


def stopped(prompt: Sequence[int], alone: Alone, tokens: int = 16) -> GenerationRequest:
    """Ends at a string that turns up in its own answer."""
    text = alone.answer(greedy(prompt, tokens)).text
    # What cannot be decoded has no string of its own; stop at something that can.
    starts = [i for i in range(len(text) - 1) if "\ufffd" not in text[i : i + 2]]
    start = starts[len(starts) * 2 // 3]
    word = text[start : start + 2]
    return replace(greedy(prompt, tokens), stop=(word, "never said"))


def mixture(alone: Alone, count: int, tokens: int) -> list[GenerationRequest]:
    """`count` requests of all kinds, with different prompts."""
    kinds: list[Callable[[Sequence[int]], GenerationRequest]] = [
        lambda prompt: greedy(prompt, tokens),
        lambda prompt: sampled(prompt, tokens),
        lambda prompt: scored(prompt, tokens),
        lambda prompt: stopped(prompt, alone, tokens),
    ]
    texts = prompts(alone.service.tokenizer)
    return [kinds[i % len(kinds)](texts[i % len(texts)]) for i in range(count)]

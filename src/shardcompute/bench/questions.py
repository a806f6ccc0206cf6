"""Texts to ask about where no data set is given: questions of many kinds, and rules that make a long system prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

QUESTIONS = (
    "Why is the sky blue?",
    "Name three rivers in Europe.",
    "Write a short poem about a lighthouse in winter.",
    "What is 17 times 23? Show how you work it out.",
    "Translate into French: the train to the coast leaves at nine.",
    "Explain to a child how a bicycle stays upright, in four sentences.",
    "Write a Python function that counts the vowels of a text, and say what it does for an empty one.",
    "Which is heavier, a litre of water or a litre of oil, and how could one show it in a kitchen?",
    "Give me a recipe for a soup of carrots and ginger for six people, with the quantities in grams.",
    "Describe what happens between pressing a light switch and the lamp shining.",
    "A farmer has 12 hens; each lays 5 eggs a week. How many boxes of 10 does she fill in 4 weeks?",
    "Compare the life of a sailor around the year 1800 with that of one today: food, work, sleep and danger.",
    "Tell me a story about a dragon that is afraid of heights, and let it end well.",
    "Summarise in one sentence: the committee met twice, could not agree on a date, and went home without a "
    "decision, although everybody had said before that the matter was urgent.",
    "What should I look at when I buy a used violin? List the most important things first.",
    "Write a polite letter to a neighbour whose dog barks at night, and propose a way out that costs little.",
)

_SUBJECTS = (
    "an order that has not come",
    "a bill that seems wrong",
    "a password that is lost",
    "a parcel that came damaged",
    "a change of address",
    "a gift voucher that has expired",
    "a subscription that should end",
)
_DUTIES = (
    "ask for the number that stands at the top of the letter before you say anything else",
    "answer in two sentences at most and offer to explain more",
    "say plainly what will happen next, and on which day",
    "never promise money back; name the form that asks for it instead",
    "apologise once, then speak about the remedy only",
)


def rules(number: int) -> str:
    """One sentence of a system prompt; no two are alike."""
    subject, duty = _SUBJECTS[number % len(_SUBJECTS)], _DUTIES[number % len(_DUTIES)]
    return f"Rule {number + 1}: when somebody writes about {subject}, {duty}."


def system_prompt(tokens: int, count: Callable[[str], int]) -> str:
    """A text of at least so many tokens, as `count` counts them, and hardly more."""
    text = "You answer letters for a small shop. These are the rules of the house."
    for sentence in _sentences():
        if count(text) >= tokens:
            return text
        text = f"{text}\n{sentence}"
    raise AssertionError("there is always another rule")


def _sentences() -> Iterator[str]:
    number = 0
    while True:
        yield rules(number)
        number += 1

"""Examples: which tokens of a record are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.finetune.data.batches import choose_examples, pack_batches
from shardcompute.finetune.data.dataset import ChatRecord, Dataset, InstructionRecord, Record, TextRecord
from shardcompute.finetune.data.examples import ExampleSet, make_examples

END, NEWLINE = "#", "\n"


class LetterTokenizer:
    """A token is a letter; "#" ends a turn. With `forgets`, the thoughts (in brackets) of all turns but the last are
    left out, as some models' templates do."""

    eos_ids = frozenset({ord(END)})

    def __init__(self, *, forgets: bool = False, has_chat_template: bool = True) -> None:
        self._forgets = forgets
        self.has_chat_template = has_chat_template

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [*([1] if add_special else []), *map(ord, text)]

    def encode_rendered(self, rendered: str) -> list[int]:
        return self.encode(rendered)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        text = ""
        for place, message in enumerate(messages):
            content = message["content"]
            if self._forgets and place < len(messages) - 1:
                content = content.partition("]")[2] or content
            text += f"<{message['role'][0]}>{content}{END}{NEWLINE}"
        return text + ("<a>" if add_generation_prompt else "")


def examples_of(record: Record, tokenizer: LetterTokenizer, longest: int = 99) -> ExampleSet:
    return make_examples(Dataset(Path("data"), ((7, record),), ""), tokenizer, longest)


def learned_text(made: ExampleSet, number: int = 0) -> str:
    example = made.examples[number]
    return "".join(
        chr(each) for each, is_learned in zip(example.ids, example.is_learned, strict=True) if is_learned
    )


def chat(*turns: str) -> ChatRecord:
    roles = ("user", "assistant")
    return ChatRecord(tuple({"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)))


def test_only_the_assistant_is_learned_from_to_the_end_of_its_turn() -> None:
    made = examples_of(chat("hi", "yes", "more", "no"), LetterTokenizer())
    assert learned_text(made) == "yes#no#"
    assert len(made.examples) == 1


def test_a_template_that_forgets_makes_an_example_of_each_turn() -> None:
    made = examples_of(chat("hi", "[so]yes", "more", "[hm]no"), LetterTokenizer(forgets=True))
    assert [learned_text(made, number) for number in range(2)] == ["[so]yes#", "[hm]no#"]


def test_instructions_are_turns_where_there_is_a_template_and_text_where_not() -> None:
    record = InstructionRecord("ask", "say")
    assert learned_text(examples_of(record, LetterTokenizer())) == "say#"
    plain = examples_of(record, LetterTokenizer(has_chat_template=False))
    assert learned_text(plain) == "say#"
    assert "".join(map(chr, plain.examples[0].ids[1:])) == "asksay#"


def test_long_text_goes_on_in_the_next_example_and_every_token_is_learned_once() -> None:
    made = examples_of(TextRecord("abcdefgh"), LetterTokenizer(), longest=4)
    assert all(len(example.ids) <= 4 for example in made.examples)
    learned = "".join(chr(each) for example in made.examples for each in example.ids[1:])
    assert learned == "abcdefgh#"
    assert made.learned == 9


def test_answers_that_are_cut_away_are_dropped_and_none_left_is_an_error() -> None:
    tokenizer = LetterTokenizer()
    dataset = Dataset(Path("data"), ((1, chat("x" * 50, "no")), (2, chat("hi", "yes" * 9))), "")
    made = make_examples(dataset, tokenizer, 20)
    assert (len(made.examples), made.shortened, made.dropped) == (1, 2, 1)
    with pytest.raises(UsageError, match="nothing is left to learn"):
        examples_of(chat("x" * 50, "no"), tokenizer, longest=20)


def test_steps_read_every_example_once_an_epoch_in_an_order_of_their_own() -> None:
    orders = [
        [each for step in range(5) for each in choose_examples(10, step, 4, seed)] for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:10]) == sorted(orders[0][10:]) == list(range(10))
    assert orders[0][:10] != orders[0][10:]


def test_micro_batches_hold_the_tokens_that_follow_the_rows() -> None:
    made = examples_of(chat("hi", "yes"), LetterTokenizer())
    other = examples_of(chat("hello", "no"), LetterTokenizer())
    parts = pack_batches([*made.examples, *other.examples, *made.examples], 2)
    assert sum(len(part.lengths) for part in parts) == 3
    for part in parts:
        assert part.total == 4 + 3 + 4
        assert [int(part.ids[row + 1]) for row in part.rows] == part.targets.tolist()

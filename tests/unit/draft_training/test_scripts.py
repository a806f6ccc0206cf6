"""Scripts of self-play: many kinds, framed as the model's chat template frames them, hardly any written twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import numpy as np
import pytest

from shardcompute.core.settings import Settings
from shardcompute.draft_training.dialogue import GIVEN, GREEDY, ChosenTokens, GivenTokens, SelfPlayDialogue
from shardcompute.draft_training.questions import HELD_OUT, KINDS, ask
from shardcompute.draft_training.scripts import ScriptsAhead, ScriptWriter
from shardcompute.draft_training.words import tongue_text
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import save_tiny_llama


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=1)
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder))) as opened:
        yield opened.tokenizer()


def test_a_question_that_the_model_makes_up_stands_where_a_user_would_speak(tokenizer: Tokenizer) -> None:
    before, question, behind, answer = ScriptWriter(tokenizer, 512, 3).write(["invented"])[0].turns
    assert isinstance(before, GivenTokens)
    assert isinstance(question, ChosenTokens)
    assert isinstance(behind, GivenTokens)
    assert isinstance(answer, ChosenTokens)
    assert tokenizer.decode(before.ids).endswith("user: ")
    assert tokenizer.decode(behind.ids) == "\n"
    assert behind.ids[0] in question.stops
    assert answer.stops == tokenizer.eos_ids


def test_all_kinds_are_written_and_fit_into_the_context(tokenizer: Tokenizer) -> None:
    scripts = list(islice(ScriptWriter(tokenizer, 512, 1), 400))
    kinds = {script.kind for script in scripts}
    assert kinds >= {"maths", "translation", "summary", "retrieval", "extraction", "code", "followed", "role"}
    assert len({script.turns for script in scripts}) > 300, "most but the invented ones begin differently"
    for script in scripts:
        assert isinstance(script.turns[0], GivenTokens)
        assert len(script.turns[0].ids) <= 512


def test_what_the_model_wrote_is_given_to_it_again(tokenizer: Tokenizer) -> None:
    writer = ScriptWriter(tokenizer, 512, 1)
    words = (97, 98, 99) * 5
    ids = np.asarray((1, 2, *words), np.int32)
    origins = np.asarray([GIVEN] * 2 + [GREEDY] * len(words), np.uint8)
    for kind in ("question", "article"):
        writer.keep(SelfPlayDialogue(kind, ids, origins))
    prompts = [script.turns[0] for script in writer.write(["summary"] * 12)]
    assert any(isinstance(each, GivenTokens) and words == _middle(each.ids, words) for each in prompts)


def _middle(ids: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    places = range(len(ids) - len(wanted) + 1)
    return next((wanted for at in places if ids[at : at + len(wanted)] == wanted), ())


def test_a_thread_writes_what_would_be_written_without_it(tokenizer: Tokenizer) -> None:
    ahead = ScriptsAhead(ScriptWriter(tokenizer, 256, 5))
    try:
        assert list(islice(ahead, 20)) == list(islice(ScriptWriter(tokenizer, 256, 5), 20))
    finally:
        ahead.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_questions_are_hardly_ever_asked_twice(kind: str) -> None:
    random = Random(1)
    questions = [ask(random, kind) for _ in range(200)]
    assert len(set(questions)) > 175
    assert not any("{" in question for question in questions)


def test_there_are_kinds_that_are_never_learned() -> None:
    assert KINDS.keys() > HELD_OUT


def test_other_tongues_are_spoken() -> None:
    random = Random(2)
    found = [tongue_text(random, 2) for _ in range(60)]
    assert len({tongue for tongue, _ in found}) == 6
    assert len(set(found)) > 50

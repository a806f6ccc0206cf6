"""A small model that drafts: what it proposes is what it would say itself, whatever was taken back before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Sampling
from shardcompute.core.settings import Settings
from shardcompute.core.steps import Draft, Opening, SessionRows
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.draft_model import (
    DraftModelLimits,
    ModelDrafter,
    check_same_vocabulary,
    open_draft_model,
    quick_form,
)
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import save_tiny_llama
from support.models.tiny_gguf import save_tiny_text_gguf

PAGE_BYTES = 64 * 2 * 2 * 2 * 16 * 4  # tokens · layers · keys and values · heads · width · float32
OPTIONS = ExecutorOptions(kv_bytes=64 * PAGE_BYTES, context_length=200, max_rows=32)
PROMPT = [10, 20, 30, 40, 50]
VOCABULARY = 258


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=2)
    settings = Settings(data_dir=folder.parent)
    with open_checkpoint(resolve(parse_reference(str(folder)), settings)) as opened:
        yield opened


def open_drafter(
    checkpoint: Checkpoint, *, kv_pages: int = 64, end_ids: frozenset[int] = frozenset()
) -> ModelDrafter:
    options = ExecutorOptions(kv_bytes=kv_pages * PAGE_BYTES, context_length=200, max_rows=32)
    limits = DraftModelLimits(VOCABULARY, VOCABULARY, options.context_length, max_rows=32, end_ids=end_ids)
    return ModelDrafter(open_shard(checkpoint, backend="numpy", options=options), limits)


def own_words(checkpoint: Checkpoint, known: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """What the model says by itself."""
    stage = StageRuntime(
        open_shard(checkpoint, backend="numpy", options=OPTIONS), is_first=True, is_last=True
    )
    tokens = list(known)
    work = SessionRows(1, 0, tuple(tokens), logit_rows=1)
    openings = [Opening(1, sampling, len(PROMPT))]
    for _ in range(count):
        picked = stage.step([work], openings, None)
        assert isinstance(picked, list)
        tokens.append(picked[0].choice.id)
        work, openings = SessionRows(1, len(tokens) - 1, (tokens[-1],), logit_rows=1), []
    return tokens[len(known) :]


def drafted(
    drafter: ModelDrafter,
    known: Sequence[int],
    assumed: Sequence[int] = (),
    *,
    limit: int = 6,
    session: int = 1,
    sampling: Sampling | None = None,
) -> list[int]:
    opening = Opening(session, sampling or Sampling(), len(PROMPT))
    draft = drafter.propose(session, known, assumed, limit, opening)
    return [] if draft is None else list(draft.ids)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.9, seed=7), Sampling(frequency_penalty=1.5, logit_bias={900: 5.0})],
)
def test_drafts_what_it_would_say_itself(checkpoint: Checkpoint, sampling: Sampling) -> None:
    drafter = open_drafter(checkpoint)
    expected = own_words(
        checkpoint,
        PROMPT,
        Sampling(
            temperature=sampling.temperature, seed=sampling.seed, frequency_penalty=sampling.frequency_penalty
        ),
        6,
    )
    found = drafted(drafter, PROMPT, sampling=sampling)
    assert found == expected[: len(found)]
    assert found


def test_goes_on_from_what_is_assumed_and_takes_back_what_failed(checkpoint: Checkpoint) -> None:
    drafter = open_drafter(checkpoint)
    story = own_words(checkpoint, PROMPT, Sampling(), 8)
    first = drafted(drafter, PROMPT, limit=3)
    further = drafted(drafter, PROMPT, story[:3], limit=1)
    assert first + further == story[: len(first)] + story[3:4]
    # The chain picked something else: everything after it is void.
    other = [*PROMPT, story[0], (story[1] + 1) % 90]
    assert drafted(drafter, other, limit=1) == own_words(checkpoint, other, Sampling(), 1)
    # And a shorter assumption than what the KV holds.
    assert drafted(drafter, other, [3], limit=1) == own_words(checkpoint, [*other, 3], Sampling(), 1)


def test_prompts_longer_than_a_step_are_computed_in_parts(checkpoint: Checkpoint) -> None:
    long = [index % 90 for index in range(100)]
    assert drafted(open_drafter(checkpoint), long, limit=1) == own_words(checkpoint, long, Sampling(), 1)


def test_sessions_that_were_not_used_for_long_make_room(checkpoint: Checkpoint) -> None:
    drafter = open_drafter(checkpoint, kv_pages=2)
    for session in (1, 2, 3, 1):
        expected = own_words(checkpoint, [*PROMPT, session], Sampling(), 1)
        assert drafted(drafter, [*PROMPT, session], session=session, limit=1) == expected


def test_a_session_that_does_not_fit_gets_no_draft_and_harms_nobody(checkpoint: Checkpoint) -> None:
    drafter = open_drafter(checkpoint, kv_pages=1)
    assert drafted(drafter, [7] * 100) == []
    assert drafted(drafter, PROMPT, session=2, limit=1) == own_words(checkpoint, PROMPT, Sampling(), 1)


def test_stays_within_its_context_and_its_vocabulary(checkpoint: Checkpoint) -> None:
    drafter = open_drafter(checkpoint)
    assert len(drafted(drafter, [5] * 200)) == 1
    assert drafted(drafter, [5] * 201) == []
    assert drafted(drafter, [5, 400], session=2) == []
    assert drafted(drafter, PROMPT, limit=0) == []


def test_a_draft_ends_where_the_answer_would(checkpoint: Checkpoint) -> None:
    story = own_words(checkpoint, PROMPT, Sampling(), 1)
    assert drafted(open_drafter(checkpoint, end_ids=frozenset(story)), PROMPT) == story


def test_grades_say_how_sure_it_is(checkpoint: Checkpoint) -> None:
    drafter = open_drafter(checkpoint)
    sharp = Opening(1, Sampling(logit_bias={60: 50.0}), len(PROMPT))
    assert drafter.propose(1, PROMPT, (), 4, sharp) == Draft(1, len(PROMPT), (60,) * 4, 3)
    # Every word equally likely: one guess, and no more.
    flat = Opening(2, Sampling(logit_bias=dict.fromkeys(range(80), 50.0)), len(PROMPT))
    vague = drafter.propose(2, PROMPT, (), 4, flat)
    assert vague is not None
    assert (len(vague.ids), vague.grade) == (1, 0)


def test_it_leaves_it_at_that_when_it_is_not_wanted(checkpoint: Checkpoint) -> None:
    drafter, opening = open_drafter(checkpoint), Opening(1, Sampling(logit_bias={60: 50.0}), len(PROMPT))
    wanted = iter([True, True, False])
    draft = drafter.propose_while(PROMPT, len(PROMPT), 8, opening, lambda: next(wanted))
    assert draft is not None
    assert draft.ids == (60, 60, 60)
    assert drafter.propose(1, [*PROMPT, 60], (), 4, opening) == Draft(1, len(PROMPT) + 1, (60,) * 4, 3)


def test_forgotten_sessions_give_back_their_memory(checkpoint: Checkpoint) -> None:
    drafter = open_drafter(checkpoint, kv_pages=2)
    drafted(drafter, PROMPT, session=1)
    drafter.forget(1)
    drafter.forget(99)
    drafted(drafter, PROMPT, session=2, limit=1)
    assert drafter.held_sessions() == [2]


def test_plain_numbers_are_rounded_and_others_kept_as_they_are(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    assert quick_form(checkpoint) == "int8"
    path = save_tiny_text_gguf(tmp_path)
    with open_checkpoint(resolve(parse_reference(str(path)), Settings(data_dir=tmp_path))) as quantised:
        assert quick_form(quantised) == "native"


def test_opens_a_model_by_name_and_refuses_another_vocabulary(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "small", layers=1)
    target = checkpoint.tokenizer()
    drafter = open_draft_model(
        str(folder), Settings(data_dir=tmp_path), target=target, target_vocab_size=VOCABULARY, options=OPTIONS
    )
    assert drafted(drafter, PROMPT, limit=2)
    drafter.close()
    text = (folder / "tokenizer.json").read_text()
    other = Tokenizer.from_hf(text.replace("</s>", "<end>"))
    with pytest.raises(UsageError, match="token 257 is b'<end>' there"):
        check_same_vocabulary("small", other, target)

"""Drafts of the first stage: they change how many rows travel, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Array
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Sampling
from shardcompute.core.settings import Settings
from shardcompute.core.steps import Drafted, Opening, Picked, SessionRows, drafted_in
from shardcompute.models.spec import Stage
from shardcompute.runtime.drafting import DraftLimits, SelfDrafter
from shardcompute.runtime.shard import open_head, open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import save_tiny_llama

LAYERS, CUT, CONTEXT = 4, 3, 128
OPTIONS = ExecutorOptions(kv_bytes=8 << 20, max_rows=64, max_wanted=16, context_length=CONTEXT)
LIMITS = DraftLimits(CONTEXT, max_rows=64, max_wanted=16, most=8, confidence=0.0)
PENALISED = Sampling(temperature=0.8, seed=11, presence_penalty=0.6, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"), layers=LAYERS)
    # The last layer says little of its own, so that guesses before it hold often, and not always.
    _quieten(folder / "model.safetensors", f"model.layers.{LAYERS - 1}.")
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(folder))) as opened:
        yield opened


def _quieten(path: Path, layer: str) -> None:
    tensors = load_file(path)
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{layer}{part}.weight"] *= np.float32(0.4)
    save_file(tensors, path)


@dataclass
class Ring:
    """Two stages, the first of which may draft; `sent` is what went from one to the other."""

    first: StageRuntime
    last: StageRuntime
    sent: list[tuple[Sequence[SessionRows], Array]]

    def step(
        self, *work: SessionRows, openings: Sequence[Opening] = ()
    ) -> tuple[list[Picked], list[Drafted]]:
        out = self.first.step(work, openings, None)
        assert not isinstance(out, list)
        passed, rows = self.first.draft(work, out)
        rows = np.array(rows)
        self.sent.append((passed, rows))
        picked = self.last.step(passed, openings, rows)
        assert isinstance(picked, list)
        return picked, drafted_in(passed)


@contextmanager
def ring(
    checkpoint: Checkpoint, limits: DraftLimits | None = LIMITS, backend: str = "onnx"
) -> Iterator[Ring]:
    first, last = Stage(0, CUT, LAYERS), Stage(CUT, LAYERS, LAYERS)
    drafter = None
    if limits is not None:
        drafter = SelfDrafter(open_head(checkpoint, backend=backend, options=OPTIONS), limits)
    stages = [
        StageRuntime(
            open_shard(checkpoint, stage=stage, backend=backend, options=OPTIONS),
            is_first=stage.is_first,
            is_last=stage.is_last,
            drafter=drafter if stage.is_first else None,
        )
        for stage in (first, last)
    ]
    yield Ring(stages[0], stages[1], [])
    for stage in stages:
        stage.close()


def opening(session: int, sampling: Sampling, prompt: Sequence[int]) -> Opening:
    return Opening(session, sampling, len(prompt))


def generate(chain: Ring, prompt: Sequence[int], sampling: Sampling, count: int, drafts: int) -> list[int]:
    """`count` tokens after the prompt, taking the drafts that hold."""
    known = list(prompt)
    picked, drafted = chain.step(
        SessionRows(1, 0, tuple(prompt), 1, drafts=drafts), openings=[opening(1, sampling, prompt)]
    )
    known += accepted(picked, drafted)
    while len(known) < len(prompt) + count:
        picked, drafted = chain.step(SessionRows(1, len(known) - 1, (known[-1],), 1, drafts=drafts))
        known += accepted(picked, drafted)
    return known[len(prompt) :][:count]


def accepted(picked: Sequence[Picked], drafted: Sequence[Drafted]) -> list[int]:
    guesses = drafted[0].ids if drafted else ()
    tokens: list[int] = []
    for index, result in enumerate(picked):
        tokens.append(result.choice.id)
        if index >= len(guesses) or guesses[index] != result.choice.id:
            break
    return tokens


@pytest.mark.parametrize("sampling", [Sampling(), PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("backend", ["onnx", "numpy", "torch"])
def test_drafts_change_no_token_and_save_rounds(
    checkpoint: Checkpoint, sampling: Sampling, backend: str
) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    prompt = (7, 80, 3, 41, 5)
    with ring(checkpoint, None, backend) as plain, ring(checkpoint, LIMITS, backend) as drafting:
        expected = generate(plain, prompt, sampling, 40, drafts=4)
        assert generate(drafting, prompt, sampling, 40, drafts=4) == expected
        assert len(plain.sent) == 40
        judged = [part for work, _ in drafting.sent for part in work]
        assert sum(part.drafted for part in judged) == 4 * len(judged)
        # Some rounds gave several tokens, and some guesses were rolled back.
        assert len(drafting.sent) < 40 < len(drafting.sent) * 5


def test_rows_of_held_drafts_have_the_bits_of_plain_ones(checkpoint: Checkpoint) -> None:
    prompt = (7, 80, 3, 41, 5)
    with ring(checkpoint, None) as plain, ring(checkpoint) as drafting:
        tokens = generate(plain, prompt, PENALISED, 40, drafts=0)
        generate(drafting, prompt, PENALISED, 40, drafts=4)
        known = [*prompt, *tokens]
        expected = rows_by_position(plain, known)
        found = rows_by_position(drafting, known)
        assert len(found) > len(drafting.sent) + len(prompt)
        assert all(
            np.array_equal(row, expected[position]) for position, row in found.items() if position in expected
        )


def rows_by_position(chain: Ring, known: Sequence[int]) -> dict[int, Array]:
    """What was sent on of the answer itself; drafts that did not hold are left out."""
    rows: dict[int, Array] = {}
    for work, sent in chain.sent:
        for index, token in enumerate(work[0].ids):
            position = work[0].start + index
            if position >= len(known) or known[position] != token:
                break
            rows[position] = sent[index]
    return rows


def test_sessions_of_one_frame_draft_side_by_side(checkpoint: Checkpoint) -> None:
    prompts = {1: (7, 80, 3), 2: (9, 9, 1, 60), 3: (4, 5)}
    wishes = {1: 3, 2: 0, 3: 1}
    openings = [opening(session, PENALISED, prompt) for session, prompt in prompts.items()]
    work = [SessionRows(session, 0, prompt, 1, drafts=wishes[session]) for session, prompt in prompts.items()]
    with ring(checkpoint) as together, ring(checkpoint) as alone:
        picked, drafted = together.step(*work, openings=openings)
        assert {each.session: len(each.ids) for each in drafted} == {1: 3, 3: 1}
        assert [each.start for each in drafted] == [3, 2]
        single = [alone.step(part, openings=[each]) for part, each in zip(work, openings, strict=True)]
        assert picked == [result for results, _ in single for result in results]
        assert drafted == [each for _, found in single for each in found]
        assert np.array_equal(together.sent[0][1], np.concatenate([rows for _, rows in alone.sent]))


def test_a_rejected_draft_leaves_no_trace(checkpoint: Checkpoint) -> None:
    prompt = (7, 80, 3)
    with ring(checkpoint) as drafting, ring(checkpoint) as fresh:
        drafting.step(SessionRows(1, 0, prompt, 1, drafts=6), openings=[opening(1, PENALISED, prompt)])
        went_on = drafting.step(SessionRows(1, 3, (90,), 1, drafts=6))
        fresh.step(SessionRows(1, 0, prompt, 1), openings=[opening(1, PENALISED, prompt)])
        assert went_on == fresh.step(SessionRows(1, 3, (90,), 1, drafts=6))


def test_drafts_keep_within_bounds(checkpoint: Checkpoint) -> None:
    prompt = (7, 80, 3)
    huge = (1 << 31) - 1
    with ring(checkpoint) as chain:
        _, drafted = chain.step(
            SessionRows(1, 0, prompt, 1, drafts=huge), openings=[opening(1, PENALISED, prompt)]
        )
        assert len(drafted[0].ids) == LIMITS.most
        openings = [opening(session, PENALISED, prompt) for session in range(2, 14)]
        work = [SessionRows(each.session, 0, prompt, 1, drafts=huge) for each in openings]
        picked, _ = chain.step(*work, openings=openings)
        assert len(picked) == LIMITS.max_wanted
        filler = tuple(range(40)) * 3
        chain.step(SessionRows(1, 0, filler[:60]))
        chain.step(SessionRows(1, 60, filler[60:]))
        _, drafted = chain.step(SessionRows(1, 120, (1, 2, 3, 4, 5), 1, drafts=huge))
        assert drafted[0].start + len(drafted[0].ids) == CONTEXT


def test_nothing_is_drafted_where_nothing_is_picked_or_faith_is_lacking(checkpoint: Checkpoint) -> None:
    prompt = (7, 80, 3)
    with ring(checkpoint, replace(LIMITS, confidence=1.1)) as doubtful, ring(checkpoint) as chain:
        opened = [opening(1, PENALISED, prompt)]
        assert doubtful.step(SessionRows(1, 0, prompt, 1, drafts=4), openings=opened)[1] == []
        assert chain.step(SessionRows(1, 0, prompt, 0, drafts=4), openings=opened)[1] == []
        assert chain.step(SessionRows(1, 3, (4, 5), 2, (5, 6), drafts=4))[1] == []
        assert all(part.drafts == 0 for work, _ in chain.sent for part in work)


def test_full_memory_ends_the_drafting_and_not_the_step(checkpoint: Checkpoint) -> None:
    prompt = tuple(range(63))
    with ring(checkpoint) as chain:
        usage = chain.first.kv_usage()
        pages = usage.free_tokens // 64
        for session in range(2, pages + 1):
            chain.first.step([SessionRows(session, 0, (1,))], [], None)
        picked, drafted = chain.step(
            SessionRows(1, 0, prompt, 1, drafts=4), openings=[opening(1, Sampling(), prompt)]
        )
        # The last free page has room for one row more.
        assert len(drafted[0].ids) == 1
        assert len(picked) == 2


def test_sessions_that_began_before_the_drafter_are_left_alone(checkpoint: Checkpoint) -> None:
    with ring(checkpoint) as chain:
        chain.first.step([SessionRows(1, 0, (1, 2, 3))], [], None)
        passed, rows = chain.first.draft(
            [SessionRows(1, 3, (4,), 1, drafts=4)], np.zeros((1, 64), dtype=np.float32)
        )
        assert [part.ids for part in passed] == [(4,)]
        assert len(rows) == 1


def test_only_a_first_stage_drafts(checkpoint: Checkpoint) -> None:
    with ring(checkpoint) as chain:
        with pytest.raises(UsageError, match="only the first stage"):
            chain.last.step([SessionRows(1, 0, (1,), 1, drafts=2)], [], np.zeros((1, 64), dtype=np.float32))
        head = SelfDrafter(open_head(checkpoint, options=OPTIONS), LIMITS)
        whole = open_shard(checkpoint, options=OPTIONS)
        with pytest.raises(ValueError, match="first stage"):
            StageRuntime(whole, is_first=True, is_last=True, drafter=head)

"""Tensor ranks behind one executor: the tokens of one process, picked once, from what little ranks send of logits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array
from shardcompute.collectives import FabricGroup, thread_groups
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.errors import BackendError, CapacityError, LinkError, RowGapError, UsageError
from shardcompute.core.generation import Sampling
from shardcompute.core.settings import Settings
from shardcompute.core.steps import Opening, Prefix, SessionRows
from shardcompute.models.spec import Stage, whole
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.models.tensor_share import Exchange
from shardcompute.runtime.shard import open_shard, split_checkpoint
from shardcompute.runtime.stage import StageRuntime
from shardcompute.runtime.tensor_stage import TensorLeader, follow_leader
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import save_tiny_llama

OPTIONS = ExecutorOptions(kv_bytes=1 << 20, context_length=200, max_rows=32, max_logit_rows=8)
PROMPT = (10, 20, 30, 40, 50)
SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=0.9, seed=11),
    "top-p": Sampling(temperature=1.3, top_p=0.8, seed=5),
    "top-k": Sampling(temperature=1.5, top_k=7, seed=6),
    "min-p": Sampling(temperature=0.7, min_p=0.05, seed=7),
    "penalties": Sampling(temperature=0.9, seed=11, frequency_penalty=0.4),
    "logprobs": Sampling(logprobs=3),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=2)
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder.parent))) as opened:
        yield opened


class Follower(threading.Thread):
    """A rank that follows, and what it ended with."""

    error: Exception | None = None

    def __init__(self, executor: Executor, rank: TensorRank, group: FabricGroup, stage: Stage) -> None:
        super().__init__(daemon=True)
        self._followed = (executor, rank, group, stage)
        self.start()

    def run(self) -> None:
        try:
            follow_leader(*self._followed)
        except Exception as error:
            self.error = error


class BrokenExecutor:
    """An executor whose steps fail."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def step(self, segments: list[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        raise BackendError("this rank's memory is broken")


@contextmanager
def ranked(
    checkpoint: Checkpoint,
    *,
    exchange: Exchange = "gather",
    kv_bytes: tuple[int, ...] = (1 << 20, 1 << 20),
    breaks: int | None = None,
) -> Iterator[tuple[TensorLeader, list[FabricGroup], list[Follower]]]:
    stage, size = whole(checkpoint.spec), len(kv_bytes)
    split = split_checkpoint(checkpoint, [1.0] * size, exchange=exchange)
    groups = thread_groups(size)
    ranks = [TensorRank(checkpoint.spec, split, group) for group in groups]
    executors = []
    for rank, kv in zip(ranks, kv_bytes, strict=True):
        options = ExecutorOptions(kv_bytes=kv, context_length=200, max_rows=32, max_logit_rows=8)
        executor = open_shard(checkpoint, options=options, rank=rank)
        executors.append(BrokenExecutor(executor) if rank.group.rank == breaks else executor)
    followers = [Follower(executors[i], ranks[i], groups[i], stage) for i in range(1, size)]
    leader = TensorLeader(executors[0], ranks[0], groups[0], stage, OPTIONS)
    yield leader, groups, followers
    for follower in followers:
        follower.join(60)
        assert not follower.is_alive()


def answer(stage: StageRuntime, session: int, sampling: Sampling, count: int = 8) -> list[object]:
    tokens, choices, openings = list(PROMPT), [], [Opening(session, sampling, len(PROMPT))]
    work = SessionRows(session, 0, PROMPT, logit_rows=1)
    for _ in range(count):
        picked = stage.step([work], openings, None)
        assert isinstance(picked, list)
        choices.append(picked[0].choice)
        tokens.append(picked[0].choice.id)
        work, openings = SessionRows(session, len(tokens) - 1, (tokens[-1],), logit_rows=1), []
    return choices


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> dict[str, list[object]]:
    stage = StageRuntime(open_shard(checkpoint, options=OPTIONS), is_first=True, is_last=True)
    return {name: answer(stage, i, each) for i, (name, each) in enumerate(SAMPLINGS.items())}


@pytest.mark.parametrize("ranks", [2, 3])
def test_tokens_of_one_process(checkpoint: Checkpoint, ranks: int, expected: dict[str, list[object]]) -> None:
    """However tokens are picked: with the bits of one process come its tokens and log-probabilities."""
    with ranked(checkpoint, kv_bytes=(1 << 20,) * ranks) as (leader, _, followers):
        stage = StageRuntime(leader, is_first=True, is_last=True)
        found = {name: answer(stage, i, each) for i, (name, each) in enumerate(SAMPLINGS.items())}
        stage.close()
    assert found == expected
    assert [follower.error for follower in followers] == [None] * (ranks - 1)


def test_only_candidates_leave_a_rank(checkpoint: Checkpoint) -> None:
    """Of a greedy row a rank sends one id; whole logits only where somebody wants to see them."""
    vocabulary = checkpoint.spec.vocab_size

    def sent(sampling: Sampling) -> int:
        with ranked(checkpoint) as (leader, groups, _):
            stage = StageRuntime(leader, is_first=True, is_last=True)
            stage.step([SessionRows(1, 0, PROMPT, 1)], [Opening(1, sampling, 5)], None)
            stage.close()
        # Once it follows no more: what it has sent may be here before it has counted it.
        return groups[1].stats.bytes_sent

    greedy, logprobs = sent(Sampling()), sent(Sampling(logprobs=1))
    share = split_checkpoint(checkpoint, [1.0, 1.0]).shares[1].vocabulary
    candidate_bytes = 3 * 4
    assert vocabulary > 100
    assert logprobs - greedy == 4 * (share[1] - share[0]) - candidate_bytes


def test_whole_logits_for_whoever_steps_the_leader(checkpoint: Checkpoint) -> None:
    one, segments = open_shard(checkpoint, options=OPTIONS), [Segment(1, 0, 5, 3)]
    with ranked(checkpoint) as (leader, _, _):
        logits = leader.step(segments, np.array(PROMPT), keeps_hidden=True)
        np.testing.assert_array_equal(logits, one.step(segments, np.array(PROMPT), keeps_hidden=True))
        np.testing.assert_array_equal(leader.hidden_rows(), one.hidden_rows())
        leader.close()


def test_sessions_are_adopted_and_closed_on_every_rank(checkpoint: Checkpoint) -> None:
    with ranked(checkpoint) as (leader, _, followers):
        stage = StageRuntime(leader, is_first=True, is_last=True)
        long = SessionRows(1, 0, PROMPT, logit_rows=1)
        first = stage.step([long], [Opening(1, Sampling(), 5)], None)
        opening = Opening(2, Sampling(), 5, prefix=Prefix(1, 4))
        again = stage.step([SessionRows(2, 4, PROMPT[4:], logit_rows=1)], [opening], None)
        assert isinstance(first, list)
        assert isinstance(again, list)
        assert first[0].choice == again[0].choice
        assert sorted(leader.sessions()) == [1, 2]
        assert leader.session_length(2) == 5
        stage.close_sessions([1, 2])
        assert leader.kv_usage().used_bytes == 0
        leader.keep_waiting()
        stage.close()
    assert followers[0].error is None


def test_what_cannot_be_done_is_refused_before_any_rank_is_told(checkpoint: Checkpoint) -> None:
    """The rank that holds least decides how much fits, and refusals leave the group as it was."""
    page = PAGE_TOKENS * checkpoint.spec.layer_count * checkpoint.spec.kv_bytes_per_token_and_layer()
    with ranked(checkpoint, kv_bytes=(1 << 20, page // 2)) as (leader, _, followers):
        assert leader.kv_usage().free_tokens == PAGE_TOKENS
        ids = np.array(PROMPT)
        leader.step([Segment(1, 0, 5, 1)], ids)
        with pytest.raises(CapacityError):
            leader.step([Segment(2, 0, 5, 1)], ids)
        with pytest.raises(RowGapError):
            leader.step([Segment(1, 9, 5, 1)], ids)
        with pytest.raises(UsageError, match="vocabulary"):
            leader.step([Segment(1, 5, 5, 1)], ids + 10**6)
        with pytest.raises(UsageError, match="shape"):
            leader.step([Segment(1, 5, 4, 1)], ids)
        with pytest.raises(CapacityError):
            leader.adopt(1, 2, 4)
        leader.step([Segment(1, 5, 5, 1)], ids)
        leader.close()
    assert followers[0].error is None


def test_a_rank_that_fails_ends_the_group(checkpoint: Checkpoint) -> None:
    with ranked(checkpoint, breaks=1) as (leader, _, followers), pytest.raises(LinkError, match="broken"):
        leader.step([Segment(1, 0, 5, 1)], np.array(PROMPT))
    assert isinstance(followers[0].error, BackendError)


def test_a_leader_that_fails_ends_the_group(checkpoint: Checkpoint) -> None:
    with ranked(checkpoint, breaks=0) as (leader, _, followers), pytest.raises(BackendError, match="broken"):
        leader.step([Segment(1, 0, 5, 1)], np.array(PROMPT))
    assert isinstance(followers[0].error, LinkError)

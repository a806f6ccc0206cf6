"""Of a served model its ends are read in pieces and by name; what its cluster says is checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from shardcompute.core.errors import BackendError, UsageError
from shardcompute.core.generation import GenerationRequest
from shardcompute.core.settings import Settings
from shardcompute.draft_training import teacher
from shardcompute.draft_training.dialogue import ChosenTokens
from shardcompute.draft_training.swarm import taught_model
from shardcompute.draft_training.swarm.taught_model import TaughtModel
from shardcompute.draft_training.swarm.teach import TeachingFiles, teach_draft_head
from shardcompute.draft_training.teacher import CheckpointEnds, Teacher
from shardcompute.draft_training.train import TrainingOptions
from shardcompute.models.draft_head import DRAFT_HEAD, encode_draft_head
from shardcompute.node.cluster.teaching import readable
from shardcompute.weights.card import encode_card
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.served import ServedWeights, prepare_served
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.weights.tokenizer_pack import TOKENIZER, pack_tokenizer
from support.models.draft_heads import random_draft_head
from support.models.tiny_checkpoint import CONTEXT, HIDDEN, VOCABULARY, save_tiny_llama

SPEECH = ChosenTokens(8, frozenset({3}), temperature=0.5, top_p=0.9)


class Cluster:
    """Gives what its routes would, and remembers what was read."""

    def __init__(self, served: ServedWeights) -> None:
        self.served = served
        self.read: list[tuple[str, int]] = []
        self.said: list[int] = [1, 2]
        self.states = np.ones((2, HIDDEN), np.float16).tobytes()
        self.asked: list[GenerationRequest] = []

    def teaching_context(self, model: str) -> int:
        return 100

    def teaching_card(self, model: str) -> bytes:
        return encode_card(self.served.card)

    def teaching_tensor(self, model: str, name: str, offset: int, length: int) -> bytes:
        self.read.append((name, length))
        return bytes(self.served.tensors.read_bytes(name, offset, length))

    def teaching_speech(self, model: str, request: GenerationRequest) -> list[int]:
        self.asked.append(request)
        return self.said

    def teaching_states(self, model: str, tokens: Sequence[int]) -> bytes:
        return self.states


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    folder = save_tiny_llama(tmp_path / "tiny", layers=2)
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=tmp_path))) as opened:
        yield opened


@pytest.fixture(params=["native", "int8"])
def cluster(checkpoint: Checkpoint, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    attached = {
        TOKENIZER: pack_tokenizer(checkpoint),
        DRAFT_HEAD: encode_draft_head(random_draft_head(checkpoint.spec)),
    }
    served = prepare_served(checkpoint, request.param, tmp_path / "served", attachments=attached)
    yield Cluster(served)
    served.tensors.close()


def test_its_ends_are_those_of_its_files(
    cluster: Cluster, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taught_model, "MOST_READ_BYTES", 1000)
    monkeypatch.setattr(teacher, "_READ_ROWS", 64)
    model, files = TaughtModel(cluster, "tiny"), CheckpointEnds(checkpoint)
    ids = np.asarray([0, 5, 64, 65, 200, VOCABULARY - 1], np.int32)
    exactly = cluster.served.card.form == "native"
    for name in ("embedding", "head"):
        assert np.allclose(model.rows(name, ids), files.rows(name, ids), atol=0 if exactly else 0.05)
        assert model.rows(name, ids).shape == (len(ids), HIDDEN)
    assert np.array_equal(model.vector("norm"), files.vector("norm"))
    assert model.tokenizer().encode("abc") == checkpoint.tokenizer().encode("abc")
    head = model.draft_head()
    assert head is not None
    assert np.array_equal(head.ids, random_draft_head(checkpoint.spec).ids)
    assert {name for name, _ in cluster.read} <= readable(cluster.served.card), "and no layer of it"
    assert max(length for _, length in cluster.read) <= 1000
    assert (model.name, model.spec, model.most_tokens) == (checkpoint.name, checkpoint.spec, 99)


def test_the_tables_are_read_once_for_the_same_tokens(cluster: Cluster) -> None:
    learner = Teacher(TaughtModel(cluster, "tiny"), "cpu", context_length=CONTEXT, sessions=1, threads=1)
    ids = np.arange(10, dtype=np.int32)
    learner.frozen_weights(ids)
    before = len(cluster.read)
    learner.frozen_weights(ids.copy())
    assert len(cluster.read) == before
    learner.frozen_weights(ids[:5])
    assert len(cluster.read) > before


def test_what_is_said_is_asked_for_as_it_was_wanted_and_checked(cluster: Cluster) -> None:
    model = TaughtModel(cluster, "tiny")
    assert model.speak([7, 8], 2, SPEECH, seed=4) == [1, 2]
    (asked,) = cluster.asked
    sampling = asked.sampling
    assert (asked.prompt, asked.max_tokens, asked.stop_ids) == ((7, 8), 2, frozenset({3}))
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 4)
    for said in ([1, 2, 3], [VOCABULARY], [-1]):
        cluster.said = said
        with pytest.raises(BackendError, match="cannot be 2"):
            model.speak([7, 8], 2, SPEECH, seed=4)


def test_states_that_cannot_be_are_refused(cluster: Cluster) -> None:
    model = TaughtModel(cluster, "tiny")
    assert model.states([1, 2]).shape == (2, HIDDEN)
    for states in (b"", cluster.states[:-2], cluster.states * 2):
        cluster.states = states
        with pytest.raises(BackendError, match="bytes came as the states"):
            model.states([1, 2])
    for value in (np.nan, np.inf, 2e3):
        cluster.states = np.full((2, HIDDEN), value, np.float16).tobytes()
        with pytest.raises(BackendError, match="states that are none"):
            model.states([1, 2])


def test_sessions_too_short_to_learn_from_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    model = TaughtModel(cluster, "tiny")
    model.most_tokens = 63
    with pytest.raises(UsageError, match="too few to learn from"):
        teach_draft_head(model, TrainingOptions(tokens=2000, device="cpu"), TeachingFiles(tmp_path / "files"))

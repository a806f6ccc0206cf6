"""A student's folder is a checkpoint like any other: our engine and `transformers` compute the same from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CorruptModelError, UsageError
from shardcompute.core.settings import Settings
from shardcompute.draft_training.student.shape import StudentShape, plan_student
from shardcompute.draft_training.student.student_folder import StudentFolder, round_student, student_bytes
from shardcompute.draft_training.student.student_net import NORM, StudentNet, new_student
from shardcompute.draft_training.teacher import CheckpointEnds, Teacher
from shardcompute.draft_training.training_loop import FrozenWeights
from shardcompute.node.driver.draft_model import check_same_vocabulary
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import reference_logits, save_tiny_talker
from support.models.tiny_checkpoint import save_tiny_llama
from support.models.tiny_gguf import save_tiny_text_gguf

IDS = np.random.default_rng(3).integers(0, 250, 24).tolist()
CPU = torch.device("cpu")


@contextmanager
def opened(path: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(resolve(parse_reference(str(path)), Settings(data_dir=path.parent))) as checkpoint:
        yield checkpoint


def frozen_weights(parent: Checkpoint) -> FrozenWeights:
    teacher = Teacher(CheckpointEnds(parent), "cpu", context_length=64, sessions=1, threads=1)
    return teacher.frozen_weights(np.arange(parent.spec.vocab_size, dtype=np.int32))


def write(parent: Checkpoint, shape: StudentShape, path: Path) -> StudentNet:
    """An untaught student."""
    net = round_student(new_student(shape, parent, CPU))
    StudentFolder(path).write(net, frozen_weights(parent), parent, {"tokens_per_round": 1.5})
    return net


def own_logits(folder: Path) -> Float32:
    options = ExecutorOptions(kv_bytes=1 << 24, max_rows=64, max_logit_rows=64, context_length=64)
    with opened(folder) as checkpoint:
        executor = open_shard(checkpoint, backend="numpy", form="float32", options=options)
        found = executor.step([Segment(1, 0, len(IDS), len(IDS))], np.asarray(IDS))
        executor.close()
    return found


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    "name",
    ["llama-tied", "llama-biases", "llama-llama3", "llama-yarn", "qwen2", "qwen3", "granite", "phi3"],
)
def test_all_layers_of_a_model_are_the_model(name: str, words: Path, tmp_path: Path) -> None:
    """Whatever a parent does and a student does not is folded into its weights, or said by its config."""
    folder, student = save_tiny_talker(name, tmp_path / "parent", words, layers=3), tmp_path / "student"
    with opened(folder) as parent:
        shape = plan_student(parent.spec, 1)
        spec = replace(shape.spec, layers=shape.spec.layers * 3)
        write(parent, replace(shape, kept=(0, 1, 2), spec=spec), student)
    expected = reference_logits(folder, IDS)
    # 16 bits are what remains between them.
    assert reference_logits(student, IDS) == pytest.approx(expected, abs=0.01 * float(np.abs(expected).max()))


def test_engine_and_transformers_and_the_net_itself_agree(words: Path, tmp_path: Path) -> None:
    path = tmp_path / "student"
    with opened(words) as parent:
        shape = plan_student(parent.spec, (0, 2, 5))
        net, frozen = write(parent, shape, path), frozen_weights(parent)
        with opened(path) as student:
            assert student.spec == shape.spec
            check_same_vocabulary("student", student.tokenizer(), parent.tokenizer())
            assert student.tokenizer().eos_ids == parent.tokenizer().eos_ids
    found = own_logits(path)
    assert found == pytest.approx(reference_logits(path, IDS), abs=1e-4)
    with torch.no_grad():
        rows = net.normed(net.run(frozen.embed(torch.tensor([IDS]))))
        mine = functional.linear(rows, frozen.head)[0].numpy()
    assert mine == pytest.approx(found, abs=0.02)
    sizes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 0 <= sizes - student_bytes(shape) < 8192, "room is looked for before it is taught"


def test_a_student_of_a_gguf_file_has_its_words(tmp_path: Path) -> None:
    file, path = save_tiny_text_gguf(tmp_path), tmp_path / "student"
    with opened(file) as parent:
        write(parent, plan_student(parent.spec, 2), path)
        tokenizer = parent.tokenizer()
        with opened(path) as student:
            read = student.tokenizer()
    check_same_vocabulary("student", read, tokenizer)
    text = "two  spaces </s> and é"
    assert read.encode(text) == tokenizer.encode(text)
    messages = [{"role": "user", "content": "Hello"}]
    assert read.encode_chat(messages) == tokenizer.encode_chat(messages)
    assert read.eos_ids == tokenizer.eos_ids
    assert own_logits(path) == pytest.approx(reference_logits(path, IDS), abs=1e-4)


def test_a_folder_of_something_else_is_left_alone(words: Path, tmp_path: Path) -> None:
    path = tmp_path / "student"
    place = StudentFolder(path)
    with opened(words) as parent:
        assert not place.check_owner(parent)
        path.mkdir()
        assert not place.check_owner(parent), "an empty one is as good as none"
        write(parent, plan_student(parent.spec, 2), path)
        assert place.check_owner(parent)
        write(parent, plan_student(parent.spec, 3), path)
        assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 3
        assert sorted(each.name for each in tmp_path.iterdir()) == ["student"]
    other = save_tiny_llama(tmp_path / "other", seed=2)
    with opened(other) as another:
        with pytest.raises(UsageError, match="a student of tiny"):
            place.check_owner(another)
        with pytest.raises(UsageError, match="no student"):
            StudentFolder(other).check_owner(another)


def test_weights_that_16_bits_cannot_hold_are_not_written(words: Path, tmp_path: Path) -> None:
    with opened(words) as parent:
        net = new_student(plan_student(parent.spec, 2), parent, CPU)
        net.weights[NORM].data[3] = 1e6
        with pytest.raises(CorruptModelError, match="16 bits"):
            StudentFolder(tmp_path / "student").write(net, frozen_weights(parent), parent, {})
    assert list(tmp_path.iterdir()) == []

"""A student learns from its parent: it agrees more often by teaching, goes on after a break, and is kept if better."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("torch")

from shardcompute.core.errors import BackendError, DiskFullError, UnsupportedModelError, UsageError
from shardcompute.core.settings import Settings
from shardcompute.draft_training.student import student_run
from shardcompute.draft_training.student.student_loop import StudentLoop
from shardcompute.draft_training.student.student_run import StudentOptions, TaughtStudent, teach_student
from shardcompute.draft_training.student.text_collection import TextCollection
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import save_tiny_llama

QUICK = StudentOptions(
    minutes=None,
    tokens=1100,
    epochs=0.3,
    layers=(0, 2),
    device="cpu",
    sessions=16,
    context_length=96,
    rows=512,
)
LONGER = replace(QUICK, tokens=3000, epochs=6, sessions=32, rate=2e-3)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """What it says next hangs on its last tokens, by way of its middle layer most of all, which students lack."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=3)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("o_proj.weight") or (name.endswith("down_proj.weight") and ".1." not in name):
            tensors[name] *= 0.05
    save_file(tensors, folder / "model.safetensors")
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder))) as opened:
        yield opened


@pytest.fixture(scope="module")
def learned(
    parent: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TaughtStudent, list[str], Path]:
    lines: list[str] = []
    folder = tmp_path_factory.mktemp("students") / "student"
    settings = Settings(data_dir=folder.parent)
    return teach_student(parent, LONGER, folder, settings, say=lines.append), lines, folder


def test_teaching_makes_it_agree_more_often(learned: tuple[TaughtStudent, list[str], Path]) -> None:
    taught, lines, folder = learned
    before, after = taught.untaught.seen, taught.examination.seen
    assert before.rows == after.rows > 50, "on the same rows"
    assert after.acceptance[0] > before.acceptance[0] + 0.15
    assert taught.is_better
    assert not replace(taught, in_use=taught.examination).is_better
    note = json.loads((folder / "student.json").read_text())
    assert note["layers"] == [0, 2]
    assert note["tokens_per_round"] == pytest.approx(taught.examination.score, abs=1e-3)
    assert any(line.startswith("taught: 100%") for line in lines)
    assert [each.name for each in folder.parent.iterdir()] == ["student"], (
        "a finished run leaves nothing else"
    )


def test_a_worse_one_does_not_replace_it(
    parent: Checkpoint, learned: tuple[TaughtStudent, list[str], Path]
) -> None:
    _, _, folder = learned
    content = (folder / "model.safetensors").read_bytes()
    options = replace(QUICK, layers=(0,))
    taught = teach_student(parent, options, folder, Settings(data_dir=folder.parent))
    assert taught.in_use is not None
    assert taught.in_use.score > taught.examination.score
    assert not taught.is_better
    assert (folder / "model.safetensors").read_bytes() == content


def test_a_run_that_was_cut_short_is_gone_on_with(
    parent: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings, lines = tmp_path / "student", Settings(data_dir=tmp_path), list[str]()
    step, steps = StudentLoop._step, 0

    def interrupted(self: StudentLoop, *given: object) -> object:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return step(self, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(StudentLoop, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            teach_student(parent, replace(QUICK, epochs=4), folder, settings)
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"student.text.pt", "student.weights.pt"}
    monkeypatch.setattr(TextCollection, "_play", None)  # all is said already
    taught = teach_student(parent, QUICK, folder, settings, say=lines.append)
    assert taught.tokens >= 1100
    assert sum("goes on" in line for line in lines) == 2, lines
    assert not {each.name for each in tmp_path.iterdir()} & left


def test_what_was_left_can_be_torn_of_other_layers_or_unwanted(parent: Checkpoint, tmp_path: Path) -> None:
    folder, settings, lines = tmp_path / "student", Settings(data_dir=tmp_path), list[str]()
    (tmp_path / "student.text.pt").write_bytes(b"torn")
    (tmp_path / "student.weights.pt").write_bytes(b"torn")
    teach_student(parent, QUICK, folder, settings, say=lines.append, text="something to read " * 20)
    (tmp_path / "student.text.pt").write_bytes(b"torn")
    teach_student(parent, QUICK, folder, settings, say=lines.append, is_fresh=True)
    assert not any("goes on" in line for line in lines)


def test_clear_errors_before_any_work(
    parent: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings = tmp_path / "student", Settings(data_dir=tmp_path)

    def teach(options: StudentOptions = QUICK, checkpoint: Checkpoint = parent, to: Path = folder) -> None:
        teach_student(checkpoint, options, to, settings)

    with pytest.raises(UsageError, match="how long"):
        teach(StudentOptions(minutes=None))
    with pytest.raises(UsageError, match="too few to learn from"):
        teach(replace(QUICK, tokens=60, sessions=1))
    with pytest.raises(UnsupportedModelError, match="norms"):
        teach(checkpoint=replace(parent, spec=replace(parent.spec, norm_placement="around")))
    with pytest.raises(UsageError, match="no student"):
        teach(to=Path(__file__).parent)
    with monkeypatch.context() as patched:
        patched.setattr(student_run, "check_room", _full)
        with pytest.raises(DiskFullError):
            teach()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError) as caught:
        teach()
    assert "shardcompute[torch]" in caught.value.hint


def _full(folder: Path, needed_bytes: int, what: str) -> None:
    raise DiskFullError(f"{what} needs {needed_bytes}")

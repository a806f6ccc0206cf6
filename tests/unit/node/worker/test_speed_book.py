"""What a worker has measured is there after a restart; a damaged file is as good as none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardcompute.control.state import LayerShape, LayerTime
from shardcompute.node.worker.speed_book import DeviceKey, SpeedBook
from shardcompute.node.worker.speed_probe import BackendSpeed

CARD = DeviceKey("NVIDIA H200", "torch", "cuda:0", 2)
HOST = DeviceKey("AMD EPYC", "onnx", "cpu", 2)
SPEED = BackendSpeed(1e-12, 1e-14, 1e-4)


def measured(model: str, layer_s: float = 0.1, hidden: int = 64, work_bytes: int = 1000) -> LayerTime:
    return LayerTime(model, layer_s, shape=LayerShape(hidden, work_bytes, "native"), prefill_s=layer_s / 9)


def test_a_restart_knows_what_was_measured(tmp_path: Path) -> None:
    book = SpeedBook(tmp_path / "speeds.json")
    book.note_probe(CARD, SPEED, 1000.0)
    book.note_model(CARD, measured("m"))
    book.note_model(HOST, measured("m", 0.5))
    again = SpeedBook(tmp_path / "speeds.json")
    assert again.probed(CARD, since_s=999.0) == (SPEED, 1000.0)
    assert again.probed(CARD, since_s=1001.0) is None, "that is too long ago"
    assert again.probed(HOST, since_s=0.0) is None
    assert again.models(CARD) == (measured("m"),)
    assert again.models(HOST) == (measured("m", 0.5),)


def test_another_device_backend_or_number_of_threads_is_another(tmp_path: Path) -> None:
    book = SpeedBook(tmp_path / "speeds.json")
    book.note_probe(CARD, SPEED, 1000.0)
    for other in (
        DeviceKey("NVIDIA L4", "torch", "cuda:0", 2),
        DeviceKey("NVIDIA H200", "llamacpp", "cuda:0", 2),
        DeviceKey("NVIDIA H200", "torch", "cuda:0", 4),
    ):
        assert book.probed(other, since_s=0.0) is None


def test_a_model_of_the_same_shape_takes_the_others_place(tmp_path: Path) -> None:
    book = SpeedBook(tmp_path / "speeds.json")
    for time in (measured("m"), measured("tuned m", 0.2, work_bytes=1010), measured("n", hidden=128)):
        book.note_model(CARD, time)
    assert [time.model for time in book.models(CARD)] == ["tuned m", "n"]


def test_the_file_stays_small(tmp_path: Path) -> None:
    book = SpeedBook(tmp_path / "speeds.json")
    for number in range(100):
        book.note_model(CARD, measured(f"m{number}", hidden=number + 1))
        book.note_probe(DeviceKey(f"card {number}", "torch", "cuda:0", 1), SPEED, 1.0)
    again = SpeedBook(tmp_path / "speeds.json")
    assert again.probed(DeviceKey("card 99", "torch", "cuda:0", 1), since_s=0.0) is not None
    assert again.probed(DeviceKey("card 0", "torch", "cuda:0", 1), since_s=0.0) is None
    assert [time.model for time in again.models(CARD)][-1] == "m99"
    assert len(again.models(CARD)) <= 64
    assert (tmp_path / "speeds.json").stat().st_size < 64 << 10


@pytest.mark.parametrize(
    "content", [b"", b"{", b'[{"key": 3}]', b"\xff\xfe", b"[" * 10_000, b"x" * (2 << 20)]
)
def test_a_damaged_file_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "speeds.json"
    path.write_bytes(content)
    book = SpeedBook(path)
    assert book.models(CARD) == ()
    book.note_model(CARD, measured("m"))
    assert SpeedBook(path).models(CARD) == (measured("m"),)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="no folder is closed to this user")
def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    book = SpeedBook(tmp_path / "speeds.json")
    book.note_model(CARD, measured("m"))
    assert book.models(CARD) == (measured("m"),)

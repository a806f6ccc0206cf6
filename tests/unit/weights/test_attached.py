"""Attachments: bytes that travel as tensors, under names that hold their hash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardcompute.core.errors import CorruptModelError
from shardcompute.models.vocabulary import Vocabulary, encode_vocabulary
from shardcompute.weights.attached import AttachedTensors, is_attachment, read_attachment
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.safetensors_file import open_safetensors
from shardcompute.weights.formats.tensor_file import TensorFile
from shardcompute.weights.served import VOCABULARY, served_vocabulary


@pytest.fixture
def tensors(tmp_path: Path) -> TensorFile:
    save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / "m.safetensors")
    return open_safetensors(LocalBytes(tmp_path / "m.safetensors"))


def test_attachments_are_read_beside_the_tensors(tensors: TensorFile) -> None:
    attached = AttachedTensors(tensors, {"notes": b"0123456789", "more": b""})
    assert read_attachment(attached, "notes") == b"0123456789"
    assert read_attachment(attached, "more") == b""
    assert read_attachment(attached, "none") is None
    assert attached.read_rows("w", 1) == tensors.read_rows("w", 1)
    assert attached.read_bytes("w", 4, 4) == tensors.read_bytes("w", 4, 4)
    (stored,) = (name for name in attached.entries if name.startswith("@notes/"))
    assert is_attachment(stored)
    assert attached.read_rows(stored, 2, 5) == b"234"
    with pytest.raises(CorruptModelError):
        attached.read_bytes(stored, 8, 3)
    attached.close()


def test_other_content_has_another_name(tensors: TensorFile) -> None:
    first, second = (AttachedTensors(tensors, {"notes": content}) for content in (b"a", b"b"))
    assert set(first.entries) & set(second.entries) == {"w"}
    tensors.close()


def test_another_of_the_same_name_takes_its_place(tensors: TensorFile) -> None:
    attached = AttachedTensors(AttachedTensors(tensors, {"notes": b"a", "more": b"m"}), {"notes": b"b"})
    assert read_attachment(attached, "notes") == b"b"
    assert read_attachment(attached, "more") == b"m"
    assert sum(map(is_attachment, attached.entries)) == 2
    attached.close()


def test_content_that_is_not_what_the_name_says_is_refused(tensors: TensorFile) -> None:
    attached = AttachedTensors(tensors, {"notes": b"right"})
    (stored,) = (name for name in attached.entries if is_attachment(name))
    attached._contents[stored] = b"wrong"
    with pytest.raises(CorruptModelError, match="damaged"):
        read_attachment(attached, "notes")
    tensors.close()


def test_a_served_model_brings_its_vocabulary(tensors: TensorFile) -> None:
    words = Vocabulary((b"a", b"", b"</s>"), frozenset({2}), frozenset({2}))
    served = served_vocabulary(AttachedTensors(tensors, {VOCABULARY: encode_vocabulary(words)}))()
    assert (served.tokens, served.special_ids, served.eos_ids) == (words.tokens, {2}, {2})
    with pytest.raises(CorruptModelError, match="vocabulary"):
        served_vocabulary(tensors)
    tensors.close()

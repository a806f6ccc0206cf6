"""What tests of fine-tuning through a swarm share: a tiny model, and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.models.tiny_checkpoint import save_tiny_llama


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Bytes are equal where as many threads compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""One tiny model for all swarms, and what a single process makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.node import draft_heads
from shardcompute.node.draft_heads import DraftHeadStore
from shardcompute.runtime.drafting import DraftLimits
from shardcompute.runtime.lens_fit import fit_lenses
from support.swarm import Alone, open_alone, open_tiny
from support.tiny_checkpoint import save_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def alone(tiny: Path) -> Iterator[Alone]:
    """The truth: the same model in one process."""
    with open_alone(tiny) as service:
        yield Alone(service)


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Draft heads of the tiny model, for every cut."""
    folder = tmp_path_factory.mktemp("draft-heads")
    options = ExecutorOptions(kv_bytes=64 << 20, context_length=256, threads=1)
    with open_tiny(tiny) as checkpoint:
        layers = range(1, checkpoint.spec.layer_count)
        DraftHeadStore(folder).save(checkpoint, fit_lenses(checkpoint, layers, options, tokens=256))
    return folder


@pytest.fixture(scope="module")
def bold() -> Iterator[None]:
    """A model of random weights is sure of nothing."""
    with mock.patch.object(draft_heads, "DraftLimits", partial(DraftLimits, confidence=0.0)):
        yield

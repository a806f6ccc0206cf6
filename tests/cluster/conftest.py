"""One tiny model for all swarms, and what a single process makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from shardcompute.node.weights.draft_heads import save_draft_head
from shardcompute.runtime import shard
from shardcompute.runtime.head_drafter import HeadDraftLimits
from support.models.draft_heads import random_draft_head
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import Alone, open_alone, open_tiny


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
    """A draft head of the tiny model."""
    folder = tmp_path_factory.mktemp("draft-heads")
    with open_tiny(tiny) as checkpoint:
        save_draft_head(folder, checkpoint, random_draft_head(checkpoint.spec))
    return folder


@pytest.fixture(scope="module")
def bold() -> Iterator[None]:
    """A model of random weights is sure of nothing."""
    with mock.patch.object(shard, "HeadDraftLimits", partial(HeadDraftLimits, confidence=0.0)):
        yield

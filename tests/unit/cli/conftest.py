"""A model that needs no weights, and a runner that starts commands with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from shardcompute.cli.main import build_for
from shardcompute.core.generation import Delta, GenerationRequest, Timings, TokenChoice
from shardcompute.node.local.service import EngineOptions
from shardcompute.node.service import ServedModel

from .cluster_lab import lab, recognised, server

__all__ = ["lab", "recognised", "server"]


class FakeTokenizer:
    """A token is a character's code; a chat renders as `role:content|`."""

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.eos_ids = frozenset({0})

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']}|" for m in messages))


@dataclass
class FakeService:
    """Answers with `script`: texts and deltas to stream, exceptions to raise in between."""

    script: list[str | Delta | BaseException] = field(default_factory=lambda: ["Pa", "ris"])
    name: str = "fake"
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    requests: list[GenerationRequest] = field(default_factory=list)
    is_closed: bool = False
    cancelled: int = 0
    timings: Timings | None = None
    remark: str = ""

    @property
    def prompts(self) -> list[str]:
        return ["".join(map(chr, request.prompt)) for request in self.requests]

    def models(self) -> list[ServedModel]:
        return [ServedModel(self.name, 64, 0, digest="", size_bytes=0)]

    def stream(self, request: GenerationRequest) -> Iterator[Delta]:
        self.requests.append(request)
        timings = self.timings or Timings(0.1, 0.5, 2.0, len(request.prompt), 5)
        try:
            for step in self.script:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, Delta):
                    yield step
                    continue
                yield Delta(step, (TokenChoice(len(step)),))
            yield Delta("", (TokenChoice(0),), finish="stop", timings=timings)
        finally:
            self.cancelled += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True


@dataclass
class Opening:
    """What commands asked to open."""

    service: FakeService
    references: list[str] = field(default_factory=list)
    options: list[EngineOptions] = field(default_factory=list)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opening:
    """Commands open a fake model instead of a real one."""
    seen = Opening(FakeService())

    def open_model(reference: str, settings: object, options: EngineOptions, progress: object) -> FakeService:
        seen.references.append(reference)
        seen.options.append(options)
        return seen.service

    monkeypatch.setattr("shardcompute.node.local.service.open_model", open_model)
    return seen


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder; nothing may go to the network."""
    monkeypatch.setenv("SHARDCOMPUTE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHARDCOMPUTE_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def cli(home: Path) -> Callable[..., Any]:
    """Runs `shardcompute` with these arguments."""

    def start(*arguments: str, stdin: str | bytes = b"") -> Any:
        return CliRunner().invoke(build_for(arguments), arguments, input=stdin, prog_name="shardcompute")

    return start

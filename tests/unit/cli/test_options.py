"""Options that are repeated are those of their owners; records of options become options of commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from shardcompute import web
from shardcompute.cli.cluster.key import KeyPurpose
from shardcompute.cli.format import format_age, parse_size
from shardcompute.cli.options.engine import Backend, EngineArguments, KvTypeName, WeightForm, check_device
from shardcompute.cli.options.generation import CHAT_TEMPERATURE, SamplingArguments
from shardcompute.cli.options.keys import KEY_ROLES
from shardcompute.cli.options.records import changed_options, with_options
from shardcompute.core.errors import UsageError
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KV_TYPES
from shardcompute.runtime.shard import BACKENDS
from shardcompute.security import KeyRole
from shardcompute.weights.formats.quantise import WEIGHT_FORMS


def test_names_are_those_of_their_rooms() -> None:
    assert set(Backend) - {Backend.AUTO} == set(BACKENDS)
    assert set(WeightForm) == set(WEIGHT_FORMS)
    assert set(KvTypeName) == set(KV_TYPES)
    assert EngineArguments().kv_type.value == DEFAULT_KV_TYPE
    assert list(KEY_ROLES) == list(KeyPurpose) == list(KeyRole)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("mlx", Backend.ONNX), ("mps", Backend.MLX), ("cuda", Backend.ONNX), ("tpu", Backend.MLX)],
)
def test_devices_that_a_backend_cannot_use(device: str, backend: Backend) -> None:
    with pytest.raises(UsageError) as refused:
        check_device(device, backend)
    assert refused.value.hint


def test_devices_that_a_backend_can_use() -> None:
    for device, backend in (("mlx", Backend.MLX), ("cpu", Backend.MLX), ("cuda:1", Backend.TORCH)):
        check_device(device, backend)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100", 100),
        ("1K", 1024),
        ("2g", 2 << 30),
        ("1.5 GiB", 3 << 29),
        ("512MB", 512 << 20),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1G", "G", "2X", "1e9", "9" * 400, "999999999999999T", "0.0001"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "now"), (59, "now"), (60, "1 minute"), (7200, "2 hours"), (90_000, "1 day"), (4e7, "1 year")],
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


@dataclass(frozen=True, slots=True)
class _Shared:
    size: Annotated[int, typer.Option("--size", help="How much.")] = 3
    is_bold: Annotated[bool, typer.Option("--bold/--plain")] = False


def test_a_record_stands_for_its_options_in_place() -> None:
    seen: list[tuple[str, _Shared, int]] = []
    app = typer.Typer()

    @app.command()
    @with_options
    def paint(
        what: Annotated[str, typer.Argument()],
        *,
        shared: _Shared,
        times: Annotated[int, typer.Option("--times")] = 1,
    ) -> None:
        """Paint it."""
        seen.append((what, shared, times))

    assert CliRunner().invoke(app, ["wall", "--size", "5", "--bold"]).exit_code == 0
    assert CliRunner().invoke(app, ["door", "--times", "2"]).exit_code == 0
    assert seen == [("wall", _Shared(5, True), 1), ("door", _Shared(), 2)]
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "Paint it." in shown
    assert shown.index("--size") < shown.index("--bold") < shown.index("--times")
    assert changed_options(_Shared()) == []
    assert changed_options(_Shared(4, True)) == ["--size", "--bold"]


def test_conversations_have_the_page_s_temperature_and_single_prompts_none() -> None:
    page = Path(web.__file__).with_name("static")
    told = [
        float(number)
        for script in page.rglob("*.js")
        for found in re.findall(r"\bheat: ([\d.]+)|chat-heat.*?value: ([\d.]+)", script.read_text())
        for number in found
        if number
    ]
    assert told == [CHAT_TEMPERATURE]
    options = SamplingArguments()
    assert options.sampling_for(is_conversation=True).temperature == CHAT_TEMPERATURE
    assert options.sampling_for(is_conversation=False).temperature == 0.0
    for is_conversation in (True, False):
        given = SamplingArguments(temperature=0.3).sampling_for(is_conversation=is_conversation)
        assert given.temperature == 0.3

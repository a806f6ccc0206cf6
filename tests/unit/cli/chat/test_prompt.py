"""One argument is a model or a prompt; stdin is text or an error."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from shardcompute.cli.chat.prompt import is_model_name, join_prompt, read_piped, split_arguments
from shardcompute.core.errors import UsageError


@pytest.mark.parametrize(
    "text",
    ["smollm2", "SmolLM2", "default", "org/repo", "org/repo@v1:Q4_0", "./x", "/abs/y", "~/z", "m.gguf", "a/"],
)
def test_names_of_models(text: str) -> None:
    assert is_model_name(text)


@pytest.mark.parametrize(
    "text", ["", " ", "hello", "Why is the sky blue?", "a/b or c/d", "what is m.gguf", "line\nbreak", "nul\0"]
)
def test_prompts(text: str) -> None:
    assert not is_model_name(text)


def test_what_exists_is_a_model_whatever_it_looks_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    assert is_model_name("my model")
    assert not is_model_name("my models")


def test_arguments_are_split() -> None:
    assert split_arguments(None, None) == ("", None)
    assert split_arguments("org/repo", None) == ("org/repo", None)
    assert split_arguments("hello", None) == ("", "hello")
    assert split_arguments("hello", "you") == ("hello", "you")
    assert split_arguments("", None) == ("", "")


def test_prompt_and_piped_text_are_joined() -> None:
    assert join_prompt("Sum up:", "text") == "Sum up:\n\ntext"
    assert join_prompt("only", "") == "only"
    assert join_prompt(None, "piped") == "piped"
    assert join_prompt("only", None) == "only"


@pytest.mark.parametrize(("prompt", "piped"), [(None, ""), ("", None), (" \n", " "), (None, None)])
def test_nothing_is_no_prompt(prompt: str | None, piped: str | None) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        join_prompt(prompt, piped)


def _stdin(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content), encoding="ascii")


def test_stdin_is_read_as_utf8_whatever_the_locale_says() -> None:
    assert read_piped(_stdin("\ufeffÄ\nö\n".encode()), print) == "Ä\nö"


def test_stdin_that_is_not_text_is_refused_with_the_place() -> None:
    with pytest.raises(UsageError, match="byte 2 is 0xff"):
        read_piped(_stdin(b"ab\xffc"), print)


def test_stdin_beyond_any_context_is_refused() -> None:
    with pytest.raises(UsageError, match="longer than 16 MiB"):
        read_piped(_stdin(b"x" * ((16 << 20) + 1)), print)


def test_missing_and_closed_stdin_count_as_none() -> None:
    closed = _stdin(b"x")
    closed.close()
    assert read_piped(None, print) is None
    assert read_piped(closed, print) is None

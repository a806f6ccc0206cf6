"""Every form a user may write, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.weights.sources.reference import (
    EmbeddedReference,
    FolderReference,
    GgufReference,
    HubReference,
    parse_hub_reference,
    parse_reference,
)


@pytest.mark.parametrize("text", ["", "default", "smollm2", "SmolLM2", "  default "])
def test_embedded(text: str) -> None:
    assert parse_reference(text) == EmbeddedReference()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo", HubReference("org/repo")),
        ("Qwen/Qwen2.5-0.5B-Instruct", HubReference("Qwen/Qwen2.5-0.5B-Instruct")),
        ("org/repo@main", HubReference("org/repo")),
        ("org/repo@v1.0", HubReference("org/repo", "v1.0")),
        ("org/repo@refs/pr/7", HubReference("org/repo", "refs/pr/7")),
        ("org/repo:q4_k_m", HubReference("org/repo", "main", "Q4_K_M")),
        ("org/repo@abc123:UD-Q4_K_XL", HubReference("org/repo", "abc123", "UD-Q4_K_XL")),
        ("org/repo.gguf@main", HubReference("org/repo.gguf")),
    ],
)
def test_hub(text: str, expected: HubReference) -> None:
    assert parse_reference(text) == expected
    assert parse_reference(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "org/repo/file",
        "org//repo",
        "/".join(["org", "..", "repo"]),
        "org/..",
        "org/.hidden",
        "org/repo-",
        "org/a--b",
        "org/a..b",
        "org/repo.git",
        "org/" + "x" * 96,
        "org/re po",
        "org/repo@",
        "org/repo:",
        "org/repo@../main",
        "org/repo@a//b",
        "org/repo@a/../b",
        "org/repo@/a",
        "org/repo@a b",
        "org/repo@" + "r" * 101,
        "org/repo:Q4@main",
        "org/repo:Q4:Q8",
        "org/repo:Q4/../x",
        "org/repo:" + "Q" * 33,
        "org/repo\x00",
        "org/re\npo",
        "org/repo\x9b",
        "örg/repo",
        "https://example.org/x",
        "x" * 5000,
    ],
)
def test_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert "org/repo@revision:QUANT" in caught.value.hint


def test_existing_folder_needs_no_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "repo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_reference("org/repo") == FolderReference(tmp_path / "org" / "repo")
    assert parse_reference("org") == FolderReference(tmp_path / "org")
    assert parse_hub_reference("org/repo") == HubReference("org/repo")


def test_explicit_paths_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert parse_reference("./default") == FolderReference(tmp_path / "default")
    assert parse_reference("../other") == FolderReference(tmp_path.parent / "other")
    assert parse_reference(".") == FolderReference(tmp_path)
    assert parse_reference("~/m") == FolderReference(tmp_path / "home" / "m")
    assert parse_reference("/models/x.gguf") == GgufReference(Path("/models/x.gguf"))
    assert parse_reference("sub/x.GGUF") == GgufReference(tmp_path / "sub" / "x.GGUF")


def test_folder_that_is_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").mkdir()
    assert parse_reference(str(tmp_path / "x.gguf")) == FolderReference(tmp_path / "x.gguf")


def test_other_file_is_refused_with_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"not a \.gguf file") as caught:
        parse_reference(str(tmp_path / "model.safetensors"))
    assert "folder" in caught.value.hint


def test_unknown_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="home folder"):
        parse_reference("~no-such-user-here/model")


@pytest.mark.parametrize("name", ["folder", "model.gguf", "with space ", "ünïcode"])
def test_local_references_round_trip(tmp_path: Path, name: str) -> None:
    reference = parse_reference(str(tmp_path / name))
    assert parse_reference(str(reference)) == reference

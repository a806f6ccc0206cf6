"""Settings come from the environment, and a wrong value is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.core.settings import DEFAULT_HUB_URL, Secret, check_download_rate, load_settings


def test_defaults() -> None:
    settings = load_settings({"HOME": "/home/ada"}, platform="linux")
    assert settings.data_dir == Path("/home/ada/.local/share/shardcompute")
    assert settings.hub_url == DEFAULT_HUB_URL
    assert (settings.hub_token, settings.offline, settings.threads, settings.no_color) == (
        None,
        False,
        None,
        False,
    )


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {"HOME": "/h", "XDG_DATA_HOME": "/x"}, "/x/shardcompute"),
        ("linux", {"HOME": "/h", "XDG_DATA_HOME": "relative"}, "/h/.local/share/shardcompute"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Application Support/shardcompute"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/shardcompute"),
        ("win32", {"USERPROFILE": "/u"}, "/u/AppData/Local/shardcompute"),
        ("linux", {"HOME": "/h", "SHARDCOMPUTE_HOME": "~/models"}, "/h/models"),
        ("linux", {"HOME": "/h", "SHARDCOMPUTE_HOME": "/m", "XDG_DATA_HOME": "/x"}, "/m"),
    ],
)
def test_data_dir(platform: str, environ: dict[str, str], expected: str) -> None:
    assert load_settings(environ, platform=platform).data_dir == Path(expected)


def test_relative_home_becomes_absolute() -> None:
    assert load_settings({"SHARDCOMPUTE_HOME": "here"}).data_dir == Path.cwd() / "here"


def test_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="SHARDCOMPUTE_HOME"):
        load_settings({"SHARDCOMPUTE_HOME": str(tmp_path / "file")})


def test_hub_url_prefers_our_variable() -> None:
    environ = {"HOME": "/h", "HF_ENDPOINT": "https://mirror.example/hf/"}
    assert load_settings(environ).hub_url == "https://mirror.example/hf"
    environ["SHARDCOMPUTE_HUB_URL"] = "http://127.0.0.1:8000"
    assert load_settings(environ).hub_url == "http://127.0.0.1:8000"
    environ["SHARDCOMPUTE_HUB_URL"] = ""
    assert load_settings(environ).hub_url == "https://mirror.example/hf"


@pytest.mark.parametrize(
    "url", ["mirror.example", "ftp://mirror.example", "https://", "http://[", "https://a b", "https://a?b=c"]
)
def test_bad_hub_url_names_its_variable(url: str) -> None:
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        load_settings({"HOME": "/h", "HF_ENDPOINT": url})


def test_password_in_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="SHARDCOMPUTE_HUB_URL") as caught:
        load_settings({"HOME": "/h", "SHARDCOMPUTE_HUB_URL": "https://ada:hunter2@mirror.example"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)]
)
def test_offline(text: str, expected: bool) -> None:
    assert load_settings({"HOME": "/h", "HF_HUB_OFFLINE": text}).offline is expected
    assert (
        load_settings({"HOME": "/h", "HF_HUB_OFFLINE": "1", "SHARDCOMPUTE_OFFLINE": text}).offline is expected
    )


def test_bad_flag_names_its_variable() -> None:
    with pytest.raises(UsageError, match="SHARDCOMPUTE_OFFLINE"):
        load_settings({"HOME": "/h", "SHARDCOMPUTE_OFFLINE": "perhaps"})


def test_threads() -> None:
    assert load_settings({"HOME": "/h", "SHARDCOMPUTE_THREADS": "3"}).threads == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "99999", "１"])
def test_bad_threads(text: str) -> None:
    with pytest.raises(UsageError, match="SHARDCOMPUTE_THREADS"):
        load_settings({"HOME": "/h", "SHARDCOMPUTE_THREADS": text})


def test_no_color_is_any_value() -> None:
    assert load_settings({"HOME": "/h", "NO_COLOR": "0"}).no_color
    assert not load_settings({"HOME": "/h", "NO_COLOR": ""}).no_color


def test_token_is_kept_but_never_shown() -> None:
    settings = load_settings({"HOME": "/h", "HF_TOKEN": " hf_secret\n"})
    assert settings.hub_token == Secret("hf_secret")
    assert settings.hub_token.reveal() == "hf_secret"
    assert "hf_secret" not in f"{settings!r} {settings} {settings.hub_token}"


@pytest.mark.parametrize("token", ["hf_a\nX-Evil: 1", "hf_a b", "hf_é"])
def test_token_that_would_break_a_header_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(UsageError, match="HF_TOKEN") as caught:
        load_settings({"HOME": "/h", "HF_TOKEN": token})
    assert "hf_" not in str(caught.value)


def test_logs_are_plain_lines_of_what_matters_unless_asked_otherwise() -> None:
    plain = load_settings({"HOME": "/h"})
    assert (plain.log_format, plain.log_level) == ("text", "info")
    asked = {"HOME": "/h", "SHARDCOMPUTE_LOG_FORMAT": "JSON", "SHARDCOMPUTE_LOG_LEVEL": "debug"}
    assert (load_settings(asked).log_format, load_settings(asked).log_level) == ("json", "debug")


@pytest.mark.parametrize("name", ["SHARDCOMPUTE_LOG_FORMAT", "SHARDCOMPUTE_LOG_LEVEL"])
def test_choices_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        load_settings({"HOME": "/h", name: "loud"})
    assert "one of" in caught.value.hint


def test_traces_go_nowhere_unless_a_collector_is_named() -> None:
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert load_settings({"HOME": "/h"}).traces_url is None
    assert load_settings({"HOME": "/h", name: "http://c:4318/"}).traces_url == "http://c:4318"
    with pytest.raises(UsageError, match=name):
        load_settings({"HOME": "/h", name: "c:4318"})


def test_no_page_of_another_origin_may_call_unless_it_is_named() -> None:
    assert load_settings({}).cors_origins == ()
    given = {"SHARDCOMPUTE_CORS_ORIGINS": "http://localhost:3000, https://Page.Example/ ,*"}
    assert load_settings(given).cors_origins == ("http://localhost:3000", "https://page.example", "*")
    extension = {"SHARDCOMPUTE_CORS_ORIGINS": "chrome-extension://abcdef"}
    assert load_settings(extension).cors_origins == ("chrome-extension://abcdef",)


@pytest.mark.parametrize(
    "text",
    [
        "page.example",
        "null",
        "http://a/b",
        "http://u@a",
        "http://a?b",
        "http://",
        "http://a:0",
        "https://*:x",
    ],
)
def test_what_is_no_origin_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="SHARDCOMPUTE_CORS_ORIGINS"):
        load_settings({"SHARDCOMPUTE_CORS_ORIGINS": text})


def test_mirrors_and_rate() -> None:
    environ = {
        "HOME": "/home/me",
        "SHARDCOMPUTE_HUB_MIRRORS": "https://one.example/, http://two.example",
        "SHARDCOMPUTE_DOWNLOAD_RATE": "5000000",
    }
    settings = load_settings(environ)
    assert settings.hub_mirrors == ("https://one.example", "http://two.example")
    assert settings.download_rate == 5_000_000


@pytest.mark.parametrize(
    "changes",
    [
        {"SHARDCOMPUTE_HUB_MIRRORS": "one.example"},
        {"SHARDCOMPUTE_HUB_MIRRORS": "https://me:secret@one.example"},
        {"SHARDCOMPUTE_DOWNLOAD_RATE": "20M"},
        {"SHARDCOMPUTE_DOWNLOAD_RATE": "10"},
    ],
)
def test_wrong_mirrors_and_rates(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        load_settings({"HOME": "/home/me", **changes})


def test_a_rate_at_which_nothing_comes_is_refused() -> None:
    check_download_rate(None)
    with pytest.raises(UsageError, match="too few"):
        check_download_rate(10)


def test_nodes_of_the_hash_table() -> None:
    given = {"SHARDCOMPUTE_DHT": " dht.example.org:7422, [fd00::1]:9 ,", "SHARDCOMPUTE_DHT_PORT": "7500"}
    settings = load_settings({"HOME": "/home/me", **given}, platform="linux")
    assert settings.dht == ("dht.example.org:7422", "[fd00::1]:9")
    assert settings.dht_port == 7500
    plain = load_settings({"HOME": "/home/me"}, platform="linux")
    assert (plain.dht, plain.dht_port) == ((), 7422)
    for wrong in (
        {"SHARDCOMPUTE_DHT": "host"},
        {"SHARDCOMPUTE_DHT": "host:0"},
        {"SHARDCOMPUTE_DHT": ":1"},
        {"SHARDCOMPUTE_DHT_PORT": "70000"},
        {"SHARDCOMPUTE_DHT_PORT": "x"},
    ):
        with pytest.raises(UsageError):
            load_settings({"HOME": "/home/me", **wrong}, platform="linux")

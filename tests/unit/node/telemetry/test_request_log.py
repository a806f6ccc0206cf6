"""Requests are known by one id from the client's answer to the logs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from shardcompute.core.generation import Delta, GenerationRequest, Timings, TokenChoice
from shardcompute.node.process.log_files import log_path, logging_to_file
from shardcompute.node.telemetry.request_log import RequestLog, RequestView


def _generate(id: str, log: RequestLog) -> str:
    with log.open("m", "m#1", GenerationRequest((1, 2, 3), 1, request_id=id)) as entry:
        entry.session = 5
        entry.saw(Delta("a", (TokenChoice(1),), finish="stop", timings=Timings(cached_tokens=2)))
    return entry.id


def test_requests_are_known_by_the_id_that_clients_see() -> None:
    log = RequestLog(size=2)
    assert _generate("abc", log) == "abc"
    # Clients may choose the same id again, and a request may have several generations.
    assert _generate("abc", log) == "abc.2"
    assert _generate("x", log) == "x"
    # "abc" has been forgotten by now.
    assert _generate("abc", log) == "abc"
    assert [view.id for view in log.views()] == ["abc", "x"]
    assert log.views()[0].session == "5"
    assert log.views()[0].cached_tokens == 2


def test_listeners_hear_of_each_end_once() -> None:
    log = RequestLog()
    heard: list[RequestView] = []
    log.listen(heard.append)
    with pytest.raises(ValueError), log.open("m", "m#1", GenerationRequest((0,) * 1, 1)) as entry:
        raise ValueError
    log.close(entry)
    assert [(view.state, view.error) for view in heard] == [("failed", "ValueError")]


@pytest.fixture
def json_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDCOMPUTE_LOG_FORMAT", "json")
    monkeypatch.setenv("SHARDCOMPUTE_LOG_LEVEL", "debug")


@pytest.mark.usefixtures("json_logs")
def test_json_lines_name_the_request(tmp_path: Path) -> None:
    noted = logging.getLogger("test")
    with logging_to_file(tmp_path, "driver"):
        _generate("abc", RequestLog())
        noted.debug("key %s", "sk-sc-0123456789abcdef", extra={"chain": "m#1", "else": "no"})
        try:
            raise ValueError("two\nlines")
        except ValueError:
            noted.exception("broken")
    ended, debug, failed = map(json.loads, log_path(tmp_path, "driver").read_text().splitlines())
    assert (ended["request"], ended["session"], ended["chain"]) == ("abc", "5", "m#1")
    assert "request abc ended (stop) after" in ended["message"]
    assert list(ended)[:4] == ["time", "level", "logger", "message"]
    assert debug["level"] == "DEBUG"
    assert "0123456789abcdef" not in debug["message"]
    assert (debug["chain"], "else" in debug) == ("m#1", False)
    assert "ValueError: two\nlines" in failed["error"]


def test_debug_lines_are_left_out_by_default(tmp_path: Path) -> None:
    with logging_to_file(tmp_path, "driver"):
        logging.getLogger("test").debug("unimportant")
        logging.getLogger("test").info("important")
    written = log_path(tmp_path, "driver").read_text()
    assert written.endswith("Z INFO test: important\n")
    assert "unimportant" not in written

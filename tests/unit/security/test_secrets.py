from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.security import KeyBook, NodeIdentity, RedactSecrets, TokenBook, redact

KEY = KeyBook().create(label="", now_s=0.0)[1]
TOKEN = (
    TokenBook()
    .create(addresses=["10.0.0.1:7070"], fingerprint="ab" * 32, cluster="home", now_s=0.0)[1]
    .encode()
)


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """What the root of a logger tree of the test's own writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    handler.addFilter(RedactSecrets())
    logger = logging.getLogger("redaction")
    logger.addHandler(handler)
    logger.propagate = False
    yield stream
    logger.removeHandler(handler)


LOG = logging.getLogger("redaction.child")


def test_secrets_are_masked_and_the_rest_stays(tmp_path: Path) -> None:
    pem = NodeIdentity.open(tmp_path).key_path.read_text()
    assert redact(f"join {TOKEN} now") == "join sc1.<redacted> now"
    assert redact(f"key={KEY}, ok") == "key=sk-sc-<redacted>, ok"
    assert redact("Authorization: Bearer s3cr3t!") == "Authorization: Bearer <redacted>"
    assert redact("(b'authorization', b'Bearer s3cr3t')") == "(b'authorization', b'Bearer <redacted>')"
    assert redact("?auth=Bearer%20abc&x=1") == "?auth=Bearer%20<redacted>"
    assert redact("x-api-key: abc") == "x-api-key: <redacted>"
    assert redact("token hf_" + "a" * 34) == "token hf_<redacted>"
    assert redact(f"a {pem} b") == "a <redacted> private key\n b"
    assert redact(f"a {pem[:70]}") == "a <redacted> private key"
    assert redact(repr(pem)) == "'<redacted> private key\\n'"


@pytest.mark.parametrize(
    "text",
    [
        "task-scheduler-with-long-name-indeed",
        f"key {KEY[:14]} revoked",
        "sc1.x",
        "-----BEGIN CERTIFICATE-----",
    ],
    ids=["a long name", "an id of a key", "the beginning of a token", "a certificate"],
)
def test_ordinary_words_and_public_ids_stay(text: str) -> None:
    assert redact(text) == text


def test_records_of_child_loggers_are_masked(output: io.StringIO) -> None:
    LOG.warning("joining with %s and %r, %d times", TOKEN, [KEY], 3)
    assert (
        output.getvalue()
        == "redaction.child joining with sc1.<redacted> and \"['sk-sc-<redacted>']\", 3 times\n"
    )


def test_secret_that_only_the_whole_message_shows_is_masked(output: io.StringIO) -> None:
    LOG.warning("Bearer %s", "hunter2")
    LOG.warning("user %(user)s has %(key)s", {"user": "ann", "key": KEY})
    LOG.warning("100%% of sk-sc-%s", KEY[6:])
    assert output.getvalue().splitlines() == [
        "redaction.child Bearer <redacted>",
        "redaction.child user ann has sk-sc-<redacted>",
        "redaction.child 100% of sk-sc-<redacted>",
    ]


def test_secret_in_a_traceback_is_masked(output: io.StringIO) -> None:
    try:
        raise ValueError(f"bad token {TOKEN}")
    except ValueError:
        LOG.exception("failed")
    assert "ValueError: bad token sc1.<redacted>" in output.getvalue()
    assert TOKEN not in output.getvalue()


def test_arguments_that_do_not_fit_are_not_printed(
    output: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    LOG.warning("%d with " + KEY, TOKEN)
    written = output.getvalue() + capsys.readouterr().err
    assert "%d with sk-sc-<redacted> (arguments do not fit: TypeError)" in written
    assert KEY not in written
    assert TOKEN not in written


def test_object_whose_repr_fails_does_not_break_logging(output: io.StringIO) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError(KEY)

    LOG.warning("see %s", Broken())
    LOG.warning("still here", extra={"thing": Broken()})
    assert "arguments do not fit: RuntimeError" in output.getvalue()
    assert "still here" in output.getvalue()
    assert KEY not in output.getvalue()


def test_extras_and_stacks_are_masked_and_plain_records_left_alone() -> None:
    record = logging.LogRecord("a", logging.INFO, "f", 1, "%s %d", ("x", 2), None)
    record.header = f"Bearer {KEY}"
    record.stack_info = f"frame {TOKEN}"
    record.count = 3
    assert RedactSecrets().filter(record)
    assert (record.msg, record.args) == ("%s %d", ("x", 2))
    assert (record.header, record.count) == ("Bearer <redacted>", 3)
    assert record.stack_info == "frame sc1.<redacted>"

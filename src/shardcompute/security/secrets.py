"""Masking of secrets in logs: join tokens, API keys, authorization headers, private keys.

    handler.addFilter(RedactSecrets())

Put the filter on handlers: one on a logger would not see what its children log. It is a safety net for
mistakes, not a licence to log secrets: a secret in a form it does not know goes through.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping

_MARK = "<redacted>"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
            re.DOTALL,
        ),
        f"{_MARK} private key",
    ),
    (re.compile(r"(sc\d{1,9}\.)[A-Za-z0-9_-]{8,}"), rf"\1{_MARK}"),
    # More than the 8 characters of a key's public id, which may be logged.
    (re.compile(r"(sk-sc-)[A-Za-z0-9]{9,}"), rf"\1{_MARK}"),
    (re.compile(r"(?<![A-Za-z0-9])(sk-|hf_)[A-Za-z0-9_-]{20,}"), rf"\1{_MARK}"),
    (re.compile(r"((?:(?:bearer|basic)(?:\s+|%20))+)[^\s'\",;]+", re.IGNORECASE), rf"\1{_MARK}"),
    (re.compile(r"(x-api-key['\"]?\s*[:=,]\s*b?['\"]?)[^\s'\",;]+", re.IGNORECASE), rf"\1{_MARK}"),
)
_OWN_ATTRIBUTES = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime"}


def redact(text: str) -> str:
    """`text` with everything that looks like a secret masked; redacting twice changes nothing more."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


class RedactSecrets(logging.Filter):
    """Lets every record through, with secrets masked in its message, arguments, traceback and extras."""

    def filter(self, record: logging.LogRecord) -> bool:
        _redact_message(record)
        if record.exc_info:
            # The formatted text takes the exception's place, or a formatter would print it in full again.
            record.exc_text = (
                record.exc_text or "".join(traceback.format_exception(*record.exc_info)).rstrip()
            )
            record.exc_info = None
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        for name, value in record.__dict__.items():
            if name not in _OWN_ATTRIBUTES:
                record.__dict__[name] = _redact_extra(value)
        return True


def _redact_message(record: logging.LogRecord) -> None:
    """Arguments stay apart from the message where they can: some formatters read them one by one."""
    try:
        if isinstance(record.args, tuple):
            record.args = tuple(_redact_value(value) for value in record.args)
        elif isinstance(record.args, Mapping):
            record.args = {name: _redact_value(value) for name, value in record.args.items()}
        message = record.getMessage()
    except Exception as error:
        # Left alone, logging would print the arguments in its complaint.
        record.msg = f"{redact(str(record.msg))} (arguments do not fit: {type(error).__name__})"
        record.args = None
        return
    masked = redact(message)
    if masked != message:
        record.msg, record.args = masked, None


def _redact_extra(value: object) -> object:
    try:
        return _redact_value(value)
    except Exception as error:
        return f"<unprintable: {type(error).__name__}>"


def _redact_value(value: object) -> object:
    """The value itself unless its text or repr holds a secret."""
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else f"{value}\n{value!r}"
    masked = redact(text)
    if masked == text:
        return value
    return masked if isinstance(value, str) else redact(str(value))

"""Variables of a request for the chat template: bounded, and never those that the server sets itself."""

from __future__ import annotations

from typing import Any

import pytest

from shardcompute.api.errors import RequestError
from shardcompute.api.reasoning import template_variables

QWEN = "{{ messages }}{% if enable_thinking is false %}<think></think>{% endif %}"


def test_an_effort_reaches_templates_by_the_names_that_they_know() -> None:
    assert template_variables(QWEN, None, None) == {}
    assert template_variables(QWEN, None, "none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert template_variables(QWEN, None, "high") == {"reasoning_effort": "high", "enable_thinking": True}
    assert template_variables("{% if thinking %}", None, None, False) == {"thinking": False}
    assert template_variables("{{ messages }}", None, None, False) == {}
    assert template_variables(None, None, "low") == {"reasoning_effort": "low"}
    channels = "<|channel|><|message|>{{ reasoning_effort }}"
    assert template_variables(channels, None, "minimal") == {"reasoning_effort": "low"}


def test_what_is_given_by_name_is_strongest() -> None:
    given = {"enable_thinking": True, "other": [1, {"a": None}]}
    assert template_variables(QWEN, given, "none") == {"reasoning_effort": "none", **given}


@pytest.mark.parametrize(
    "given",
    [
        {"messages": []},
        {"tools": []},
        {"add_generation_prompt": False},
        {"bos_token": "x"},
        {"raise_exception": 1},
        {"range": 1},
        {"__class__": 1},
        {"a b": 1},
        {"": 1},
        {"a" * 65: 1},
        {"a": "x" * 20_000},
        {"a": [[[[[[[[[1]]]]]]]]]},
        {f"a{number}": 1 for number in range(65)},
    ],
)
def test_what_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        template_variables(QWEN, given, None)
    assert caught.value.param == "chat_template_kwargs"

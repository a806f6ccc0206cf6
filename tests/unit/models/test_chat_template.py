"""Chat templates render what models expect, and cannot misbehave."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.models import chat_template
from shardcompute.models.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_messages_and_the_generation_prompt_are_rendered() -> None:
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  {% if true %}\n{{ bos_token }}\n  {% endif %}\n{% endif %}") == "<s>\n"


def test_the_fields_of_the_loop_are_there() -> None:
    source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}"
    assert render(source, USER * 2) == "1/2False2/2True"
    reverse = "{% for m in messages|reverse %}{{ loop.index }}{{ loop.last }}{% endfor %}"
    assert render(reverse, USER * 2) == "1False2True"


def test_break_and_generation_are_understood() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert render(source, USER * 3) == "Hi"


def test_json_is_written_without_escapes() -> None:
    tools = [{"name": "größer", "html": "<b>&'"}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "größer", "html": "<b>&\'"}]'
    assert render("{{ tools[0] | tojson(indent=1) }}", tools=[{"a": 1}]) == '{\n "a": 1\n}'


def test_tools_are_none_when_there_are_none() -> None:
    assert render("{{ tools is none }}{{ documents is none }}", tools=[]) == "TrueTrue"


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26, tzinfo=UTC))
    assert template.render(USER) == "26 Jul 2024"


def test_callers_variables_reach_the_template() -> None:
    source = "{{ bos_token }}{{ enable_thinking is defined and not enable_thinking }}"
    assert render(source) == "<s>False"
    assert render(source, variables={"enable_thinking": False}) == "<s>True"
    with pytest.raises(UsageError, match="'messages'"):
        render(source, variables={"messages": []})


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_images_keep_their_places_among_texts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]
    source = "{% for part in messages[0].content %}{{ part.text or '#' }}{% endfor %}"
    assert render(source, [{"role": "user", "content": parts}]) == "one#two"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image"}, {"type": "audio"}], "'audio'"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "'image_url'"),
        ([{"type": "text"}], "'text'"),
        (["bare"], "'str'"),
        (5, "neither text nor a list"),
    ],
)
def test_other_content_is_refused(content: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        render(CHATML, [{"role": "user", "content": content}])
    assert caught.value.hint


@pytest.mark.parametrize("messages", [[], [{"content": "x"}], [{"role": 1}], ["hi"]])
def test_messages_without_a_role_are_refused(messages: Any) -> None:
    with pytest.raises(UsageError, match=r"no role|no messages"):
        render(CHATML, messages)


KIMI = """\
{%- set earlier, latest = [], [] -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' and not message.tool_calls -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if loop.index0 <= ns.last -%}{%- set _ = earlier.append(message) -%}
  {%- else -%}{%- set _ = latest.append(message) -%}{%- endif -%}
{%- endfor -%}
{%- for message in earlier -%}{{ '-' ~ message.content }}{%- endfor -%}
{%- for message in latest -%}{{ '+' ~ message.content }}{%- endfor -%}
"""


def test_messages_gathered_in_lists_of_the_templates_own() -> None:
    """As Kimi's templates tell what was thought about before from what is still thought about."""
    chat = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "tool")]
    assert render(KIMI, chat) == "-u-a+u+t"
    assert render("{% set x = messages[:1] %}{% set _ = x.append(messages[0]) %}{{ x | length }}") == "2"


def test_what_a_template_is_given_does_not_grow() -> None:
    for source in (
        "{% set _ = messages.append(messages[0]) %}",
        "{% set x = [messages] %}{% set _ = x[0].append(1) %}",
        "{% for m in messages %}{% set _ = m.tool_calls.append(1) %}{% endfor %}",
    ):
        call = {"function": {"name": "f", "arguments": "{}"}}
        with pytest.raises(UsageError, match="cannot change what they are given"):
            render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}])
    for method in ("pop()", "clear()", "extend([1])", "insert(0, 1)"):
        with pytest.raises(UsageError, match="chat template"):
            render(f"{{% set x = [1] %}}{{% set _ = x.{method} %}}")


def test_what_filters_give_is_a_list_to_json() -> None:
    """As R1's templates write tools and calls down."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    written = '[{"name": "one"}, {"name": "two"}]'
    assert render("{{ tools | map(attribute='function') | tojson }}", tools=tools) == written
    nested = "{{ {'tools': tools | map(attribute='function')} | tojson }}"
    assert render(nested, tools=tools) == f'{{"tools": {written}}}'
    assert render("{{ tools | selectattr('none') | tojson }}", tools=tools) == "[]"
    with pytest.raises(UsageError, match="chat template"):
        render("{{ namespace | tojson }}")


def test_tool_arguments_reach_the_template_as_objects() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": [1]}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments.x | tojson }}", [message]) == "[1]"
    call["function"]["arguments"] = "{"
    with pytest.raises(UsageError, match="not JSON"):
        render("", [message])


def test_the_templates_own_words_are_passed_on() -> None:
    with pytest.raises(UsageError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{% include 'other' %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ range(10000000) | list | length }}",
    ],
)
def test_what_a_template_must_not_do_is_a_usage_error(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(UsageError, match="chat template"):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999)|batch(1) %}{% endfor %}{% endfor %}",
        "{% macro two(n) %}{% if n %}{{ two(n-1) }}{{ two(n-1) }}{% endif %}{% endmacro %}{{ two(60) }}",
    ],
)
def test_going_round_in_circles_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 20_000)
    with pytest.raises(UsageError, match="20000 steps"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(2000) %}{{ '0123456789' }}{% endfor %}",
        "{% set n = namespace(s='0123') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='0123') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set s = 'a' * 20000 %}",
        "{% set s = 20000 * [1] %}",
    ],
)
def test_output_without_end_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 10_000)
    with pytest.raises(UsageError, match="10000 characters"):
        render(source)


def test_there_are_no_powers() -> None:
    with pytest.raises(UsageError, match="power"):
        render("{% set n = 9 ** 9 %}")


def test_a_budget_belongs_to_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 150)
    template = ChatTemplate("{% for i in range(100) %}{% endfor %}ok")
    assert [template.render(USER) for _ in range(3)] == ["ok"] * 3


@pytest.mark.parametrize("source", ["{% for %}", "{{ ", "{{ x | no_such_filter }}", "{{" + "(" * 5000])
def test_a_template_that_does_not_compile_is_unsupported(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match="does not compile") as caught:
        ChatTemplate(source)
    assert "raw prompt" in caught.value.hint


def test_a_huge_template_is_unsupported() -> None:
    with pytest.raises(UnsupportedModelError, match="characters"):
        ChatTemplate("x" * (chat_template.MAX_SOURCE_CHARS + 1))


def test_messages_without_bottom_are_a_usage_error() -> None:
    message: dict[str, Any] = {"role": "user", "content": "x"}
    message["self"] = message
    with pytest.raises(UsageError, match="RecursionError"):
        render(CHATML, [message])

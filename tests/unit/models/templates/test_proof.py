"""Which templates may run in the server's own process: those made of nothing but what is metered."""

from __future__ import annotations

from typing import Any

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.models import chat_template
from shardcompute.models.chat_template import ChatTemplate
from shardcompute.models.templates.proof import is_plain

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
)
QWEN = (
    "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{%- endif %}"
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and "
    "not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if '</think>' in message.content %}"
    "{{- message.content.split('</think>')[-1].lstrip('\\n') }}{%- else %}{{- message.content }}{%- endif %}"
    "{%- endfor %}{{- ns.last_query_index }}"
)
PLAIN = {"smollm2": SMOLLM2, "llama3": LLAMA3, "gemma": GEMMA, "qwen": QWEN}
NOT_PLAIN = {
    "a product": "{{ 2 * 3 }}",
    "a quotient": "{{ 6 // 3 }}",
    "a power": "{{ 2 ** 3 }}",
    "a macro": "{% macro m() %}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for i in messages recursive %}{% endfor %}",
    "a range": "{% for i in range(9) %}{% endfor %}",
    "a format": "{{ '%d' | format(1) }}",
    "join": "{{ messages | join(',') }}",
    "replace": "{{ bos_token.replace('a', 'b') }}",
    "ljust": "{{ bos_token.ljust(9) }}",
    "a method by name": "{{ bos_token['ljust'](9) }}",
    "a function by another name": "{% set r = range %}{{ r(9) }}",
    "given arguments": "{{ namespace(*messages) }}",
    "a block that is kept": "{% set x %}{{ bos_token }}{% endset %}",
    "a block": "{% block a %}{% endblock %}",
    "a filter block": "{% filter upper %}a{% endfilter %}",
    "lists in lists": "{% set x = [messages, messages] %}",
    "a list in a dictionary": "{% set x = {'a': messages} %}",
    "a date of any length": "{{ strftime_now(messages[0].content) }}",
    "much text": "x" * 40_000,
    "many parts": "{{a}}" * 5000,
    "deep nesting": "{{ " + "(" * 60 + "1" + ", )" * 60 + " }}",
    "no template": "{% for %}",
}
MESSAGES = [
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "<think>well</think>\nHello"},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize("source", PLAIN.values(), ids=PLAIN)
def test_templates_of_the_field_run_here_and_as_they_would_elsewhere(source: str) -> None:
    assert is_plain(source)
    template = ChatTemplate(source, {"bos_token": "<s>"})
    tools = [{"type": "function", "function": {"name": "f"}}]
    here = template.render(MESSAGES, tools=tools)
    assert template._sandbox._process is None, "a process was started for nothing"
    template._engine = None
    assert template.render(MESSAGES, tools=tools) == here
    assert template._sandbox._process is not None


@pytest.mark.parametrize("source", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_whatever_is_not_metered_is_not_plain(source: str) -> None:
    assert not is_plain(source)


LONG = [{"role": "user", "content": "x" * 100_000}] * 100
METERED = {
    "a search in every round": "{% for m in messages %}{% if 'y' in messages[0].content %}{% endif %}{% endfor %}",
    "a sum in every round": "{% for m in messages %}{% set x = messages[0].content + 'x' %}{% endfor %}",
    "a text in every round": "{% for m in messages %}{% set x = messages[0].content ~ 'x' %}{% endfor %}",
    "a comparison in every round": "{% for m in messages %}{{ m.content == messages[0].content }}{% endfor %}",
    "a cut in every round": "{% for m in messages %}{% set x = messages[0].content[1:] %}{% endfor %}",
    "a split in every round": "{% for m in messages %}{% set x = messages[0].content.split('y') %}{% endfor %}",
    "a filter in every round": "{% for m in messages %}{{ messages[0].content | trim | length }}{% endfor %}",
    "JSON in every round": "{% for m in messages %}{% set x = messages[0] | tojson %}{% endfor %}",
}


@pytest.mark.parametrize("source", METERED.values(), ids=METERED)
def test_what_is_done_to_long_texts_is_paid_for(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_plain(source)
    template = ChatTemplate(source)
    template.render(LONG[:1])
    monkeypatch.setattr(chat_template, "MAX_STEPS", 20_000)
    with pytest.raises(UsageError, match="20000 steps"):
        template.render(LONG)


STRUCTURES: dict[str, tuple[str, Any]] = {
    "structures that are compared": ("{{ messages[0] == messages[1] }}", "True"),
    "a text that is formatted": ("{{ messages[0].content % 5 }}", "x5"),
    "a structure that is written": ("{{ messages[0] }}", "{'role': 'user', 'content': 'x'}"),
    "a structure in a text": ("{{ messages[0] ~ '!' }}", "{'role': 'user', 'content': 'x'}!"),
    "lists that are added": ("{{ (messages + messages) | length }}", "4"),
}


@pytest.mark.parametrize(("source", "expected"), STRUCTURES.values(), ids=STRUCTURES)
def test_what_shows_only_with_its_values_is_done_apart(source: str, expected: str) -> None:
    template = ChatTemplate(source)
    assert template.is_plain
    message = {"role": "user", "content": "x%.0d" if "%" in source else "x"}
    assert template.render([message, message]) == expected
    assert template._sandbox._process is not None

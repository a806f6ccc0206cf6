"""Structured output and calls of tools as the official `openai` package sees them, from a model of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from llguidance import LLParserLimits
from pydantic import BaseModel, ConfigDict, Field

from shardcompute.api import create_app
from shardcompute.decoding.grammar import masks
from support.api.api_server import ApiServer
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import open_alone

openai = pytest.importorskip("openai")

ASK: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "hi"}],
    "logit_bias": dict.fromkeys(("220", "198", "197", "201"), -20),
    "seed": 7,
    "max_tokens": 220,
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}},
]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
)
"""A family of the format of Hermes, in few words: every letter is a token of the tiny model."""
WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    words = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**words, "chat_template": TEMPLATE}))
    with (
        open_alone(folder) as service,
        ApiServer(create_app(service, api_keys=["key"])) as server,
    ):
        yield f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture
def client(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with openai.OpenAI(base_url=url, api_key="key", max_retries=0, timeout=60) as client:
        yield client


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=6)
    mood: Literal["good", "bad"]
    age: int = Field(ge=0, le=120)


def test_answers_are_parsed_into_models(client: Any) -> None:
    completion = client.chat.completions.parse(**ASK, response_format=Person)
    person = completion.choices[0].message.parsed
    assert isinstance(person, Person)
    assert completion.choices[0].finish_reason == "stop"


def test_any_object_and_an_answer_cut_short(client: Any) -> None:
    form = {"type": "json_object"}
    cut = client.chat.completions.create(**{**ASK, "max_tokens": 3}, response_format=form)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content.lstrip().startswith("{")


def test_a_required_call_is_made(client: Any) -> None:
    for choice in ("required", WEATHER):
        completion = client.chat.completions.create(
            **ASK, tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False
        )
        (call,) = completion.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"city", "unit"}
        assert completion.choices[0].finish_reason == "tool_calls"
        assert completion.choices[0].message.content is None


def test_a_streamed_call_comes_name_first_and_adds_up(client: Any) -> None:
    wish = {**ASK, "tools": TOOLS[:1], "tool_choice": WEATHER}
    whole = client.chat.completions.create(**wish).choices[0].message.tool_calls[0].function
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**wish, stream=True)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert chunks[0].delta.role == "assistant"
    assert chunks[0].delta.content is None
    assert (calls[0].index, calls[0].type, calls[0].function.name) == (0, "function", "weather")
    assert calls[0].id.startswith("call_")
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    # Several pieces, each of as many tokens as came at once.
    assert len(calls) > 2
    assert "".join(call.function.arguments for call in calls) == whole.arguments
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_the_client_follows_a_stream_of_calls(client: Any) -> None:
    tools = [openai.pydantic_function_tool(Person, name="person")]
    with client.chat.completions.stream(
        **ASK, tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as s:
        done = [event for event in s if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["person"]
    assert isinstance(done[0].parsed_arguments, Person)


def test_the_model_may_talk_instead(client: Any) -> None:
    completion = client.chat.completions.create(**{**ASK, "max_tokens": 20}, tools=TOOLS)
    assert completion.choices[0].message.tool_calls is None
    assert completion.choices[0].message.content


def test_results_are_given_back(client: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
    history = [
        *ASK["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["sunny"]}}}
    wish = {**ASK, "messages": history, "tool_choice": "none"}
    answer = client.chat.completions.create(**wish, tools=TOOLS, response_format=form)
    assert answer.choices[0].message.content == '"sunny"'


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
            "response_format",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"extra_body": {"guided_regex": "["}}, "guided_regex"),
    ],
)
def test_what_cannot_be_enforced_is_refused_at_once(client: Any, wish: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, **wish)
    assert caught.value.param == param


def test_other_servers_names_for_the_same(client: Any) -> None:
    wishes: list[tuple[dict[str, Any], set[str]]] = [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"a"}),
        ({"structured_outputs": {"regex": "b{2}"}}, {"bb"}),
        ({"guided_json": {"const": 5}}, {"5"}),
    ]
    for wish, expected in wishes:
        completion = client.chat.completions.create(**ASK, extra_body=wish)
        assert completion.choices[0].message.content in expected
        text = client.completions.create(model="default", prompt="x", max_tokens=20, seed=1, extra_body=wish)
        assert text.choices[0].text in expected


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_grammar_breaks_off_is_an_error(
    client: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(masks, "_limits", lambda: LLParserLimits(max_lexer_states=60))
    wish = {"guided_regex": f"(.*[ -~].{{40}}){{{5 + stream}}}"}  # one that was not compiled before
    with pytest.raises(openai.APIError, match="broken off before its form was complete") as caught:
        for _ in client.chat.completions.create(**ASK, stream=stream, extra_body=wish):
            pass
    assert caught.value.code == "grammar_too_complex"

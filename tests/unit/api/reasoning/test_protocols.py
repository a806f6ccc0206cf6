"""Thinking in every protocol: asked for, streamed, whole, and given back with the conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette

from shardcompute.models.vocabulary import Vocabulary

TEMPLATE = "{{ tools }} {{ messages }} <tool_call> <think> {{ enable_thinking }}"
SAID = ("<think>\nLet me ", "see.\n</thi", "nk>\n\nYes", ".")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def thinks(service: Any, fakes: Any) -> None:
    known = fakes.VOCABULARY
    tokens = Vocabulary((*known.tokens, b"<think>", b"</think>"), known.special_ids, known.eos_ids)
    service.text_codec = fakes.ByteCodec(template=TEMPLATE, tokens=tokens)
    service.script = fakes.say(*SAID)


def prompt_of(service: Any) -> str:
    return bytes(service.requests[-1].prompt).decode()


def test_chat_whole(chat: Any) -> None:
    reply = chat().json()
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"]) == ("Let me see.", "Let me see.")
    assert message["content"] == "Yes."
    thought = len("<think>\nLet me see.\n</think>\n\n")
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


def test_chat_streamed(chat: Any, fakes: Any) -> None:
    chunks = fakes.events(chat(stream=True, stream_options={"include_usage": True}).text)[:-1]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 30


def test_a_thought_that_the_prompt_opened(chat: Any, service: Any, fakes: Any) -> None:
    service.text_codec.opening = "a:<think>\n"
    service.script = fakes.say("Hm.", "</think>Yes.")
    message = chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")


def test_a_prompt_that_ended_thinking_leaves_text_alone(chat: Any, service: Any) -> None:
    service.text_codec.opening = "a:<think>\n\n</think>\n\n"
    assert chat().json()["choices"][0]["message"]["content"] == "".join(SAID)


def test_a_thought_that_was_cut(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("<think>Hm. </th", finish="length")
    choice = chat().json()["choices"][0]
    assert choice["message"]["content"] is None
    assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Hm.", "length")


def test_calls_follow_thinking(chat: Any, service: Any, fakes: Any) -> None:
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    service.script = fakes.say("<think>Hm.</think>\n\n", called)
    tool = {"type": "function", "function": {"name": "weather", "parameters": fakes.WEATHER}}
    choice = chat(tools=[tool]).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choice["finish_reason"] == "tool_calls"


def test_variables_and_efforts_reach_the_template(chat: Any, service: Any) -> None:
    assert chat(chat_template_kwargs={"enable_thinking": False, "x": 3}).status_code == 200
    assert prompt_of(service) == "enable_thinking=False;x=3;u:hi;a:"
    assert chat(reasoning_effort="minimal").status_code == 200
    assert prompt_of(service) == "enable_thinking=False;reasoning_effort=minimal;u:hi;a:"
    refused = chat(chat_template_kwargs={"messages": []})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"
    assert chat(reasoning_effort="enormous").status_code == 400


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_thoughts_reach_the_template(chat: Any, service: Any, name: str) -> None:
    before = {"role": "assistant", "content": "Yes.", name: "hm"}
    assert chat(messages=[*HI, before, *HI]).status_code == 200
    assert prompt_of(service) == "u:hi;a:(hm)Yes.;u:hi;a:"


def test_responses_whole(app: Starlette, call: Any) -> None:
    reply = call(app, "POST", "/v1/responses", json={"input": "hi"}).json()
    thought, message = reply["output"]
    assert thought["type"] == "reasoning"
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "Yes."
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 30}


def test_responses_streamed_and_gone_on_with(app: Starlette, call: Any, fakes: Any, service: Any) -> None:
    body = {"input": "hi", "stream": True, "reasoning": {"effort": "none"}}
    events = fakes.named_events(call(app, "POST", "/v1/responses", json=body).text)
    assert prompt_of(service).startswith("enable_thinking=False;reasoning_effort=none;")
    names = [name for name, _ in events]
    assert names[2:4] == ["response.output_item.added", "response.content_part.added"]
    deltas = [data["delta"] for name, data in events if name == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Let me see."
    assert names.count("response.output_item.done") == 2
    done = events[-1][1]["response"]
    assert [item["type"] for item in done["output"]] == ["reasoning", "message"]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    again = {"input": "go on", "previous_response_id": done["id"]}
    assert call(app, "POST", "/v1/responses", json=again).status_code == 200
    assert prompt_of(service) == "u:hi;a:(Let me see.)Yes.;u:go on;a:"


def messages_body(**fields: Any) -> dict[str, Any]:
    return {"model": "org/tiny", "max_tokens": 50, "messages": HI, **fields}


def test_messages_whole(app: Starlette, call: Any, service: Any) -> None:
    asked = messages_body(thinking={"type": "disabled"})
    reply = call(app, "POST", "/v1/messages", json=asked).json()
    thought, text = reply["content"]
    assert (thought["type"], thought["thinking"], bool(thought["signature"])) == (
        "thinking",
        "Let me see.",
        True,
    )
    assert text == {"type": "text", "text": "Yes."}
    assert prompt_of(service) == "enable_thinking=False;u:hi;a:"


def test_messages_streamed(app: Starlette, call: Any, fakes: Any) -> None:
    whole = call(app, "POST", "/v1/messages", json=messages_body()).json()["content"]
    events = fakes.named_events(call(app, "POST", "/v1/messages", json=messages_body(stream=True)).text)
    starts = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert starts == ["thinking", "text"]
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Let me see."
    assert [d["signature"] for d in deltas if d["type"] == "signature_delta"] == [whole[0]["signature"]]
    assert "".join(delta.get("text", "") for delta in deltas) == "Yes."
    assert [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1]


@pytest.mark.parametrize(("path", "key"), [("/api/chat", "messages"), ("/api/generate", "prompt")])
def test_ollama(app: Starlette, call: Any, service: Any, path: str, key: str) -> None:
    asked = {"model": "org/tiny", key: HI if key == "messages" else "hi", "think": False}
    lines = [json.loads(line) for line in call(app, "POST", path, json=asked).text.splitlines()]
    said = [line["message"] if key == "messages" else line for line in lines]
    assert "".join(each.get("thinking", "") for each in said) == "Let me see."
    text = "content" if key == "messages" else "response"
    assert "".join(each[text] for each in said) == "Yes."
    assert prompt_of(service) == "enable_thinking=False;u:hi;a:"
    whole = call(app, "POST", path, json={**asked, "stream": False, "think": "high"}).json()
    assert (whole["message"] if key == "messages" else whole)["thinking"] == "Let me see."
    assert prompt_of(service) == "enable_thinking=True;reasoning_effort=high;u:hi;a:"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "thinking_budget": 7}),
        ("/v1/chat/completions", {"messages": HI, "max_thinking_tokens": 7}),
        ("/v1/responses", {"input": "hi", "thinking_budget": 7}),
        ("/v1/messages", messages_body(thinking={"type": "enabled", "budget_tokens": 7})),
    ],
)
def test_budgets_are_held_to(app: Starlette, call: Any, service: Any, path: str, body: Any) -> None:
    assert call(app, "POST", path, json=body).status_code == 200
    assert "max_tokens=7" in service.requests[-1].sampling.grammar.text


def test_a_form_leaves_room_for_thinking(chat: Any, service: Any) -> None:
    assert chat(guided_choice=["Yes."]).status_code == 200
    assert "thought" in service.requests[-1].sampling.grammar.text
    assert chat(guided_choice=["Yes."], thinking_budget=3, ignore_eos=True).status_code == 400
    service.text_codec.opening = "a:<think></think>"
    assert chat(guided_choice=["Yes."], thinking_budget=3).status_code == 200
    assert service.requests[-1].sampling.grammar.kind == "choice"


@pytest.fixture
def channels(service: Any, fakes: Any) -> None:
    service.text_codec = fakes.ByteCodec(template="{{ tools }}<|channel|><|message|>{{ reasoning_effort }}")


@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize("has_tools", [True, False])
def test_channels_of_gpt_oss(chat: Any, service: Any, fakes: Any, has_tools: bool) -> None:
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    service.script = fakes.say(*said)
    tool = {"type": "function", "function": {"name": "weather", "parameters": fakes.WEATHER}}
    reply = chat(reasoning_effort="high", **({"tools": [tool]} if has_tools else {})).json()
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert "reasoning_effort=high" in prompt_of(service)


@pytest.mark.usefixtures("channels")
def test_calls_on_a_channel(app: Starlette, call: Any, service: Any, fakes: Any) -> None:
    head = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    service.script = fakes.say(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", head, '{"city": "Rome"}'
    )
    tools = [{"name": "weather", "input_schema": fakes.WEATHER}]
    reply = call(app, "POST", "/v1/messages", json=messages_body(tools=tools)).json()
    assert [block["type"] for block in reply["content"]] == ["thinking", "tool_use"]
    assert reply["content"][1]["input"] == {"city": "Rome"}
    assert reply["stop_reason"] == "tool_use"

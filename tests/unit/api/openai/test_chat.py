from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardcompute.core.generation import Grammar, Interruption
from shardcompute.decoding import compiler_of, derive_seed

CALLING = ("<tool_", 'call>\n{"name": "f", "argu', 'ments": {"a": ', "1}}\n</tool_call>")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

NOTHING_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


def test_answers_a_message(chat: Any, service: Any) -> None:
    response = chat()
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "org/tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12} | NOTHING_CACHED
    assert (
        body["timings"].items()
        >= {
            "queue_s": 0.5,
            "prefill_s": 2.0,
            "decode_s": 1.0,
            "prompt_tokens": 4,
            "generated_tokens": 3,
            "prefill_tokens_per_s": 2.0,
            "decode_tokens_per_s": 2.0,
        }.items()
    )
    assert bytes(service.requests[0].prompt) == b"u:hi;a:"


def test_what_was_waited_for_is_told_where_it_happened_and_at_the_end(
    chat: Any, service: Any, fakes: Any
) -> None:
    told = Interruption(("attic",), ("cellar",), 1.5, 3)
    first, second, last = fakes.say("Hel", "lo")
    service.script = [first, replace(second, interruption=told), last]
    expected = [{"lost": ["attic"], "taken_over_by": ["cellar"], "pause_s": 1.5, "after_tokens": 3}]
    assert chat().json()["interruptions"] == expected
    lines = [line[6:] for line in chat(stream=True).text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    with_it = [chunk for chunk in chunks if "interruptions" in chunk]
    assert [(chunk["choices"][0]["delta"], chunk["interruptions"]) for chunk in with_it] == [
        ({"content": "lo"}, expected)
    ]
    service.script = fakes.say("Hello")
    assert "interruptions" not in chat().json()


def test_a_cut_answer_goes_on_where_it_was(chat: Any, service: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}]
    assert chat(messages=messages, continue_final_message=True).status_code == 200
    assert bytes(service.requests[0].prompt) == b"u:hi;a:Once upon"
    for wrong in (messages[:1], messages[1:], [*messages[:1], {"role": "assistant", "content": ""}]):
        response = chat(messages=wrong, continue_final_message=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")


def test_defaults_are_openais(chat: Any, service: Any, fakes: Any) -> None:
    chat()
    request = service.requests[0]
    assert request.max_tokens == fakes.MODEL.context_length - len(request.prompt)
    assert request.stop_ids == {fakes.EOS}
    assert request.stop == ()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.repetition_penalty == 1.0
    assert sampling.logprobs is None
    assert request.prompt_logprobs is None


def test_parameters_reach_the_request(chat: Any, service: Any, fakes: Any) -> None:
    response = chat(
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        max_completion_tokens=9,
        stop=["x", "y"],
        stop_token_ids=[65],
        include_stop_str_in_output=True,
        seed=-3,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"65": -100},
        logprobs=True,
        top_logprobs=4,
        user="me",
    )
    assert response.status_code == 200
    request = service.requests[0]
    sampling = request.sampling
    assert request.max_tokens == 9
    assert request.stop == ("x", "y")
    assert request.stop_ids == {65, fakes.EOS}
    assert request.include_stop
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, dict(sampling.logit_bias)) == (1.5, {65: -100})
    assert (sampling.seed, sampling.logprobs) == (-3, 4)


def test_ignore_eos_leaves_no_silent_end(chat: Any, service: Any) -> None:
    chat(ignore_eos=True)
    assert service.requests[0].stop_ids == frozenset()


def test_a_single_stop_and_minus_one_top_k(chat: Any, service: Any) -> None:
    chat(stop="end", top_k=-1)
    assert service.requests[0].stop == ("end",)
    assert service.requests[0].sampling.top_k == 0


def test_the_server_draws_a_seed_when_none_is_given(chat: Any, service: Any) -> None:
    for _ in range(3):
        chat()
    seeds = {request.sampling.seed for request in service.requests}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_n_choices_have_derived_seeds_and_own_indices(chat: Any, service: Any, fakes: Any) -> None:
    service.scripts = {1: fakes.say("Bye", finish="length")}
    body = chat(n=2, seed=5).json()
    assert [request.sampling.seed for request in service.requests] == [5, derive_seed(5, 1)]
    shown = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]]
    assert shown == [(0, "Hello", "stop"), (1, "Bye", "length")]
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 8, "total_tokens": 15} | NOTHING_CACHED


def test_logprobs_have_tokens_bytes_and_alternatives(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("é")
    content = chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["logprob"] == -0.5
    assert content[0]["token"] == "\ufffd"
    assert content[0]["top_logprobs"][1] == {"token": "z", "logprob": -9999.0, "bytes": [122]}


def test_messages_become_plain(chat: Any, service: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    assert chat(messages=messages).status_code == 200
    assert bytes(service.requests[0].prompt) == b"s:d;u:a\nb;a:;t:t;a:"


def test_the_generation_prompt_can_be_left_out(chat: Any, service: Any) -> None:
    chat(add_generation_prompt=False)
    assert bytes(service.requests[0].prompt) == b"u:hi;"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"guided_grammar": "x"}, "guided_grammar"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"max_new_tokens": 3}, "max_new_tokens"),
        ({"stop_sequences": ["x"]}, "stop_sequences"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_we_cannot_do_is_refused(chat: Any, service: Any, fields: dict[str, Any], param: str) -> None:
    response = chat(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert error["type"] == "invalid_request_error"
    assert service.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": []},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"min_tokens": 0, "repeat_penalty": 1.0},
        {"guided_json": None},
        {"store": True, "metadata": {"a": "b"}, "no_such_thing": [1]},
        {"temperature": None, "stop": None, "stream": None, "seed": None, "logit_bias": None},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"top_p": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"reasoning_effort": "low", "verbosity": "low", "service_tier": "auto", "user": "u"},
        {
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "prediction": {"type": "content", "content": "x"},
        },
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
    ],
)
def test_what_changes_nothing_is_accepted(chat: Any, fields: dict[str, Any]) -> None:
    assert chat(**fields).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": True}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 3}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"hello": 1}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "x" * (1 << 19)}, "guided_regex"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["x"], "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs"),
        ({"messages": "hi"}, "messages"),
        ({"model": 5}, "model"),
    ],
)
def test_wrong_values_are_named(chat: Any, service: Any, fields: dict[str, Any], param: str) -> None:
    response = chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert error["message"]
    assert service.requests == []


def test_a_prompt_without_room_is_refused(chat: Any, service: Any) -> None:
    response = chat(messages=[{"role": "user", "content": "x" * 70}])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    response = chat(max_tokens=60)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert service.requests == []


def test_the_model_may_be_left_out_when_there_is_one(chat: Any, service: Any, fakes: Any) -> None:
    assert chat(model=None).json()["model"] == "org/tiny"
    service.served = (fakes.MODEL, fakes.served("other"))
    response = chat(model=None)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"


def test_an_unknown_model_is_404(chat: Any) -> None:
    response = chat(model="gpt-4")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "org/tiny" in error["message"]


def test_a_long_prompt_is_encoded_all_the_same(chat: Any, service: Any, fakes: Any) -> None:
    service.served = (fakes.served("org/tiny", 100_000),)
    assert chat(messages=[{"role": "user", "content": "x" * 50_000}]).status_code == 200
    assert len(service.requests[0].prompt) == 50_005


def test_a_form_becomes_a_grammar_of_every_choice(chat: Any, service: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert chat(response_format=form, n=2).status_code == 200
    grammars = {request.sampling.grammar for request in service.requests}
    assert grammars == {Grammar("json_schema", json.dumps(schema))}


def test_a_refused_schema_generates_nothing(chat: Any, service: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}
    error = chat(response_format=form).json()["error"]
    assert "Invalid type: foo" in error["message"]
    assert service.requests == []


def test_tools_that_are_not_wholly_enforced_are_named(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say(*CALLING)
    odd = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?=a)b$"}}}
    named = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    for stream in (False, True):
        answered = chat(tools=[TOOL, named], stream=stream)
        assert answered.headers["x-shardcompute-unenforced-tools"] == "odd"
    assert "x-shardcompute-unenforced-tools" not in chat(tools=[TOOL]).headers


def test_a_tool_that_cannot_be_enforced_is_refused_by_name(chat: Any, service: Any) -> None:
    broken = {"type": "object", "properties": {"x": {"type": "foo"}}}
    error = chat(tools=[TOOL, {"type": "function", "function": {"name": "g", "parameters": broken}}]).json()[
        "error"
    ]
    assert error["param"] == "tools"
    assert "'g'" in error["message"]
    listed = {"type": "function", "function": {"name": "g", "parameters": {"type": "array"}}}
    assert chat(tools=[listed]).json()["error"]["param"] == "tools[0].function.parameters"
    assert service.requests == []


def test_an_answer_that_calls_becomes_calls(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("Hm. ", *CALLING)
    choice = chat(tools=[TOOL]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Hm."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (call["type"], call["id"][:5]) == ("function", "call_")


def test_calls_are_text_where_there_are_no_tools(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say(*CALLING)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = chat(**fields).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == "".join(CALLING)


def test_a_second_call_is_left_out_where_one_was_asked_for(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say(*CALLING, "\n", *CALLING)
    for is_parallel, count in ((True, 2), (False, 1)):
        message = chat(tools=[TOOL], parallel_tool_calls=is_parallel).json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == count
        assert len({call["id"] for call in message["tool_calls"]}) == count


def test_calls_cut_short_end_by_length(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say(*CALLING[:3], finish="length")
    choice = chat(tools=[TOOL]).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_calls_are_streamed_name_first(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say(*CALLING, "\n", *CALLING)
    lines = chat(tools=[TOOL], stream=True, logprobs=True).text.split("\n\n")
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 0, 0, 1, 1, 1]
    assert [("id" in call, call["function"].get("name")) for call in calls[:3]] == [
        (True, "f"),
        (False, None),
        (False, None),
    ]
    assert "".join(call["function"]["arguments"] for call in calls[:3]) == '{"a": 1}'
    assert choices[-1]["finish_reason"] == "tool_calls"
    # Every token has its log-probability in some chunk, once.
    tokens = [token for choice in choices for token in (choice["logprobs"] or {"content": []})["content"]]
    assert len(tokens) == 2 * len("".join(CALLING)) + 1


def test_a_required_call_is_held_to_the_tools(chat: Any, service: Any) -> None:
    assert chat(tools=[TOOL], tool_choice="required").status_code == 200
    assert bytes(service.requests[0].prompt) == b"[f]u:hi;a:"
    grammar = service.requests[0].sampling.grammar
    assert grammar is not None
    assert "f" in grammar.text


def test_tools_and_a_form_leave_both_ways_open(chat: Any, service: Any) -> None:
    chat(tools=[TOOL], response_format={"type": "json_object"})
    grammar = service.requests[0].sampling.grammar
    for text in (b'{"a": 1}', "".join(CALLING).encode()):
        state = compiler_of(service.codec("org/tiny").vocabulary()).start(grammar)
        state.extend(list(text))
        logits = np.zeros(300, dtype=np.float32)
        assert state.mask(logits)[256] == 0.0

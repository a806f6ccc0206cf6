from __future__ import annotations

from typing import Any

import pytest

NOTHING_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


def test_continues_a_text(complete: Any, service: Any, fakes: Any) -> None:
    body = complete().json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8} | NOTHING_CACHED
    assert body["timings"]["decode_s"] == 1.0
    assert service.requests[0].prompt == (fakes.BOS, ord("h"), ord("i"))
    assert service.requests[0].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [(257, 97)]),
        (["a", "b"], [(257, 97), (257, 98)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_every_form_of_prompt(complete: Any, service: Any, prompt: Any, prompts: list[Any]) -> None:
    body = complete(prompt=prompt).json()
    assert [request.prompt for request in service.requests] == prompts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(prompts)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_choices_are_grouped_by_prompt(complete: Any, service: Any) -> None:
    body = complete(prompt=["a", "bc"], n=2, best_of=2, echo=True, seed=1).json()
    assert [request.prompt for request in service.requests] == [
        (257, 97),
        (257, 97),
        (257, 98, 99),
        (257, 98, 99),
    ]
    assert [choice["text"] for choice in body["choices"]] == ["aHello", "aHello", "bcHello", "bcHello"]
    assert body["usage"]["prompt_tokens"] == 5
    seeds = [request.sampling.seed for request in service.requests]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_prompts_get_own_seeds_when_none_is_given(complete: Any, service: Any) -> None:
    complete(prompt=["a", "a"])
    first, second = service.requests
    assert first.sampling.seed != second.sampling.seed


def test_logprobs_are_parallel_lists(complete: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("aé", "b")
    logprobs = complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert service.requests[0].sampling.logprobs == 1
    assert service.requests[0].prompt_logprobs is None
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "z": -9999.0}
    assert logprobs["text_offset"] == [0, 1, 1, 2]


def test_echo_with_logprobs_scores_the_prompt(complete: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("x")
    choice = complete(prompt="hi", echo=True, logprobs=0).json()["choices"][0]
    assert service.requests[0].prompt_logprobs == 0
    assert choice["text"] == "hix"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<bos>", "h", "i", "x"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 0, 1, 2]


def test_echo_of_ids_is_their_text(complete: Any) -> None:
    assert complete(prompt=[104, 105], echo=True).json()["choices"][0]["text"] == "hiHello"


def test_scoring_a_prompt_alone(complete: Any, service: Any) -> None:
    body = complete(echo=True, logprobs=1, max_tokens=0).json()
    assert service.requests[0].max_tokens == 1
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["tokens"] == ["<bos>", "h", "i"]
    assert body["usage"]["completion_tokens"] == 0


def test_streams_echo_text_and_end(complete: Any, service: Any, fakes: Any) -> None:
    response = complete(stream=True, echo=True, logprobs=0)
    *chunks, done = fakes.events(response.text)
    assert done == "[DONE]"
    shown = [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert shown == [("hiHel", None), ("lo", None), ("", "stop")]
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks[:2]]
    assert offsets == [[0, 0, 1, 2, 3, 4], [5, 6]]
    assert all(c["object"] == "text_completion" for c in chunks)
    assert "usage" not in chunks[0]
    assert chunks[-1]["timings"]["generated_tokens"] == 3
    assert "timings" not in chunks[0]


def test_a_stream_of_several_prompts_keeps_their_indices(complete: Any, service: Any, fakes: Any) -> None:
    service.scripts = {1: fakes.say("Bye")}
    response = complete(prompt=["a", "b"], stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = fakes.events(response.text)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert chunk["usage"] is None
    assert texts == {0: "Hello", 1: "Bye"}
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12} | NOTHING_CACHED
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": [97, 258]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_wrong_values_are_named(complete: Any, service: Any, fields: dict[str, Any], param: str) -> None:
    response = complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)
    assert service.requests == []


def test_an_empty_prompt_is_refused(complete: Any, service: Any, monkeypatch: Any, fakes: Any) -> None:
    monkeypatch.setattr(fakes.ByteCodec, "encode", lambda self, text, **options: [])
    response = complete(prompt="")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"

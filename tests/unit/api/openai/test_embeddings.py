from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

PATH = "/v1/embeddings"


@pytest.fixture
def post(app: Any, call: Any) -> Any:
    return lambda **fields: call(app, "POST", PATH, json={"model": "org/tiny", **fields})


def near(vector: list[float]) -> Any:
    return pytest.approx(vector, abs=1e-6)


def test_vectors_of_texts(post: Any, service: Any) -> None:
    body = post(input=["hi", "you"]).json()
    assert (body["object"], body["model"]) == ("list", "org/tiny")
    assert [(each["object"], each["index"]) for each in body["data"]] == [("embedding", 0), ("embedding", 1)]
    assert body["data"][0]["embedding"] == near([0.6, 0.8])
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [request.prompt for request in service.requests] == [(257, *b"hi"), (257, *b"you")]
    assert all(request.max_tokens == 1 and request.sampling.wants_hidden for request in service.requests)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", [(257, 104, 105)]),
        ([104, 105], [(104, 105)]),
        ([[104], [105, 104]], [(104,), (105, 104)]),
    ],
)
def test_kinds_of_input(post: Any, service: Any, given: Any, prompts: Any) -> None:
    assert len(post(input=given).json()["data"]) == len(prompts)
    assert [request.prompt for request in service.requests] == prompts


def test_base64_holds_the_same_numbers(post: Any) -> None:
    packed = post(input="hi", encoding_format="base64").json()["data"][0]["embedding"]
    plain = post(input="hi", encoding_format="float").json()["data"][0]["embedding"]
    assert list(struct.unpack("<2f", base64.b64decode(packed))) == plain


def test_many_inputs_take_turns_and_keep_their_order(post: Any, service: Any) -> None:
    assert len(post(input=[[index] for index in range(100)]).json()["data"]) == 100
    assert sorted(request.prompt for request in service.requests) == [(index,) for index in range(100)]
    assert service.opened == service.closed == 100


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [9999]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x", "dimensions": 8}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x" * 64}, "input"),
    ],
)
def test_what_is_refused(post: Any, service: Any, wrong: Any, param: str) -> None:
    response = post(**wrong)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert service.opened == 0


@pytest.mark.parametrize("hidden", [b"", b"abc", struct.pack("<2f", 0, 0), struct.pack("<f", float("nan"))])
def test_a_machine_that_gives_nonsense(post: Any, service: Any, hidden: bytes) -> None:
    service.hidden = hidden
    assert post(input="x").status_code == 500


def test_ollamas_shapes(app: Any, call: Any, service: Any) -> None:
    body = call(app, "POST", "/api/embed", json={"model": "org/tiny", "input": ["hi", "you"]}).json()
    assert body["embeddings"] == [near([0.6, 0.8])] * 2
    assert (body["model"], body["prompt_eval_count"]) == ("org/tiny", 7)
    body = call(app, "POST", "/api/embeddings", json={"model": "org/tiny", "prompt": "hi"}).json()
    assert body == {"embedding": near([0.6, 0.8])}
    assert call(app, "POST", "/api/embeddings", json={"prompt": ""}).json() == {"embedding": []}


def test_ollama_cuts_what_is_too_long(app: Any, call: Any, service: Any) -> None:
    long = {"input": "x" * 100}
    assert call(app, "POST", "/api/embed", json=long).status_code == 200
    assert len(service.requests[0].prompt) == 63
    response = call(app, "POST", "/api/embed", json={**long, "truncate": False})
    assert response.status_code == 400
    assert "101 tokens" in response.json()["error"]
    assert call(app, "POST", "/api/embed", json={**long, "dimensions": 3}).status_code == 400


def test_tokenizer_info(app: Any, call: Any, fakes: Any) -> None:
    assert call(app, "GET", "/tokenizer_info").json() == {
        "tokenizer_class": "shardcompute",
        "model_max_length": 64,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": fakes.ByteCodec().chat_template_source(),
    }
    assert call(app, "GET", "/tokenizer_info?model=nope").status_code == 404

"""Images in every protocol: shown to models that see, refused by name where they cannot be."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from shardcompute.api import Limits, create_app
from shardcompute.api.images import showing, sources
from support.pictures import EYES, ROW_ID, data_url_of, image_file

RED, BLUE = image_file(), image_file(color=(0, 0, 255))
RED_URL = data_url_of(RED)
RED_TEXT = base64.b64encode(RED).decode()


@pytest.fixture
def seeing(fakes: Any) -> Any:
    class SeeingCodec(fakes.ByteCodec):  # type: ignore[misc, name-defined]
        def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
            return super().render_chat(
                [{**message, "content": self.written(message["content"])} for message in messages], **options
            )

        def written(self, content: Any) -> str:
            if isinstance(content, str):
                return content
            return "".join("<image>" if part["type"] == "image" else part["text"] for part in content)

        def encode_rendered(self, rendered: str, *, context_length: int | None = None) -> list[int]:
            return [ROW_ID if letter == EYES.prompt.row else ord(letter) for letter in rendered]

    model = replace(fakes.served("org/eyes", 200), vision=EYES)
    return fakes.FakeService(served=(model,), text_codec=SeeingCodec())


def chat_body(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image_part(url: Any = RED_URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


SAID = {"type": "text", "text": "What is it?"}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat_body(image_part(), SAID)),
    "chat, bare": ("/v1/chat/completions", chat_body({"type": "image_url", "image_url": RED_URL}, SAID)),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": RED_URL, "detail": "auto"},
                        {"type": "input_text", "text": "What is it?"},
                    ],
                }
            ]
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": RED_TEXT},
                        },
                        SAID,
                    ],
                }
            ],
        },
    ),
    "ollama chat": (
        "/api/chat",
        {"stream": False, "messages": [{"role": "user", "content": "What is it?", "images": [RED_TEXT]}]},
    ),
    "ollama generate": ("/api/generate", {"stream": False, "prompt": "What is it?", "images": [RED_TEXT]}),
}


def posted(call: Any, service: Any, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
    response: httpx.Response = call(create_app(service, **options), "POST", path, json=body)
    return response


def message_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("name", REQUESTS)
def test_every_protocol_shows_images(call: Any, seeing: Any, name: str) -> None:
    response = posted(call, seeing, *REQUESTS[name])
    assert response.status_code == 200, response.text
    [request] = seeing.requests
    [picture] = request.pictures
    assert bytes(request.prompt[: picture.span.start]) == b"u:["
    assert request.prompt[3:7] == (ROW_ID,) * 4
    assert bytes(request.prompt[7:]) == b"]What is it?;a:"
    assert (picture.span.start, picture.span.count, picture.span.grid) == (3, 4, (1, 2, 2))
    assert picture.patches == (b"\xff" * 4 + b"\0" * 8) * 4


@pytest.mark.parametrize("name", REQUESTS)
def test_a_model_that_does_not_see_says_so(call: Any, service: Any, name: str) -> None:
    response = posted(call, service, *REQUESTS[name])
    assert response.status_code == 400
    assert "'org/tiny' does not see images" in message_of(response)
    assert not service.requests


@pytest.mark.parametrize(
    ("name", "param"),
    [
        ("chat", "messages[0].content[0]"),
        ("responses", "input[0].content[0]"),
        ("messages", "messages[0].content[0]"),
        ("ollama chat", "messages[0].images[0]"),
        ("ollama generate", "images[0]"),
    ],
)
def test_images_are_called_what_their_protocol_calls_them(
    call: Any, service: Any, name: str, param: str
) -> None:
    path, body = REQUESTS[name]
    system = {"messages": {"system": "Be brief."}, "responses": {"instructions": "Be brief."}}.get(name, {})
    assert message_of(posted(call, service, path, {**body, **system})).startswith(f"{param}: the model")


def test_the_refusal_names_a_model_that_sees(call: Any, fakes: Any, seeing: Any) -> None:
    seeing.served = (fakes.MODEL, *seeing.served)
    response = posted(call, seeing, "/v1/chat/completions", {"model": "org/tiny", **chat_body(image_part())})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0]"
    assert "org/eyes" in message_of(response)


def test_image_tokens_are_counted(call: Any, seeing: Any) -> None:
    usage = posted(call, seeing, *REQUESTS["chat"]).json()["usage"]
    assert usage["prompt_tokens"] == len("u:[....]What is it?;a:")
    count = {key: value for key, value in REQUESTS["messages"][1].items() if key != "max_tokens"}
    response = posted(call, seeing, "/v1/messages/count_tokens", count)
    assert response.json() == {"input_tokens": usage["prompt_tokens"]}


def test_several_images_keep_their_order(call: Any, seeing: Any) -> None:
    body = {
        "messages": [
            {
                "role": "user",
                "content": [image_part(), {"type": "text", "text": "or"}, image_part(data_url_of(BLUE))],
            },
            {"role": "assistant", "content": "Hm."},
            {"role": "user", "content": [{"type": "text", "text": "and"}, image_part()]},
        ]
    }
    assert posted(call, seeing, "/v1/chat/completions", body).status_code == 200
    [request] = seeing.requests
    first, second, third = request.pictures
    assert first.digest == third.digest != second.digest
    for each in request.pictures:
        assert request.prompt[each.span.start : each.span.stop] == (ROW_ID,) * 4


def test_typed_marks_are_words(call: Any, seeing: Any) -> None:
    body = chat_body({"type": "text", "text": "<image>"}, image_part())
    assert posted(call, seeing, "/v1/chat/completions", body).status_code == 200
    [request] = seeing.requests
    [picture] = request.pictures
    assert bytes(request.prompt[: picture.span.start]) == b"u:<image>["


def test_each_choice_sees_the_same_picture(call: Any, seeing: Any) -> None:
    path, body = REQUESTS["chat"]
    assert posted(call, seeing, path, {**body, "n": 2}).status_code == 200
    one, other = seeing.requests
    assert one.pictures[0] is other.pictures[0]


def test_a_kept_response_remembers_its_image(call: Any, seeing: Any) -> None:
    app = create_app(seeing)
    path, body = REQUESTS["responses"]
    first = call(app, "POST", path, json=body).json()
    follow = {"input": "And why?", "previous_response_id": first["id"]}
    assert call(app, "POST", path, json=follow).status_code == 200
    assert seeing.requests[1].pictures[0].digest == seeing.requests[0].pictures[0].digest


def test_a_result_of_a_tool_may_be_an_image(call: Any, seeing: Any) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED_TEXT}}
    body = {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "Look!"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image]}]},
        ],
    }
    assert posted(call, seeing, "/v1/messages", body).status_code == 200
    assert len(seeing.requests[0].pictures) == 1


def test_images_beside_tools_that_the_template_does_not_know(call: Any, seeing: Any) -> None:
    seeing.text_codec.template = "{{ messages }}"
    seeing.served = (replace(seeing.served[0], context_length=4000),)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {**REQUESTS["chat"][1], "tools": [tool]}
    assert posted(call, seeing, "/v1/chat/completions", body).status_code == 200
    assert len(seeing.requests[-1].pictures) == 1


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,!!!", "base64 is broken"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png,abc", "not base64"),
        ("data:audio/wav;base64,AAAA", "type 'audio/wav'"),
        (data_url_of(b"GIF89a nothing"), "cannot be"),
        ("http://127.0.0.1/a.png", "not fetched"),
        ("https://pictures.example/a.png", "not fetched"),
        ("file:///etc/passwd", "none of data"),
        ("/etc/passwd", "none of data"),
    ],
)
def test_what_is_no_image_is_refused_by_name(call: Any, seeing: Any, url: str, says: str) -> None:
    response = posted(call, seeing, "/v1/chat/completions", chat_body(SAID, image_part(url)))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert says in error["message"]
    assert error["param"] == "messages[0].content[1]"
    assert not seeing.requests


def _messages(block: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (
            "/v1/chat/completions",
            chat_body({"type": "input_audio", "input_audio": {}}),
            "transcript|said in it",
        ),
        ("/v1/chat/completions", chat_body({"type": "video_url", "video_url": {}}), "frames"),
        ("/v1/chat/completions", chat_body({"type": "file", "file": {}}), "send its text"),
        ("/v1/chat/completions", chat_body({"type": "image_url"}), "image_url is missing"),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "x"}}]}],
            },
            "send its text",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}],
            },
            "base64",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "No files are kept",
        ),
        ("/api/generate", {"prompt": "x", "raw": True, "images": [RED_TEXT]}, "raw"),
        ("/tokenize", chat_body(image_part()), "images belong into the messages of a chat"),
    ],
)
def test_other_media_are_refused_clearly(call: Any, seeing: Any, path: str, body: Any, says: str) -> None:
    response = posted(call, seeing, path, body)
    assert response.status_code == 400, response.text
    assert any(each in message_of(response) for each in says.split("|")), message_of(response)


def test_only_so_many_images(call: Any, seeing: Any) -> None:
    body = chat_body(*[image_part()] * (sources.MAX_IMAGES + 1))
    response = posted(call, seeing, "/v1/chat/completions", body)
    assert response.status_code == 400
    assert f"more than {sources.MAX_IMAGES}" in message_of(response)


def test_an_image_longer_than_the_context_is_refused(call: Any, seeing: Any) -> None:
    seeing.served = (replace(seeing.served[0], context_length=10),)
    response = posted(call, seeing, *REQUESTS["chat"])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_bodies_may_be_longer_where_a_model_sees(call: Any, seeing: Any, service: Any) -> None:
    limits = Limits(max_body_bytes=200, max_image_body_bytes=4000)
    path, body = REQUESTS["chat"]
    assert posted(call, seeing, path, body, limits=limits).status_code == 200
    assert posted(call, service, path, body, limits=limits).status_code == 413


def test_what_requests_hold_of_images_is_bounded(call: Any, seeing: Any) -> None:
    path, body = REQUESTS["chat"]
    size = len(httpx.Request("POST", "http://x", json=body).read())
    app = create_app(seeing, limits=Limits(max_held_bytes=size))
    assert call(app, "POST", path, json=body).status_code == 200
    app.state.held_body_bytes = 1  # of somebody else's
    assert call(app, "POST", path, json=body).status_code == 503
    assert app.state.held_body_bytes == 1


def test_decoding_has_a_deadline(call: Any, seeing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setattr(showing, "DECODE_S", 0.05)
    monkeypatch.setattr(showing, "decode_image", lambda content: release.wait(30))
    try:
        response = posted(call, seeing, *REQUESTS["chat"])
    finally:
        release.set()
    assert response.status_code == 503
    assert "not decoded within" in message_of(response)


def test_models_say_whether_they_see(call: Any, seeing: Any, service: Any) -> None:
    for each, modalities, has_vision in ((seeing, ["text", "image"], True), (service, ["text"], False)):
        app = create_app(each)
        assert call(app, "GET", "/v1/models").json()["data"][0]["input_modalities"] == modalities
        shown = call(app, "POST", "/api/show", json={"model": each.served[0].name}).json()
        assert ("vision" in shown["capabilities"]) is has_vision

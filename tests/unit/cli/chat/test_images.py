"""Images of `run` and of conversations: read from files, shown to models that see, sent to servers as they are."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardcompute.cli.chat.answer import AnswerOptions, make_request, take_answer
from shardcompute.cli.chat.conversation import Conversation
from shardcompute.cli.chat.images import encode_images, read_image, read_images, with_images
from shardcompute.cli.chat.remote import RemoteModel
from shardcompute.cli.console import open_screen
from shardcompute.cluster_client import ClusterClient
from shardcompute.core.errors import SourceError, UsageError
from shardcompute.core.generation import Sampling
from shardcompute.node.service import ServedModel
from support.pictures import EYES, ROW_ID, image_file

OPTIONS = AnswerOptions(8, Sampling(), None, (), None, is_raw=False)


class SeeingTokenizer:
    eos_ids = frozenset({0})
    has_chat_template = True

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode_rendered(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        texts = []
        for message in messages:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            texts += ["<image>" if part["type"] == "image" else part["text"] for part in parts]
        return "|".join(texts)

    def encode_rendered(self, rendered: str, *, context_length: int | None = None) -> list[int]:
        return [ROW_ID if letter == EYES.prompt.row else ord(letter) for letter in rendered]


@pytest.fixture
def seeing(opened: Any) -> Any:
    @dataclass
    class SeeingService(type(opened.service)):  # type: ignore[misc]
        tokenizer: Any = field(default_factory=SeeingTokenizer)

        def models(self) -> list[ServedModel]:
            return [replace(each, vision=EYES) for each in super().models()]

    opened.service = SeeingService()
    return opened.service


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    path.write_bytes(image_file())
    return path


def test_run_shows_images_before_the_prompt(cli: Any, home: Path, seeing: Any, photo: Path) -> None:
    done = cli("run", "--local", "--image", str(photo), "--image", str(photo), "smollm2", "What?")
    assert done.exit_code == 0, done.output
    [request] = seeing.requests
    assert [(each.span.start, each.span.count) for each in request.pictures] == [(1, 4), (8, 4)]
    assert bytes(request.prompt[-6:]) == b"|What?"


def test_a_model_that_does_not_see_says_so(cli: Any, home: Path, opened: Any, photo: Path) -> None:
    done = cli("run", "--local", "--image", str(photo), "smollm2", "What?")
    assert done.exit_code != 0
    assert "does not see images" in done.output
    assert not opened.service.requests


@pytest.mark.parametrize(
    ("content", "says"), [(None, "no file"), (b"", "empty"), (b"nothing", "no image of a kind")]
)
def test_what_is_no_image_is_said(
    cli: Any, home: Path, seeing: Any, tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "photo"
    if content is not None:
        path.write_bytes(content)
    done = cli("run", "--local", "--image", str(path), "smollm2", "What?")
    assert done.exit_code != 0
    assert says in done.output


def test_a_raw_prompt_has_no_images(photo: Path) -> None:
    with pytest.raises(UsageError, match="--raw"):
        read_images([photo], is_raw=True)
    with pytest.raises(SourceError, match="cannot be read"):
        read_image(photo.parent)


def hold(service: Any, folder: Path, lines: Sequence[str], images: Sequence[str] = ()) -> Conversation:
    left = iter(lines)

    def read_line(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    talk = Conversation(service, OPTIONS, open_screen(), folder, images, is_verbose=False)
    talk.hold(read_line)
    return talk


def test_an_image_belongs_to_the_next_message_and_stays_in_the_conversation(
    seeing: Any, photo: Path, tmp_path: Path
) -> None:
    hold(seeing, tmp_path, [f"/image {photo}", "What?", "Why?", "/clear", "And now?"])
    assert [len(request.pictures) for request in seeing.requests] == [1, 1, 0]


def test_images_of_the_command_belong_to_the_first_message(seeing: Any, photo: Path, tmp_path: Path) -> None:
    hold(seeing, tmp_path, ["What?"], [read_image(photo)])
    assert len(seeing.requests[0].pictures) == 1


def test_an_image_that_cannot_be_shown_is_left_out(
    seeing: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"nothing")
    hold(seeing, tmp_path, [f"/image {broken}", "What?", "Anything?", "/image", f"/image {tmp_path}/none"])
    assert [len(request.pictures) for request in seeing.requests] == [0]
    said = capsys.readouterr().err
    assert "no image of a kind" in said
    assert "/image needs a file" in said
    assert "no file" in said


def test_a_saved_conversation_keeps_its_images(seeing: Any, photo: Path, tmp_path: Path) -> None:
    hold(seeing, tmp_path, [f"/image {photo}", "What?", "/save trip"])
    hold(seeing, tmp_path, ["/load trip", "Why?"])
    assert [len(request.pictures) for request in seeing.requests] == [1, 1]
    assert seeing.requests[0].pictures == seeing.requests[1].pictures


def test_a_server_is_sent_the_messages_themselves(photo: Path) -> None:
    seen: list[tuple[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        chunks = [{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
        chunks += [
            {"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in ("A ", "cat")
        ]
        chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return httpx.Response(200, text=f"{events}data: [DONE]\n\n")

    client = ClusterClient("http://server", transport=httpx.MockTransport(answer))
    service = RemoteModel(client, "org/eyes").as_service()
    messages = [{"role": "user", "content": with_images("What?", [read_image(photo)])}]
    request = make_request(service, OPTIONS, messages)
    reply = take_answer(service, request, lambda text: None, messages)
    assert (reply.text, reply.finish) == ("A cat", "stop")
    [(path, body)] = seen
    assert path == "/v1/chat/completions"
    image, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "What?"}
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == photo.read_bytes()
    assert (body["max_tokens"], body["model"]) == (8, "org/eyes")
    assert "prompt" not in body


def test_images_in_this_process_are_prepared_as_the_model_wants(seeing: Any, photo: Path) -> None:
    messages = [{"role": "user", "content": with_images("What?", [read_image(photo)])}]
    ids, [picture] = encode_images(seeing, messages)
    assert ids[picture.span.start : picture.span.stop] == [ROW_ID] * 4
    assert picture.patches == (b"\xff" * 4 + b"\0" * 8) * 4

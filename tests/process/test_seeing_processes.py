"""A seeing model served by three processes: images over HTTP, and one that is killed is not noticed in the answer."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from shardcompute.bench import stages
from support.pictures import data_url_of, image_file
from support.seeing.talker import save_seeing_talker
from support.swarm.processes import COMMAND, Swarm, swarm_of

pytestmark = pytest.mark.timeout(240)
KV_TOKENS = 1 << 18
IMAGE = image_file("JPEG", (90, 61), (200, 30, 60))


def body_of(image: bytes, **options: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": data_url_of(image, "image/jpeg")}}
    message = {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}
    return {"messages": [message], "max_tokens": 96, "temperature": 0, "ignore_eos": True, **options}


def answer(swarm: Swarm, after_tokens: int = 0, then: Callable[[], object] = lambda: None) -> str:
    """A streamed answer; `then` is called once this many pieces of it are there."""
    request = urllib.request.Request(
        f"{swarm.url}/v1/chat/completions",
        json.dumps(body_of(IMAGE, stream=True)).encode(),
        {"Content-Type": "application/json"},
    )
    text, count = "", 0
    with urllib.request.urlopen(request, timeout=90) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            if count == after_tokens:
                then()
            count += 1
            text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert count > after_tokens
    return text


def room_for_third(model: Path) -> str:
    """So much for each worker that it takes three: a first stage has the tower besides, so that layers are counted by
    the KV of many tokens."""
    return str(stages.memory_per_stage(str(model), "native", 3, kv_tokens=KV_TOKENS, context=512))


def test_a_killed_first_or_last_worker_is_not_noticed_in_the_answer(tmp_path: Path) -> None:
    model = save_seeing_talker("gemma3", tmp_path / "eyes")
    limits = ("--workers", "3", "--kv-tokens", str(KV_TOKENS), "--threads", "1", "--context", "512")
    with swarm_of(model, tmp_path / "cluster", *limits, "--max-memory", room_for_third(model)) as swarm:
        swarm.wait_until(lambda: len(swarm.stage_names()) == 3)
        [card] = swarm.ask("GET", "/v1/models")["data"]
        assert card["input_modalities"] == ["text", "image"]
        assert [model["sees"] for model in swarm.state()["models"]] == [True], "the page tells it"
        undisturbed = answer(swarm)
        for stage in (0, 2):
            victim = swarm.worker(swarm.stage_names()[stage])
            assert answer(swarm, 8, victim.kill) == undisturbed
            swarm.wait_until(lambda: len(swarm.stage_names()) == 3)
        with pytest.raises(urllib.error.HTTPError) as refused:
            swarm.ask("POST", "/v1/chat/completions", body_of(b"nothing"))
        assert "no image of a kind" in refused.value.read().decode()
        _ask_by_command(swarm, tmp_path)
        _ask_by_official_client(swarm)


def _ask_by_command(swarm: Swarm, folder: Path) -> None:
    """`run --image` asks the server as any client does."""
    photo = folder / "photo.jpg"
    photo.write_bytes(IMAGE)
    options = ("--url", swarm.url, "--image", str(photo), "--max-tokens", "8", "--json")
    done = subprocess.run(
        [*COMMAND, "run", *options, "eyes", "What is it?"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    plain = swarm.ask("POST", "/v1/chat/completions", body_of(IMAGE, max_tokens=8, ignore_eos=False))
    assert told["text"] == plain["choices"][0]["message"]["content"]
    assert told["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def _ask_by_official_client(swarm: Swarm) -> None:
    url = data_url_of(IMAGE, "image/jpeg")
    with openai.OpenAI(base_url=f"{swarm.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(
            model="eyes",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": "What is it?"},
                    ],
                }
            ],
            max_tokens=8,
            temperature=0,
        )
        response = client.responses.create(
            model="eyes",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": url, "detail": "auto"},
                        {"type": "input_text", "text": "What is it?"},
                    ],
                }
            ],
            max_output_tokens=8,
            temperature=0,
        )
        assert chat.choices[0].message.content == response.output_text
        assert chat.usage is not None
        assert response.usage is not None
        assert chat.usage.prompt_tokens == response.usage.input_tokens > 16

"""A quantised checkpoint served by three processes: one that is killed is not noticed in the answer."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from support.models.tiny_checkpoint import save_tiny_llama
from support.quantised.checkpoint import quantise_folder
from support.swarm.processes import Swarm, memory_for, swarm_of


def answer(swarm: Swarm, model: str, after_tokens: int = 0, then: Callable[[], object] = lambda: None) -> str:
    """A streamed answer; `then` is called once this many pieces of it are there."""
    body = {"model": model, "prompt": "Once", "max_tokens": 96, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{swarm.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, count = "", 0
    with urllib.request.urlopen(request, timeout=60) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            if count == after_tokens:
                then()
            count += 1
            text += json.loads(line[6:])["choices"][0]["text"]
    assert count > after_tokens
    return text


@pytest.mark.parametrize("form", ["gptq4-asymmetric", "fp8-blocks"])
def test_killed_worker_is_not_noticed_in_the_answer(form: str, tmp_path: Path) -> None:
    model, _ = quantise_folder(save_tiny_llama(tmp_path / "plain"), tmp_path, form)
    limits = ("--workers", "3", "--kv-tokens", "2048", "--threads", "1", *memory_for(model, 3))
    with swarm_of(model, tmp_path / "cluster", *limits) as swarm:
        swarm.wait_until(lambda: len(swarm.stage_names()) == 3)
        undisturbed = answer(swarm, form)
        victim = swarm.worker(swarm.stage_names()[1])
        assert answer(swarm, form, 8, victim.kill) == undisturbed

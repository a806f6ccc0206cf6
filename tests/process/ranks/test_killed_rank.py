"""Two processes of three that compute every layer together, one of which is killed or stopped amid an answer: the
tokens are those of one process, nobody hangs, and two of them meet again."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.models.requests import greedy
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import Alone, open_alone
from support.swarm.processes import Swarm, swarm_of

PROMPT = (7, 11, 13, 17, 19)
TOKENS = 160
HARMED_AFTER = 8


def answer(swarm: Swarm, model: str, then: Callable[[], object]) -> str:
    """A streamed answer; `then` is called once some of it is there."""
    body = {"model": model, "prompt": list(PROMPT), "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{swarm.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    pieces: list[str] = []
    with urllib.request.urlopen(request, timeout=60) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                if len(pieces) == HARMED_AFTER:
                    then()
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    return "".join(pieces)


@pytest.mark.parametrize(
    ("harm", "rank"), [(psutil.Process.kill, 1), (psutil.Process.suspend, 0)], ids=["kill", "stop"]
)
def test_a_rank_is_lost_amid_an_answer(
    tmp_path: Path, harm: Callable[[psutil.Process], None], rank: int
) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    with open_alone(model) as service:
        expected, served = Alone(service).answer(greedy(PROMPT, TOKENS)).text, service.name
    options = ["--workers", "3", "--parallel", "tp=2", "--backend", "onnx", "--threads", "1"]
    options += ["--kv-tokens", "2048", "--speculate", "off"]
    with swarm_of(model, tmp_path / "cluster", *options) as swarm:
        swarm.wait_until(lambda: len(rank_names(swarm)) == 2)
        assert answer(swarm, served, lambda: None) == expected
        [before] = swarm.state()["chains"]
        victim = swarm.worker(rank_names(swarm)[rank])
        try:
            assert answer(swarm, served, lambda: harm(victim)) == expected
        finally:
            if victim.is_running():
                victim.resume()
        [after] = swarm.state()["chains"]
        assert after["epoch"] > before["epoch"]
        # A layout lives for a minute before another is taken that was asked for.
        swarm.wait_until(lambda: len(rank_names(swarm)) == 2, patience_s=150)
        assert answer(swarm, served, lambda: None) == expected


def rank_names(swarm: Swarm) -> list[str]:
    """The machines that compute the first stage together, while it serves."""
    chains = swarm.state()["chains"]
    if not chains or chains[0]["status"] != "ready":
        return []
    names = swarm.node_names()
    return [names[each["node"]] for each in chains[0]["stages"][0]["ranks"]]

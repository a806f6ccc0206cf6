"""Every kind of model in three processes, the middle one of which is killed: the tokens are those of one process.

A swarm for each kind, of small models: those of `USUAL` run every day, the others in the long suite.
"""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from support.gguf.blocks import save_block_gguf
from support.gguf.parts import split_gguf
from support.models.requests import greedy
from support.models.tiny import save_tiny, save_tiny_talker
from support.models.tiny_checkpoint import save_tiny_llama
from support.quantised.checkpoint import FORMS, quantise_folder
from support.swarm.lab import Alone, open_alone
from support.swarm.processes import swarm_of
from support.tiny_adapter import save_adapter
from support.tiny_fallback import save_fallback

PROMPT = (7, 11, 13, 17, 19)
TOKENS = 160
KILLED_AFTER = 8
USUAL = frozenset({"fp8-blocks", "split-gguf", "deepseek-v3", "adapter"})


@dataclass(frozen=True, slots=True)
class Kind:
    """A model as it is given to `up`, what one process opens for it, and what is asked for."""

    model: Path
    whole: Path
    adapters: Mapping[str, Path] = field(default_factory=dict)


def plain(folder: Path) -> Path:
    return save_tiny_llama(folder / "plain")


def quantised(form: str, folder: Path) -> Kind:
    model, _ = quantise_folder(plain(folder), folder, form)
    return Kind(model, model)


def mxfp4(folder: Path) -> Kind:
    """As gpt-oss has it: experts alone."""
    source, words = save_tiny("gpt-oss", folder / "gpt-oss", 258), plain(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(words / name, source)
    model, _ = quantise_folder(source, folder, "mxfp4")
    return Kind(model, model)


def split(folder: Path) -> Kind:
    whole = save_block_gguf(folder / "tiny.gguf", ("Q4_K", "IQ3_S", "Q6_K", "MXFP4"))
    return Kind(split_gguf(whole, 3, folder / "parts")[0], whole)


def family(name: str, folder: Path) -> Kind:
    model = save_tiny_talker(name, folder / name, plain(folder))
    return Kind(model, model)


def fallback(name: str, folder: Path) -> Kind:
    model = save_fallback(name, folder / name)
    return Kind(model, model)


def adapter(folder: Path) -> Kind:
    base = plain(folder)
    return Kind(base, base, {"wild": save_adapter(base, folder / "wild", seed=1, size=1.0)})


def adapter_on_quantised(form: str, folder: Path) -> Kind:
    kind, base = quantised(form, folder), folder / "plain"
    return Kind(kind.model, kind.whole, {"wild": save_adapter(base, folder / "wild", seed=1, size=1.0)})


KINDS: Mapping[str, Callable[[Path], Kind]] = {
    **{form: partial(quantised, form) for form in FORMS if form != "mxfp4"},
    "mxfp4": mxfp4,
    "split-gguf": split,
    "deepseek-v3": partial(family, "deepseek-v3"),
    "mixtral": partial(family, "mixtral"),
    "fallback-GPTNeoX": partial(fallback, "GPTNeoX"),
    "fallback-Bamba": partial(fallback, "Bamba"),
    "adapter": adapter,
    "adapter-gptq4": partial(adapter_on_quantised, "gptq4"),
}


def answer(url: str, model: str, then: Callable[[], object]) -> str:
    """A streamed answer; `then` is called once some pieces of it are there."""
    body = {
        "model": model,
        "prompt": list(PROMPT),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, count = "", 0
    with urllib.request.urlopen(request, timeout=60) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            if count == KILLED_AFTER:
                then()
            count += 1
            text += json.loads(line[6:])["choices"][0]["text"]
    assert count > KILLED_AFTER
    return text


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in KINDS]
)
def test_a_killed_stage_is_not_noticed_in_the_answer(name: str, tmp_path: Path) -> None:
    kind = KINDS[name](tmp_path)
    with open_alone(kind.whole, adapters=kind.adapters) as service:
        asked = [replace(greedy(PROMPT, TOKENS), adapter=each) for each in ("", *kind.adapters)]
        expected = [Alone(service).answer(each).text for each in asked]
        served = service.name
    options = ["--workers", "3", "--parallel", "pp=3", "--backend", "onnx", "--threads", "1"]
    options += ["--kv-tokens", "2048", "--speculate", "off"]
    for each, folder in kind.adapters.items():
        options += ["--adapter", f"{each}={folder}"]
    with swarm_of(kind.model, tmp_path / "cluster", *options) as swarm:
        swarm.wait_until(lambda: len(swarm.stage_names()) == 3)
        names = [served, *(f"{served}:{each}" for each in kind.adapters)]
        assert [answer(swarm.url, each, lambda: None) for each in names] == expected
        [before] = swarm.state()["chains"]
        victim = swarm.worker(swarm.stage_names()[1])
        assert answer(swarm.url, names[-1], victim.kill) == expected[-1]
        [after] = swarm.state()["chains"]
        assert after["epoch"] > before["epoch"]

"""`run` asks the model that was meant what was meant, and ends as documented."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shardcompute.core.errors import CapacityError
from shardcompute.core.generation import Sampling
from shardcompute.node.local.service import EngineOptions
from support.fake_devices import GIB, H200, FakeMachine, cuda_machine, pretend, second

from ..conftest import FakeTokenizer, Opening

Cli = Callable[..., Any]


def test_answer_goes_to_stdout_alone(cli: Cli, opened: Opening) -> None:
    result = cli("run", "smollm2", "Capital of France?")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Paris\n", "")
    assert opened.references == ["smollm2"]
    assert opened.service.prompts == ["user:Capital of France?|"]
    assert opened.service.is_closed


def test_single_argument_is_the_prompt_unless_it_names_a_model(cli: Cli, opened: Opening) -> None:
    assert cli("run", "Capital of France?").exit_code == 0
    assert cli("run", "org/repo", stdin="piped").exit_code == 0
    assert opened.references == ["", "org/repo"]
    assert opened.service.prompts == ["user:Capital of France?|", "user:piped|"]


def test_stdin_follows_the_prompt(cli: Cli, opened: Opening) -> None:
    cli("run", "Sum up:", stdin="a\nb\n")
    assert opened.service.prompts == ["user:Sum up:\n\na\nb|"]


def test_system_message_and_raw_prompt(cli: Cli, opened: Opening) -> None:
    cli("run", "--system", "Be brief.", "hi there")
    cli("run", "--raw", "hi there")
    assert opened.service.prompts == ["system:Be brief.|user:hi there|", "hi there"]


def test_sampling_options_reach_the_request(cli: Cli, opened: Opening) -> None:
    cli(
        *("run", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1", "--seed", "7"),
        *("--repeat-penalty", "1.1", "--max-tokens", "3", "--stop", "a", "--stop", "b", "hi"),
    )
    request = opened.service.requests[0]
    assert request.sampling == Sampling(0.5, 40, 0.9, 0.1, 1.1, seed=7)
    assert (request.max_tokens, request.stop, request.stop_ids) == (3, ("a", "b"), frozenset({0}))


def test_engine_options_reach_the_engine(cli: Cli, opened: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda_machine(H200, second()))
    cli(
        *("run", "--weights", "int8", "--backend", "torch", "--device", "cuda:1", "--threads", "2"),
        *("--context", "32", "--kv-memory", "2G", "--kv-type", "int8", "--stages", "3", "hi"),
    )
    cli("run", "hi")
    cli("run", "--backend", "onnx", "hi")
    pretend(monkeypatch, FakeMachine())
    cli("run", "hi")
    assert opened.options == [
        EngineOptions("torch", "int8", "cuda:1", 2, 32, 2 << 30, 3, free_bytes=138 * GIB, kv_type="int8"),
        EngineOptions("torch", device="cuda:0", free_bytes=138 * GIB),
        EngineOptions(),
        EngineOptions(),
    ]


def test_one_process_computes_on_one_device(cli: Cli, opened: Opening) -> None:
    result = cli("run", "--device", "cuda:0,cpu", "hi")
    assert result.exit_code == 2
    assert "one process computes on one device, not on cuda:0,cpu" in result.stderr


def test_without_seed_drawn_answers_differ_and_greedy_ones_have_none(cli: Cli, opened: Opening) -> None:
    for _ in range(2):
        cli("run", "--temperature", "1", "hi")
    cli("run", "hi")
    first, second, greedy = (request.sampling.seed for request in opened.service.requests)
    assert first != second
    assert greedy == 0


def test_json_is_one_object(cli: Cli, opened: Opening) -> None:
    result = cli("run", "--json", "hi")
    reply = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    timings = reply.pop("timings")
    assert reply == {
        "model": "fake",
        "text": "Paris",
        "token_ids": [2, 3, 0],
        "prompt_tokens": 8,
        "finish": "stop",
        "seed": 0,
    }
    assert timings.pop("load_s") >= 0
    assert timings == {
        "queue_s": 0.1,
        "prefill_s": 0.5,
        "decode_s": 2.0,
        "prefill_tokens_per_s": 16.0,
        "decode_tokens_per_s": 2.0,
        "cached_tokens": 0,
        "traversals": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
    }


def test_verbose_tells_timings_on_stderr(cli: Cli, opened: Opening) -> None:
    result = cli("run", "-v", "hi")
    assert result.stdout == "Paris\n"
    assert "prompt 8 tokens in 0.50 s (16.0 tokens/s)" in result.stderr
    assert "answer 5 tokens in 2.00 s (2.0 tokens/s)" in result.stderr


def test_context_that_the_model_cannot_have_is_said(cli: Cli, opened: Opening) -> None:
    assert "the context is 64 tokens, not 100" in cli("run", "--context", "100", "hi").stderr
    assert cli("run", "--context", "64", "hi").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", ""], "the prompt is empty"),
        (["run"], "the prompt is empty"),
        (["run", "smollm2", "  "], "the prompt is empty"),
        (["run", "--raw", "--system", "x", "hi"], "--system needs the chat template"),
        (["run", "--stop", "", "hi"], "--stop is empty"),
        (["run", "not a model", "hi"], "not the name of a model"),
        (["run", "--temperature", "2.1", "hi"], "--temperature"),
        (["run", "--max-tokens", "0", "hi"], "--max-tokens"),
        (["run", "--stages", "0", "hi"], "--stages"),
        (["run", "--threads", "0", "hi"], "--threads"),
        (["run", "--weights", "int3", "hi"], "int3"),
        (["run", "--kv-memory", "lots", "hi"], "'lots' is not a size"),
        (["run", "--backend", "onnx", "--device", "cuda", "hi"], "the onnx backend computes on cpu"),
        (["run", "--device", "gpu", "--backend", "torch", "hi"], "'gpu' is not a device"),
    ],
)
def test_wrong_usage_opens_nothing(cli: Cli, opened: Opening, arguments: list[str], message: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert opened.references == []


def test_stdin_that_is_not_text(cli: Cli, opened: Opening) -> None:
    result = cli("run", stdin=b"caf\xe9")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 text: byte 3 is 0xe9" in result.stderr


def test_model_without_chat_template_needs_raw(cli: Cli, opened: Opening) -> None:
    opened.service.tokenizer = FakeTokenizer(has_chat_template=False)
    refused = cli("run", "hi")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "fake has no chat template" in refused.stderr
    assert "--raw" in refused.stderr
    assert opened.service.is_closed
    assert cli("run", "--raw", "hi").exit_code == 0


def test_error_in_the_middle_of_an_answer(cli: Cli, opened: Opening) -> None:
    opened.service.script = ["Pa", CapacityError("no memory is left", hint="close something")]
    result = cli("run", "hi")
    assert result.exit_code == 7
    assert result.stdout == "Pa"
    assert result.stderr == "error: no memory is left\nhint: close something\n"
    assert opened.service.is_closed


@pytest.mark.parametrize(("json_option", "stdout"), [([], "Pa\n"), (["--json"], "")])
def test_interrupt_ends_the_answer(cli: Cli, opened: Opening, json_option: list[str], stdout: str) -> None:
    opened.service.script = ["Pa", KeyboardInterrupt()]
    result = cli("run", *json_option, "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (130, stdout, "interrupted\n")
    assert opened.service.cancelled == 1
    assert opened.service.is_closed

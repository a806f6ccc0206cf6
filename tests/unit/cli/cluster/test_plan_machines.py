"""`plan --machines`: how many machines of a size a model needs, without a cluster and without a download."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Cli = Callable[..., Any]


def _counts(cli: Cli, *arguments: str) -> dict[tuple[str, int], int | None]:
    told = json.loads(cli("plan", *arguments, "--json").stdout)
    return {(each["weights"], each["machine_bytes"] >> 30): each["count"] for each in told["counts"]}


def test_machines_of_mixtral_8x22b(cli: Cli) -> None:
    on_cpus = _counts(cli, "mixtral:8x22b", "--machines", "16G,24G", "--weights", "mixed")
    assert on_cpus == {
        ("native", 16): None,
        ("native", 24): None,
        ("float32", 16): None,
        ("float32", 24): None,
        ("mixed", 16): 19,
        ("mixed", 24): 12,
        ("int8", 16): 19,
        ("int8", 24): 12,
        ("int4", 16): 14,
        ("int4", 24): 8,
    }
    on_gpus = _counts(cli, "mixtral:8x22b", "--machines", "24G", "--device", "cuda")
    forms = ("native", "mixed", "int8", "int4")
    assert [on_gpus[form, 24] for form in forms] == [19, 10, 9, 6]


def test_every_form_is_said_and_how_the_wanted_one_is_cut(cli: Cli) -> None:
    result = cli("plan", "mixtral:8x22b", "--machines", "24G", "--weights", "int4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any(line.startswith("mixed") and "12 machines of 24.0 GiB" in line for line in lines)
    assert any(line.startswith("int4, 24.0 GiB") and "layers on each" in line for line in lines)
    assert "--max-memory 21.6G" in result.stdout


def test_machines_that_cannot_hold_a_layer(cli: Cli) -> None:
    result = cli("plan", "mixtral:8x22b", "--machines", "16G")
    assert result.exit_code == 7
    assert "none of 16.0 GiB: a worker needs" in result.stdout
    assert "19 machines of 16.0 GiB" in result.stdout


def test_machines_that_compute_each_stage_together(cli: Cli) -> None:
    alone = _counts(cli, "qwen3:8b", "--machines", "4G")
    ranks = _counts(cli, "qwen3:8b", "--machines", "4G", "--parallel", "tp=2")
    known = {key: (alone[key], count) for key, count in ranks.items() if alone[key] and count}
    assert known
    assert all(count % 2 == 0 and one <= count <= 2 * one for one, count in known.values())
    told = cli("plan", "qwen3:8b", "--machines", "4G", "--parallel", "tp=2", "--weights", "int4")
    assert "machines of 4.0 GiB, 2 to a stage" in told.stdout


def test_kv_of_fewer_bits_takes_less(cli: Cli) -> None:
    def fullest(kv_type: str) -> int:
        told = json.loads(cli("plan", "qwen3:8b", "--machines", "8G", "--kv-type", kv_type, "--json").stdout)
        return sum(each["largest_bytes"] for each in told["counts"] if each["weights"] == "int4")

    assert fullest("int8") != fullest("float32")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--machines", "lots"), "is not a size"),
        (("--machines", "16G", "--device", "tpu"), "there is no kind of device"),
        (("--machines", "16G", "--chains", "2"), "one chain"),
        (("--machines", "16G", "--url", "http://127.0.0.1:1"), "asks no cluster"),
        (("--device", "cuda"), "--machines 16G"),
        (("--machines", "16G", "--parallel", "auto"), "knows of no speeds"),
        (("--machines", "16G", "--parallel", "tp=2,pp=3"), "counts the stages by itself"),
    ],
)
def test_what_is_not_a_question_is_refused(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    result = cli("plan", "mixtral:8x22b", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr

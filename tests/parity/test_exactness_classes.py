"""What exactness classes declare holds: logits under teacher forcing, against the oracle and each other."""

from __future__ import annotations

import importlib.util
from itertools import combinations

import numpy as np
import pytest

from shardcompute.backends.exactness import ExactnessClass, class_of, tolerance
from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import cut, whole
from shardcompute.runtime.shard import _run_by
from support.models.random_networks import (
    CONTEXT,
    DENSE,
    KV_BYTES,
    SPECS,
    RandomSource,
    oracle,
    run_all,
    run_chain,
)

ARMS = [
    ("onnx", "float32"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "float16"),
    ("mlx", "float32"),
    ("mlx", "bfloat16"),
    ("mlx", "float16"),
]
FORMS = {"dense": "float32", "int8": "int8", "int4-shift": "int4"}


def arms() -> list[tuple[str, str]]:
    return [arm for arm in ARMS if arm[0] == "onnx" or importlib.util.find_spec(arm[0]) is not None]


def declared(backend: str, dtype: str) -> ExactnessClass:
    usual = class_of(backend, "cpu", release="here", kernels="here")
    return ExactnessClass(usual.backend, usual.release, dtype, dtype, usual.kernels)


def logits(backend: str, dtype: str, name: str, form: str, stages: int = 1) -> Float32:
    """All rows of all steps, the last of them behind 122 tokens that are given."""
    spec, options = SPECS[name], ExecutorOptions(kv_bytes=KV_BYTES, context_length=CONTEXT, dtype=dtype)
    parts = [whole(spec)] if stages == 1 else cut(spec, stages)
    executors = [_run_by(backend, Decoder(spec, part, RandomSource(spec, form)), options) for part in parts]
    rows = run_chain(executors)
    for executor in executors:
        executor.close()
    return np.concatenate(rows)


def apart(ours: Float32, theirs: Float32) -> float:
    """The measure of `backends.exactness`, of the worst row."""
    ours, theirs = (each - each.mean(axis=1, keepdims=True) for each in (ours, theirs))
    distance = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    return float(distance.max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in DENSE if name not in ("odd-head", "mha")])
def test_classes_are_as_near_as_declared(name: str, form: str) -> None:
    truth = np.concatenate(run_all(oracle(SPECS[name], form)))
    found = {arm: logits(*arm, name, form) for arm in arms()}
    for arm, rows in found.items():
        assert apart(rows, truth) <= declared(*arm).own_error(FORMS[form]), arm
    for first, second in combinations(found, 2):
        limit = tolerance(declared(*first).name, declared(*second).name, FORMS[form])
        assert apart(found[first], found[second]) <= limit, (first, second)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arm", arms(), ids="/".join)
def test_one_class_is_equal_wherever_it_is_cut(arm: tuple[str, str], form: str) -> None:
    one, cut_up = (logits(*arm, "head-norm", form, stages) for stages in (1, 2))
    np.testing.assert_array_equal(one, cut_up)

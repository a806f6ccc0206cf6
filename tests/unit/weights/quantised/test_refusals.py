"""Quantised checkpoints that are not what they say: refused with the reason, before anything large is made."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.matrix import Array
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.safetensors_file import open_safetensors
from shardcompute.weights.formats.tensor_file import read_matrix
from shardcompute.weights.quantised.schemes import METHODS, open_quantised, quantization_of, scheme_of
from support.quantised.checkpoint import FORMS, Stored, save_tensors, tensor

WEIGHTS = np.random.default_rng(3).standard_normal((32, 64)).astype(np.float32)
Change = Callable[[Stored], object]


def made(form: str) -> Stored:
    return FORMS[form].quantise("m", WEIGHTS)[0]


def read(path: Path, tensors: Stored, config: Any) -> Array:
    save_tensors(path / "m.safetensors", tensors)
    with LocalBytes(path / "m.safetensors") as source:
        file = open_quantised(open_safetensors(source), json.dumps(config))
        return read_matrix(file, "m.weight").to_dense()


def put(name: str, values: Array) -> Change:
    return lambda tensors: tensors.update({name: tensor(values)})


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


STATE = "m.weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Change:
    found = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [32, 64], **changes}
    return put(STATE, np.frombuffer(json.dumps(found).encode(), np.uint8))


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq4", drop("m.scales"), "lacks its scales"),
        ("gptq4", drop("m.qzeros"), "lacks its qzeros"),
        ("gptq4", put("m.g_idx", np.full(64, 2, np.int32)), "names group 2 of 2"),
        ("gptq4", put("m.g_idx", np.full(64, -7, np.int32)), "names group -7 of 2"),
        ("gptq4", put("m.g_idx", np.zeros(60, np.int32)), "do not fit each other"),
        ("gptq4", put("m.g_idx", np.zeros(0, np.int32)), "no list of groups"),
        ("gptq4", put("m.scales", np.zeros((0, 32), np.float16)), "no matrix"),
        ("gptq4", put("m.scales", np.zeros((3, 32), np.float16)), "do not fit each other"),
        ("gptq4", put("m.scales", np.full((2, 32), np.inf, np.float16)), "infinite or not numbers"),
        ("gptq4", put("m.qweight", np.zeros((8, 32), np.float32)), "words of 32 bits"),
        ("gptq4", put("m.qzeros", np.zeros((2, 5), np.int32)), "do not fit each other"),
        ("awq", drop("m.qzeros"), "lacks its qzeros"),
        ("awq", put("m.scales", np.zeros((2, 31), np.float16)), "do not fit each other"),
        ("awq", put("m.qweight", np.zeros((0, 4), np.int32)), "no matrix"),
        ("int4", drop("m.weight_scale"), "lacks its weight_scale"),
        ("int4", put("m.weight_shape", np.int64([32, 1 << 40])), "says that it is"),
        ("int4", put("m.weight_shape", np.int64([32])), "no shape"),
        ("int4", put("m.weight_scale", np.ones((32, 5), np.float16)), "5 groups in a row of 64"),
        ("int4", put("m.weight_scale", np.ones((31, 2), np.float16)), "for 32 rows of 64"),
        ("int4-asymmetric", put("m.weight_zero_point", np.zeros((4, 3), np.int32)), "that do not fit"),
        ("int4-ordered", put("m.weight_g_idx", np.full(64, 9, np.int32)), "names group 9 of 2"),
        ("int4-ordered", put("m.weight_g_idx", np.zeros(3, np.int32)), "g_idx of the shape"),
        ("int8", put("m.weight_scale", np.ones((32, 0), np.float16)), "for 32 rows of 64"),
        ("int8", put("m.weight", np.ones((32, 64), np.float32)), "scales beside F32"),
        ("fp8-blocks", put("m.weight_scale_inv", np.ones((9, 9), np.float32)), "in blocks of 24×40"),
        ("fp8-blocks", put("m.weight_scale_inv", np.ones((2, 2, 2), np.float32)), "in blocks of 24×40"),
        ("fp8-blocks", put("m.weight_scale_inv", np.ones((2, 2), np.int32)), "are I32 numbers"),
        ("fp8-rows", put("m.weight_scale", np.full((32, 1), np.nan, np.float32)), "infinite or not numbers"),
        ("nvfp4", put("m.weight_global_scale", np.zeros(1, np.float32)), "infinite or not numbers"),
        ("nvfp4", put("m.weight_global_scale", np.ones(7, np.float32)), "for all of it"),
        ("nvfp4", put("m.weight_packed", np.zeros((32, 31), np.uint8)), "do not make groups of 16"),
        ("nf4", drop("m.weight.quant_map"), "lacks its quant_map"),
        ("nf4", drop(STATE), "nf4 or fp4"),
        ("nf4", state(shape=[32, 65]), "2048 codes"),
        ("nf4", state(shape=[1 << 40, 1 << 40]), "is no size"),
        ("nf4", state(shape=[2048]), "cannot be read"),
        ("nf4", state(blocksize=0), "is no size"),
        ("nf4", state(blocksize=1), "maxima"),
        ("nf4", put(STATE, np.zeros(1 << 13, np.uint8)), "that should describe it"),
        ("nf4", put(STATE, np.frombuffer(b"[" * 4000, np.uint8)), "cannot be read"),
        ("nf4", put(STATE, np.frombuffer(b"[1, 2]", np.uint8)), "cannot be read"),
        ("nf4-nested", put("m.weight.nested_absmax", np.ones(9, np.float32)), "do not fit each other"),
        ("bnb-int8", put("m.SCB", np.ones(31, np.float32)), "scales \\[31\\]"),
    ],
)
def test_parts_that_do_not_make_a_matrix_are_refused(
    form: str, change: Change, message: str, tmp_path: Path
) -> None:
    tensors = made(form)
    change(tensors)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptModelError, match=message):
            read(tmp_path, tensors, FORMS[form].config)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_part_without_its_matrix_stays_a_tensor_of_its_own(tmp_path: Path) -> None:
    """So that the family refuses it by name."""
    tensors = made("gptq4")
    del tensors["m.qweight"]
    save_tensors(tmp_path / "m.safetensors", tensors)
    with LocalBytes(tmp_path / "m.safetensors") as source:
        file = open_quantised(open_safetensors(source), json.dumps(dict(FORMS["gptq4"].config)))
        assert set(file.entries) == {"m.scales", "m.qzeros", "m.g_idx"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "quantised by 'aqlm'"),
        ({"quant_method": "hqq", "bits": 4}, "quantised by 'hqq'"),
        ({"quant_method": "x" * 9999}, "quantised by 'xxx"),
        ({"quant_method": {"a": 1}}, "cannot be run here"),
        ({}, "quantised by 'unknown'"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits"),
        ({"quant_method": "gptq", "bits": "4"}, "GPTQ weights of 4 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size of 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 10**30}, "group_size of 1000"),
        ({"quant_method": "awq", "bits": 8}, "AWQ weights of 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "blocks of"),
        ({"quant_method": "fp8", "weight_block_size": [128, -1]}, "blocks of"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "'e3m4'"),
        ({"quant_method": "bitsandbytes"}, "neither in 4 nor in 8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24'"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparse-24",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "transforms"),
    ],
)
def test_methods_that_cannot_be_run_are_refused_with_what_would_serve(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        quantization_of({"quantization_config": config})
    assert (
        "GGUF" in caught.value.hint
        or "fetch the model again" in caught.value.hint
        or "load_in" in (caught.value.hint)
    )


def test_an_unknown_method_is_told_which_are_known() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        scheme_of(json.dumps({"quant_method": "quip"}))
    assert all(method in caught.value.hint for method in METHODS)


def test_a_quantization_config_that_is_no_object_is_corrupt() -> None:
    with pytest.raises(CorruptModelError, match="not an object"):
        quantization_of({"quantization_config": [1]})


# Groups of a config


def compressed(*groups: tuple[str, int]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            f"g{i}": {
                "targets": [target],
                "weights": {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"},
            }
            for i, (target, bits) in enumerate(groups)
        },
    }


def test_groups_are_told_apart_by_their_targets(tmp_path: Path) -> None:
    quantise = FORMS["int8-packed"].quantise
    tensors, meant = quantise("m", WEIGHTS)
    for groups in (
        (("re:.*other.*", 4), ("re:m$", 8)),
        (("Linear", 4), ("m", 8)),
        (("Linear", 8), ("re:^x", 4)),
    ):
        np.testing.assert_array_equal(read(tmp_path, tensors, compressed(*groups)), meant)
    with pytest.raises(CorruptModelError, match="no group of the config"):
        read(tmp_path, tensors, compressed(("x", 4), ("y", 8)))


@pytest.mark.parametrize(
    "pattern", ["re:(a+)+$", "re:(a|aa)*b", "re:.*.*.*.*x", "re:a{1,9999}", "re:" + "a" * 300, "re:("]
)
def test_patterns_that_might_never_end_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedModelError, match="the target"):
        scheme_of(json.dumps(compressed((pattern, 4))))

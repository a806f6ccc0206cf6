"""Proofs of a linear head over a hidden state, by `ezkl` (extra `zk`): the state stays with the prover, who has
committed to it by its Poseidon hash; the head and what comes out of it are known to both.

An auditor prepares an audit, which makes the circuit, keys and a structured reference string of its own, and hands the
folder to the prover without its `auditor` part. Whoever makes such a string can forge proofs under it: a proof
convinces the auditor who has made it, and nobody else.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardcompute.backends.ort.model_bytes import FLOAT, write_model, write_node, write_tensor, write_value
from shardcompute.core.errors import AuthError, BackendError, SourceError, UsageError

Float32 = npt.NDArray[np.float32]
MOST_INPUTS, MOST_OUTPUTS = 4096, 16
_SCALE_BITS = 10
_LEAST_LOG_ROWS = 15
_MOST_LOG_ROWS = 20
_OPSET = 13
_MOST_PROOF_BYTES = 1 << 20
_FIELD_BYTES = 32
_FIELD = 0x30644E72E131A029B85045B68181585D2833E84879B9709143E1F593F0000001
"""The order of the curve's scalars: larger halves stand for negative numbers."""
PROVER_FILES = ("head.ezkl", "pk.key", "kzg.srs", "settings.json")
AUDITOR = "auditor"


@dataclass(frozen=True, slots=True)
class HeadClaim:
    """What a proof shows: from the state with this hash the head computes these outputs, within fixed point."""

    commitment: str
    outputs: tuple[float, ...]


def prepare_audit(weight: Float32, bias: Float32, folder: Path) -> None:
    """The circuit of a head `[outputs, inputs]`, its keys, and a reference string that only its maker can trust."""
    ezkl = _ezkl()
    outputs, inputs = _check_head(weight, bias)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "head.onnx").write_bytes(_head_model(weight, bias, inputs, outputs))
    paths = {name: str(folder / name) for name in (*PROVER_FILES, "head.onnx")}
    arguments = ezkl.PyRunArgs()
    arguments.input_visibility = "hashed"
    arguments.output_visibility = "public"
    arguments.param_visibility = "fixed"
    arguments.input_scale = arguments.param_scale = _SCALE_BITS
    arguments.logrows = _LEAST_LOG_ROWS
    _call(
        "the settings", ezkl.gen_settings, paths["head.onnx"], paths["settings.json"], py_run_args=arguments
    )
    arguments.logrows = _log_rows(folder / "settings.json")
    _call(
        "the settings", ezkl.gen_settings, paths["head.onnx"], paths["settings.json"], py_run_args=arguments
    )
    _call("a circuit", ezkl.compile_circuit, paths["head.onnx"], paths["head.ezkl"], paths["settings.json"])
    _call("a reference string", ezkl.gen_srs, paths["kzg.srs"], arguments.logrows)
    own = folder / AUDITOR
    own.mkdir(exist_ok=True)
    _call("keys", ezkl.setup, paths["head.ezkl"], str(own / "vk.key"), paths["pk.key"], paths["kzg.srs"])
    for name in ("kzg.srs", "settings.json"):
        shutil.copyfile(folder / name, own / name)


def commit_state(folder: Path, state: Float32) -> str:
    """The hash that a prover commits to a state by."""
    with tempfile.TemporaryDirectory() as place:
        return _witness(folder, state, Path(place))[0]


def prove_head(folder: Path, state: Float32, out: Path) -> HeadClaim:
    """Write a proof of what the head makes of a state."""
    ezkl = _ezkl()
    with tempfile.TemporaryDirectory() as place:
        commitment, witness = _witness(folder, state, Path(place))
        paths = [str(folder / name) for name in ("head.ezkl", "pk.key")]
        _call("a proof", ezkl.prove, str(witness), *paths, str(out), str(folder / "kzg.srs"))
    claim = _read_claim(_read_proof(out), _output_scale(folder / "settings.json"))
    if claim.commitment != commitment:
        raise BackendError("the proof is of another state than it was made from")
    return claim


def verify_head(folder: Path, proof: Path, commitment: str) -> HeadClaim:
    """What a proof shows of the state that was committed to, by what the auditor has kept. AuthError where nothing."""
    ezkl, own = _ezkl(), folder / AUDITOR
    claim = _read_claim(_read_proof(proof), _output_scale(own / "settings.json"))
    if claim.commitment != commitment.lower():
        raise AuthError("The proof is about another state than the one that was committed to")
    try:
        is_good = ezkl.verify(
            str(proof), str(own / "settings.json"), str(own / "vk.key"), str(own / "kzg.srs")
        )
    except Exception as error:
        raise AuthError(f"The proof does not hold: {error}") from error
    if is_good is not True:
        raise AuthError("The proof does not hold")
    return claim


def _ezkl() -> Any:
    if importlib.util.find_spec("ezkl") is None:
        raise BackendError("proofs need ezkl", hint="pip install 'shardcompute[zk]'")
    import ezkl

    return ezkl


def _call(what: str, function: Any, *arguments: Any, **more: Any) -> Any:
    try:
        result = function(*arguments, **more)
    except Exception as error:
        raise BackendError(f"ezkl could not make {what}: {error}") from error
    if result is False:
        raise BackendError(f"ezkl could not make {what}")
    return result


def _check_head(weight: Float32, bias: Float32) -> tuple[int, int]:
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise UsageError("a head has a weight [outputs, inputs] and a bias [outputs]")
    outputs, inputs = weight.shape
    if not (0 < outputs <= MOST_OUTPUTS and 0 < inputs <= MOST_INPUTS):
        raise UsageError(
            f"a head of {inputs} → {outputs} is too large to be proved",
            hint=f"at most {MOST_INPUTS} → {MOST_OUTPUTS}",
        )
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise UsageError("a head has to be of finite numbers")
    return outputs, inputs


def _head_model(weight: Float32, bias: Float32, inputs: int, outputs: int) -> bytes:
    tensors = [
        write_tensor("weight", np.ascontiguousarray(weight.T, dtype=np.float32)),
        write_tensor("bias", bias.astype(np.float32)),
    ]
    node = write_node("Gemm", ["state", "weight", "bias"], ["out"], "", {})
    given, made = write_value("state", FLOAT, [1, inputs]), write_value("out", FLOAT, [1, outputs])
    return write_model([node], [given], [made], tensors, {"": _OPSET})


def _log_rows(settings: Path) -> int:
    rows = int(_json(settings)["num_rows"])
    needed = max(_LEAST_LOG_ROWS, math.ceil(math.log2(rows + 64)))
    if needed > _MOST_LOG_ROWS:
        raise UsageError(f"a circuit of {rows} rows is too large to be proved", hint="take a smaller head")
    return needed


def _witness(folder: Path, state: Float32, place: Path) -> tuple[str, Path]:
    """The hash of a state, and the file that a proof is made from."""
    ezkl = _ezkl()
    if state.ndim != 1 or not np.isfinite(state).all():
        raise UsageError("a state is one row of finite numbers")
    given, made = place / "input.json", place / "witness.json"
    given.write_text(json.dumps({"input_data": [state.astype(float).tolist()]}))
    _call("a witness", ezkl.gen_witness, str(given), str(folder / "head.ezkl"), str(made))
    try:
        return str(_json(made)["processed_inputs"]["poseidon_hash"][0]), made
    except (KeyError, IndexError, TypeError) as error:
        raise BackendError("ezkl gave no hash of the state") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read: {error.strerror}", hint="prepare the audit first"
        ) from error
    except ValueError as error:
        raise SourceError(f"{path} is damaged: {error}", hint="prepare the audit again") from error


def _output_scale(settings: Path) -> int:
    try:
        return int(_json(settings)["model_output_scales"][0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SourceError(f"{settings} is damaged", hint="prepare the audit again") from error


def _read_proof(path: Path) -> list[str]:
    """The public numbers of a proof: the state's hash, and the outputs."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_PROOF_BYTES + 1)
        if len(content) > _MOST_PROOF_BYTES:
            raise AuthError("The proof is far too long")
        [numbers] = json.loads(content)["instances"]
        if not all(isinstance(each, str) and len(bytes.fromhex(each)) == _FIELD_BYTES for each in numbers):
            raise ValueError("its numbers are none")
        return [each.lower() for each in numbers]
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}", hint="check the name") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise AuthError(f"The proof cannot be read: {error}") from error


def _read_claim(numbers: list[str], scale: int) -> HeadClaim:
    if not 2 <= len(numbers) <= MOST_OUTPUTS + 1:
        raise AuthError("The proof shows nothing of a head")
    values = [int.from_bytes(bytes.fromhex(each), "little") for each in numbers[1:]]
    signed = [each - _FIELD if each > _FIELD // 2 else each for each in values]
    return HeadClaim(numbers[0], tuple(each / 2.0**scale for each in signed))

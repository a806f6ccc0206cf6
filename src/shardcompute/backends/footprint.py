"""Footprint: what weights, KV and scratch cost to hold, by what holds them. Pure; imports no backend.

A file's bytes are not what a process holds: kernels of one backend widen 16 bits to 32, those of another keep block
codes with scales of 32 bits. A *holder* is a backend on a kind of device, such as `onnx/cpu`. A worker says which is
its own, so that placement counts every stage in the costs of its machine. The type of KV is the model's.
The constants were measured (docs/memory.md, `scripts/measure_memory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardcompute.backends.executor import rows_of_step
from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.kv_types import KvShape, KvType, kv_token_bytes
from shardcompute.core.pictures import ENCODED_BYTES

HOLDERS = (
    "onnx/cpu",
    "numpy/cpu",
    "torch/cpu",
    "torch/cuda",
    "torch/mps",
    "mlx/gpu",
    "mlx/cpu",
    "llamacpp/any",
)
ADAPTING_HOLDERS = ("onnx/cpu", "numpy/cpu", "torch/cpu", "torch/cuda")
"""Those that add what adapters add (`backends.host.low_rank`)."""
RANK_BACKENDS = ("onnx", "torch", "mlx", "numpy")
"""Those that can be a tensor rank: llama.cpp and `transformers` compute layers whole."""
SEEING_HOLDERS = ("onnx/cpu", "numpy/cpu", "torch/cpu", "torch/cuda", "torch/mps", "mlx/gpu", "mlx/cpu")
"""Those that take pictures: they hold a model's tower with its embedding."""
_PATCH_BUFFERS = 10
_PATCH_SCORE_BYTES = 32 * (1 << 20)
"""Rows of a tower's width that are kept at once, and scores (`backends.ort.tower`)."""
_ADAPTER_SHARE = 4
_MIB = 1 << 20
STATE_SESSIONS = 32
"""For so many recurrent states of a layer there is memory: two for each of 16 sessions (`backends.fallback`)."""
_FALLBACK_BYTES = 400 * _MIB
"""What torch and `transformers` take in a process, with what they compile and keep; measured 290 MiB when imported."""
_MLX_GROUP = 32
"""The smallest groups that MLX multiplies as they are; smaller ones are widened (`backends.mlx.weights`)."""
_PROMPT_GROUP_ROWS = 128
_SCORE_BYTES: Mapping[str, int] = {"onnx/cpu": 4 * _MIB}
_LARGEST_SCORE_BYTES = 32 * _MIB
"""Rows between attention, and its scores, are computed so many, or so many bytes, at a time (`backends.ort`)."""
_GRAPH_ROWS, _KV_PARTS = 256, 16
_EXECUTOR_BYTES = 24 * _MIB
"""Threads, sessions and small buffers of an executor, whatever it holds."""
_LAYER_LOADING = 15
_HEAD_LOADING = 25
"""Tenths of what is held of a matrix that loading it takes besides: as the file has it, widened, and the kernel's."""
_PROCESS_BYTES: Mapping[str, int] = {"onnx": 128 * _MIB, "numpy": 128 * _MIB, "torch": 330 * _MIB}


def held_adapter_bytes(stored_bytes: int) -> int:
    """What the matrices of adapters take that have so many bytes: those of q, k and v, or of gate and up, are held as
    one with zeros between them, and a kernel may pack another copy."""
    return _ADAPTER_SHARE * stored_bytes


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """How a weight matrix comes from a file to a backend, see `backends.matrix`: plain numbers of `bits`, or codes of
    `bits` in blocks along the input, with a shift each or none; `outliers` of all input columns are kept apart."""

    bits: int
    block_size: int = 0
    has_shifts: bool = False
    outliers: float = 0.0

    @property
    def words(self) -> str:
        """As people read it, such as `4-bit blocks of 16 with shifts`."""
        if not self.block_size:
            return f"{self.bits}-bit numbers"
        shifts = " with shifts" if self.has_shifts else ""
        outliers = " and outliers" if self.outliers else ""
        return f"{self.bits}-bit blocks of {self.block_size}{shifts}{outliers}"

    def code_bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self.bits // 8

    def block_count(self, rows: int, columns: int) -> int:
        return rows * columns // self.block_size if self.block_size else 0


FLOAT32 = MatrixForm(32)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the buffers of a step depend on."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    context_length: int
    max_rows: int = 512
    max_logit_rows: int = 64


def holding_of(backend: str, device: str) -> str:
    """By the names of a backend (`onnx`, `torch`, …) and a device (`cpu`, `cuda:0`, `mps`, …)."""
    kind = device.partition(":")[0]
    fixed = {"onnx": "cpu", "numpy": "cpu", "mlx": "cpu" if kind == "cpu" else "gpu", "llamacpp": "any"}.get(
        backend
    )
    kind = fixed or {"rocm": "cuda", "hip": "cuda"}.get(kind, kind)
    holder = f"{backend}/{kind}"
    return holder if holder in HOLDERS else HOLDERS[0]


def fallback_device(device: str) -> str:
    """On what torch computes a model of another family where a worker computes on `device` with any backend."""
    kind = device.partition(":")[0]
    if kind in ("rocm", "hip"):
        return device.replace(kind, "cuda", 1)
    return {"mlx": "mps", "gpu": "mps"}.get(kind, device)


def fallback_element_bytes(holder: str) -> int:
    """What a number of a model that `transformers` runs takes, weights and KV alike: float32 on CPUs, else 16 bits."""
    return 2 if holder in ("torch/cuda", "torch/mps", "mlx/gpu") else 4


def fallback_scratch_bytes(holder: str, shape: StepShape, layer_bytes: int) -> int:
    """`scratch_bytes` of a stage that `transformers` runs: with the library itself, and one layer's keys and values
    twice, because they are copied as they grow."""
    element = fallback_element_bytes(holder)
    grown = 2 * 2 * element * shape.kv_heads * shape.head_dim * shape.context_length
    on = "torch/cuda" if holder == "torch/cuda" else "torch/cpu"
    return _FALLBACK_BYTES + grown + scratch_bytes(on, shape, layer_bytes)


def held_kv_bytes(holder: str, kv_type: KvType, shape: KvShape) -> int:
    """Keys and values of one token in one layer. Torch, MLX and GPUs keep them in what they compute in; llama.cpp in 16
    bits, in streams of fixed length, beside which as much is kept for sessions that have none at the moment."""
    if holder in ("torch/cuda", "torch/mps", "mlx/gpu"):
        kv_type = "float16"
    elif holder in ("torch/cpu", "mlx/cpu", "llamacpp/any"):
        kv_type = "float32"
    return kv_token_bytes(kv_type, shape)


def pooled_tokens(tokens: int) -> int:
    """For how many tokens a pool of KV has memory: whole pages, and one for rows that only fill a batch."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS + PAGE_TOKENS


def process_bytes(backend: str) -> int:
    """What a worker's process takes with this backend before it holds any layer, nearly; a worker measures its own."""
    return _PROCESS_BYTES.get(backend, _PROCESS_BYTES["torch"])


def held_form(holder: str, form: MatrixForm) -> MatrixForm | None:
    """What a matrix that comes in `form` is held as by what multiplies with it; None: as the file has it."""
    if holder == "llamacpp/any":
        return None
    if holder in ("numpy/cpu", "torch/cpu"):
        return FLOAT32
    if holder == "torch/mps" or not form.block_size or (_is_mlx(holder) and form.block_size < _MLX_GROUP):
        return FLOAT32 if _is_wide(holder) else MatrixForm(16)
    return form


def matrix_bytes(holder: str, form: MatrixForm, rows: int, columns: int, file_bytes: int) -> int:
    """A matrix that is multiplied with. `file_bytes` are those of it in the file."""
    held = held_form(holder, form)
    if held is None:
        return file_bytes
    weights = rows * columns
    if not held.block_size:
        return held.bits // 8 * weights
    outliers = int(form.outliers * weights)
    # Scales, shifts, and the sums of blocks that MLAS packs; MLX has a shift for every block.
    parts = 2 if _is_mlx(holder) else 1 + form.has_shifts + (holder == "onnx/cpu")
    blocks = form.block_count(rows, columns)
    block_bytes = (2 if holder == "torch/cuda" else 4) * parts
    return form.code_bytes(rows, columns) + block_bytes * blocks + outliers * (4 if _is_wide(holder) else 2)


def table_bytes(
    holder: str, form: MatrixForm, rows: int, columns: int, file_bytes: int, *, stays_in_file: bool = False
) -> int:
    """A matrix whose rows are looked up. On the host it stays as it comes, or in its file; a GPU widens it."""
    if holder == "onnx/cpu":
        if stays_in_file:
            return 0
        # Two bytes each where files keep 16 bits, which is not known here.
        scales = 4 * (1 + form.has_shifts) * form.block_count(rows, columns)
        return form.code_bytes(rows, columns) + scales + int(2 * form.outliers * rows * columns)
    if holder in ("torch/cuda", "torch/mps") or (_is_mlx(holder) and form.outliers):
        return (4 if holder == "mlx/cpu" else 2) * rows * columns
    return matrix_bytes(holder, form, rows, columns, file_bytes)


def scratch_bytes(holder: str, shape: StepShape, layer_bytes: int) -> int:
    """What every stage needs beside weights and KV: what an executor takes by itself, and buffers of the largest step
    or what loading its largest layer, of so many held bytes, takes for a moment, whichever is more."""
    rows, element = _rows(holder, shape)[0], 2 if _is_gpu(holder) else 4
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = 4 * shape.hidden + 2 * query + 2 * kv
    working = 5 * shape.intermediate + 2 * shape.hidden
    scores = min(
        _SCORE_BYTES.get(holder, _LARGEST_SCORE_BYTES),
        4 * shape.heads * _PROMPT_GROUP_ROWS * shape.context_length,
    )
    tables = 2 * 4 * shape.head_dim * shape.context_length
    # Keys and values of one layer, spread to 32 bits where they are kept in fewer.
    spread = 2 * 4 * kv * shape.context_length if holder == "onnx/cpu" else 0
    # Which keys each row sees, for all rows of a step at once (`AttentionKernel.ranges`).
    masks = 4 * rows * shape.context_length if holder == "onnx/cpu" else 0
    at_once = min(rows, _PROMPT_GROUP_ROWS) if holder == "onnx/cpu" else rows
    parts = 0
    if holder == "torch/cuda":
        # Attention of few rows is made in parts (`backends.torch.kernels.launch`).
        parts = 4 * _GRAPH_ROWS * _KV_PARTS * (query + 32 * shape.kv_heads)
    step = element * (rows * kept + at_once * working) + 3 * scores + spread + masks + parts
    return _EXECUTOR_BYTES + tables + max(step, _LAYER_LOADING * layer_bytes // 10)


def tower_scratch_bytes(holder: str, patches: int, hidden: int, intermediate: int, heads: int) -> int:
    """What a tower needs besides its weights while it encodes a picture of so many patches, with the rows of others
    that are kept."""
    rows = 4 * patches * _PATCH_BUFFERS * hidden
    # ONNX Runtime walks a layer's widest rows in groups; others compute all of them at once.
    at_once = _PROMPT_GROUP_ROWS if holder == "onnx/cpu" else patches
    inner = 4 * at_once * 3 * intermediate
    return rows + inner + 2 * max(_PATCH_SCORE_BYTES, 4 * heads * patches) + ENCODED_BYTES


def head_scratch_bytes(holder: str, shape: StepShape, head_bytes: int, scratch: int) -> int:
    """What the last stage needs besides `scratch`: logits (on a CUDA device those of a graph, and rows that are drawn
    from) or, while it is loaded, copies of the head."""
    copies = 2 if holder == "torch/cuda" else 1
    logits = 4 * _rows(holder, shape)[1] * (copies * shape.vocab_size + 2 * shape.hidden)
    return max(logits, _HEAD_LOADING * head_bytes // 10 - scratch)


def _rows(holder: str, shape: StepShape) -> tuple[int, int]:
    """Of a step, and of its logits."""
    if holder == "torch/cuda":
        return rows_of_step("torch", "cuda")
    return shape.max_rows, shape.max_logit_rows


def _is_wide(holder: str) -> bool:
    """Whether plain numbers are held in 32 bits."""
    return holder in ("onnx/cpu", "mlx/cpu")


def _is_gpu(holder: str) -> bool:
    return holder in ("torch/cuda", "torch/mps", "mlx/gpu")


def _is_mlx(holder: str) -> bool:
    return holder.startswith("mlx/")

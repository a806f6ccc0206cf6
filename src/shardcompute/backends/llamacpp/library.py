"""The llama.cpp library inside the wheel `xllamacpp`, called through ctypes.

The wheel's extension module exports the whole C interface. Parameter records are passed by value and change between
releases, so exactly one release is accepted, and its records are recognised by their default values before anything
else is called. Nothing of the wheel is imported.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import threading
from collections import deque
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, ClassVar

from shardcompute.core.errors import BackendError

log = logging.getLogger(__name__)

PACKAGE = "xllamacpp"
VERSION = "2026.10.11549"
"""The one release whose records are laid out as below; pyproject.toml pins the same."""
INSTALL_HINT = "pip install 'shardcompute[llamacpp]'"

EvalCallback = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)

KV_TYPES = {"float32": 0, "float16": 1}
"""ggml's numbers of the types in which keys and values are kept."""

_FLASH_ATTENTION_ON = 1
_LOAD_MMAP = 1
_DEBUG, _INFO, _WARN, _ERROR = 1, 2, 3, 4
_KEPT_LINES = 8


class ModelParams(ctypes.Structure):
    """`llama_model_params`."""

    _fields_: ClassVar = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class ContextParams(ctypes.Structure):
    """`llama_context_params`."""

    _fields_: ClassVar = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", EvalCallback),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_: ClassVar = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class GgmlInitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_: ClassVar = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


# What the pinned release answers when it is asked for its defaults. A record that is laid out otherwise shows here.
_MODEL_DEFAULTS = {
    "devices": None, "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0, "kv_overrides": None,
    "vocab_only": False, "check_tensors": False, "use_extra_bufts": True, "no_host": False, "no_alloc": False,
}  # fmt: skip
_CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "n_outputs_max_per_seq": 1,
    "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1,
    "yarn_ext_factor": -1.0, "yarn_beta_slow": -1.0, "yarn_orig_ctx": 0, "defrag_thold": -1.0,
    "type_k": 1, "type_v": 1, "moe_cache_size": 0, "embeddings": False, "offload_kqv": True, "no_perf": True,
    "op_offload": True, "swa_full": True, "kv_unified": False, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LogCallback, c_void_p]),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_model_free": (None, [c_void_p]),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
    "llama_free": (None, [c_void_p]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_model_n_layer": (c_int32, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_n_ctx_seq": (c_uint32, [c_void_p]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_get_logits": (c_void_p, [c_void_p]),
    "llama_set_embeddings": (None, [c_void_p, c_bool]),
    "llama_get_embeddings": (c_void_p, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_state_seq_get_size": (c_size_t, [c_void_p, c_int32]),
    "llama_state_seq_get_data": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
    "llama_state_seq_set_data": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
    "llama_supports_gpu_offload": (c_bool, []),
    "llama_print_system_info": (c_char_p, []),
    "ggml_get_name": (c_void_p, [c_void_p]),
    "ggml_nelements": (c_int64, [c_void_p]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_is_contiguous": (c_bool, [c_void_p]),
    "ggml_init": (c_void_p, [GgmlInitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor_3d": (c_void_p, [c_void_p, c_int32, c_int64, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph_custom": (c_void_p, [c_void_p, c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_graph_compute_with_ctx": (c_int32, [c_void_p, c_void_p, c_int32]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (c_void_p, [c_size_t]),
    "ggml_backend_dev_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_description": (c_char_p, [c_void_p]),
    "ggml_backend_dev_type": (c_int32, [c_void_p]),
    "ggml_backend_dev_memory": (None, [c_void_p, POINTER(c_size_t), POINTER(c_size_t)]),
}


class LlamaLibrary:
    """The loaded library. Its functions are attributes of `c`; what it logs is kept to explain failures."""

    def __init__(self, path: Path) -> None:
        try:
            self.c = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendError(
                f"llama.cpp's library cannot be loaded: {error}",
                hint=f"install its wheel again: {INSTALL_HINT}",
            ) from error
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()
        self._log_callback = LogCallback(self._take_line)
        self._declare()
        self.model_defaults = self._defaults("llama_model_default_params", ModelParams, _MODEL_DEFAULTS)
        self.context_defaults = self._defaults(
            "llama_context_default_params", ContextParams, _CONTEXT_DEFAULTS
        )
        self.c.llama_log_set(self._log_callback, None)
        self.c.llama_backend_init()

    def failure(self) -> str:
        """The library's own last words about what went wrong."""
        with self._lock:
            words = "; ".join(self._lines)
            self._lines.clear()
        return words or "llama.cpp gives no reason"

    def system(self) -> str:
        """What it was built with and found on this machine."""
        text: bytes = self.c.llama_print_system_info()
        return text.decode(errors="replace").strip()

    def _declare(self) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self.c, name)
            except AttributeError as error:
                raise _wrong(f"it has no {name}") from error
            function.restype, function.argtypes = result, arguments

    def _defaults(self, name: str, record: type[ctypes.Structure], expected: dict[str, Any]) -> Any:
        """The defaults of a parameter record, if they stand where they should."""

        class Padded(ctypes.Structure):
            # A longer record than ours is written here, not over something else.
            _fields_: ClassVar = [("known", record), ("beyond", c_uint64 * 64)]

        function = getattr(self.c, name)
        function.restype, function.argtypes = Padded, []
        found = function()
        values = {field: getattr(found.known, field) for field in expected}
        if values != expected:
            raise _wrong(f"its {record.__name__} are laid out in another way")
        return found.known

    def _take_line(self, level: int, text: bytes | None, _: Any) -> None:
        line = (text or b"").decode(errors="replace").strip()
        if not line:
            return
        if level in (_WARN, _ERROR):
            with self._lock:
                self._lines.append(line)
        log.debug("llama.cpp: %s", line)


def is_installed() -> bool:
    """Whether the wheel is here, in whatever release."""
    return importlib.util.find_spec(PACKAGE) is not None


def is_usable() -> bool:
    """Whether the wheel is here in the release that is accepted."""
    return installed_version() == VERSION


def installed_version() -> str | None:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def open_library() -> LlamaLibrary:
    """The library, loaded once. BackendError where it is missing or of another release."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise BackendError(
            f"the llamacpp backend needs {PACKAGE} {VERSION}, which is not installed", hint=INSTALL_HINT
        )
    version = installed_version()
    if version != VERSION:
        raise _wrong(f"it is {version}, and {VERSION} is needed")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob(f"{PACKAGE}*")):
            if path.suffix in (".so", ".dylib", ".pyd"):
                return LlamaLibrary(path)
    raise _wrong("it holds no library")


def _wrong(fault: str) -> BackendError:
    return BackendError(
        f"the installed {PACKAGE} cannot be used: {fault}", hint=f"pip install '{PACKAGE}=={VERSION}'"
    )

"""Checkpoint, a model opened for reading: its spec, layout, tensors and tokenizer, from any kind of file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcompute.backends.llamacpp.library import is_installed
from shardcompute.core.closing import Closing
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families import (
    LONG_FACTORS,
    UnknownTensorsError,
    from_fallback_config,
    from_foreign_gguf,
    from_gguf,
    from_hf_config,
    is_foreign,
    rope_factors_tensor,
)
from shardcompute.models.families import is_fallback as is_fallback_spec
from shardcompute.models.layout import EMBEDDING, Layout
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.weights.adapters import Adapter, open_adapter, open_adapters
from shardcompute.weights.formats.gguf_parts import open_gguf_files
from shardcompute.weights.formats.mlx_file import open_mlx, without_mlx
from shardcompute.weights.formats.safetensors_file import open_safetensors, open_sharded
from shardcompute.weights.formats.tensor_file import TensorFile, find_entry, read_vector
from shardcompute.weights.loader import ShardTensors, check_stage, place_bytes, stage_bytes
from shardcompute.weights.merged import MergedTensors, adapter_digest
from shardcompute.weights.quantised.folded_file import stored_file
from shardcompute.weights.quantised.schemes import open_quantised, quantization_of, spare_biases
from shardcompute.weights.sources.resolve import ModelFiles

if TYPE_CHECKING:
    from shardcompute.models.tokenizer import Tokenizer

PROCESSOR_FILE = "preprocessor_config.json"
ReadText = Callable[[str], str | None]
"""The text of a file by its name, None where there is no such file."""
_PLAIN = ("F32", "F16", "BF16", "I64", "I32")
"""Number types that `transformers` is given."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Checkpoint(Closing):
    """An open model. Close it when all that is wanted has been read."""

    name: str
    spec: ModelSpec
    layout: Layout
    tensors: TensorFile
    files: ModelFiles
    config: Mapping[str, Any]
    quantization: str = ""
    """How matrices lie in several tensors, as JSON (see `weights.quantised.schemes`); empty where they do not."""

    empty: tuple[str, ...] = ()
    """Stored biases that the family does not have: they must be zero."""

    adapters: tuple[Adapter, ...] = ()
    """Kept beside the weights, for whoever chooses one of them."""
    merged: str = ""
    """What tells the adapter that was merged into `tensors`; "": none was."""

    def with_adapters(self, folders: Mapping[str, Path]) -> Checkpoint:
        """With adapters beside the weights, by name; this checkpoint is closed by closing the new one."""
        self._refuse_adapters(bool(folders))
        adapters = open_adapters(folders, self.spec, self.layout, is_gguf=self.files.kind == "gguf")
        return replace(self, adapters=adapters)

    def with_merged(self, folder: Path) -> Checkpoint:
        """With an adapter in the weights, which are those of a model of their own then."""
        self.check_mergeable()
        adapter = open_adapter("merged", folder, self.spec, self.layout, is_gguf=False, is_merged=True)
        return replace(self, tensors=MergedTensors(self.tensors, adapter), merged=adapter_digest(adapter))

    def check_mergeable(self) -> None:
        """UnsupportedModelError where no adapter can be merged into its weights."""
        self._refuse_adapters(has_any=True)
        if self.quantization or self.files.kind == "gguf" or stored_file(self.tensors) is not self.tensors:
            raise UnsupportedModelError(
                f"an adapter is merged into plain numbers of a safetensors checkpoint, and {self.name} is none",
                hint="keep the adapter beside the model with --adapter, or take the base in 16 bits",
            )

    def _refuse_adapters(self, has_any: bool) -> None:
        if has_any and (is_fallback_spec(self.spec) or is_foreign(self.spec)):
            raise UnsupportedModelError(
                f"{self.name} is run by another library, which takes no adapters here",
                hint="merge the adapter into its base with PEFT and serve that",
            )

    def source(self, stage: Stage, *, form: str = "native") -> ShardTensors:
        """The tensors of one shard, checked against the config before anything is read."""
        self.check_empty()
        check_stage(self.tensors, self.layout, stage.start, stage.stop)
        return ShardTensors(self.tensors, self.layout, form=form)

    def check_empty(self) -> None:
        """UnsupportedModelError where a bias that would be left out is not zero."""
        for name in self.empty:
            if read_vector(self.tensors, name).any():
                raise UnsupportedModelError(
                    f"{name} in {self.tensors.name} is a bias that a {self.spec.family} model does not have",
                    hint="it is a variant we would run wrongly; use another version of the model",
                )

    def stage_bytes(self, stage: Stage) -> int:
        """File bytes of a stage, with the embedding at the first and the head at the last."""
        total = stage_bytes(self.tensors, self.layout, stage.start, stage.stop)
        for name, place in self.layout.model.items():
            if stage.is_first if name.startswith(EMBEDDING) else stage.is_last:
                total += place_bytes(self.tensors, place)
        return total

    def tokenizer(self) -> Tokenizer:
        if self.files.kind == "gguf":
            from shardcompute.models.tokenizer import Tokenizer

            return Tokenizer.from_gguf(self.tensors.metadata)
        return read_tokenizer(self.files, self.config)

    def close(self) -> None:
        self.tensors.close()
        self.files.close()


def open_checkpoint(files: ModelFiles, *, is_fallback: bool = False) -> Checkpoint:
    """Read headers and config; no weights. A model that no family of ours knows, or any with `is_fallback`, is one for
    `transformers`."""
    with contextlib.ExitStack() as on_error:
        on_error.callback(files.close)
        tensors = open_tensors(files)
        on_error.callback(tensors.close)
        scheme, empty = "", tuple[str, ...]()
        if files.kind == "gguf":
            config: dict[str, Any] = {}
            spec, layout = _read_gguf(tensors)
        else:
            config = read_config(files)
            plain, quantization = without_mlx(config)
            if quantization is not None:
                tensors = open_mlx(tensors, quantization)
            plain, scheme = quantization_of(plain)
            tensors = open_quantised(tensors, scheme)
            spare = spare_biases(stored_file(tensors).entries, scheme)
            spec, layout = _read_hf(plain, tensors, spare, is_quantised=bool(scheme), is_fallback=is_fallback)
            if not is_fallback_spec(spec):
                spec, layout = _with_vision(spec, layout, plain, tensors, files)
            used = {place.stored for part in (layout.model, *layout.layers) for place in part.values()}
            empty = tuple(name for name in spare if name not in used)
        on_error.pop_all()
        return Checkpoint(files.name, spec, layout, tensors, files, config, scheme, empty)


def adapted(checkpoint: Checkpoint, beside: Mapping[str, Path], merged: Path | None) -> Checkpoint:
    """The checkpoint with adapters; what was opened is closed where that cannot be."""
    with contextlib.ExitStack() as on_error:
        on_error.callback(checkpoint.close)
        if merged is not None:
            checkpoint = checkpoint.with_merged(merged)
        if beside:
            checkpoint = checkpoint.with_adapters(beside)
        on_error.pop_all()
        return checkpoint


def _read_hf(
    config: Mapping[str, Any],
    tensors: TensorFile,
    spare: tuple[str, ...],
    *,
    is_quantised: bool,
    is_fallback: bool,
) -> tuple[ModelSpec, Layout]:
    """As one of our families, or as one for `transformers`, where its tensors are plain numbers."""
    if is_fallback and is_quantised:
        raise UnsupportedModelError(
            "transformers is given plain numbers here, and the checkpoint is quantised",
            hint="leave --backend away if it is of a known family, or take the checkpoint in 16 bits",
        )
    if is_fallback:
        return from_fallback_config(config, _shapes(tensors))
    try:
        return from_hf_config(config, set(tensors.entries), spare)
    except UnsupportedModelError as error:
        # Neither would `transformers` read tensors that are not the family's.
        is_other = is_quantised or isinstance(error, UnknownTensorsError)
        if is_other or any(entry.dtype not in _PLAIN for entry in tensors.entries.values()):
            raise
        with contextlib.suppress(UnsupportedModelError):
            return from_fallback_config(config, _shapes(tensors))
        raise error


def _with_vision(
    spec: ModelSpec, layout: Layout, config: Mapping[str, Any], tensors: TensorFile, files: ModelFiles
) -> tuple[ModelSpec, Layout]:
    from shardcompute.models.vision.families import with_vision

    def shape_of(name: str) -> tuple[int, ...]:
        return find_entry(tensors, name).shape

    return with_vision(spec, layout, config, set(tensors.entries), shape_of, lambda: read_processor(files))


def _shapes(tensors: TensorFile) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in tensors.entries.items()}


def _factors(tensors: TensorFile, name: str | None) -> list[float] | None:
    if name is None or name not in tensors.entries:
        return None
    return [float(factor) for factor in read_vector(tensors, name)]


def _read_gguf(tensors: TensorFile) -> tuple[ModelSpec, Layout]:
    """As one of our families, or as one that only llama.cpp knows, where it is installed."""
    try:
        factors = _factors(tensors, rope_factors_tensor(tensors.entries))
        long_factors = _factors(tensors, LONG_FACTORS)
        return from_gguf(tensors.metadata, set(tensors.entries), factors, long_factors)
    except UnsupportedModelError:
        if not is_installed():
            raise
        return from_foreign_gguf(
            tensors.metadata, {name: entry.shape for name, entry in tensors.entries.items()}
        )


def read_tokenizer(files: ModelFiles, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder."""
    return make_tokenizer(files.name, files.read_text, model_eos(config))


def model_eos(config: Mapping[str, Any]) -> Any:
    """The tokens that end a text, as a config has them; of a model that also sees, those of its text part."""
    text = config.get("text_config")
    inner = text.get("eos_token_id") if isinstance(text, Mapping) else None
    return config.get("eos_token_id", inner)


def make_tokenizer(model: str, read_text: ReadText, model_eos: Any) -> Tokenizer:
    """From the `TOKENIZER_FILES` of a Hugging Face folder, wherever they are read from."""
    text = read_text("tokenizer.json")
    if text is None:
        raise CorruptModelError(
            f"{model} has no tokenizer.json", hint="convert its tokenizer to tokenizer.json first"
        )
    from shardcompute.models.tokenizer import Tokenizer

    return Tokenizer.from_hf(
        text,
        tokenizer_config=_read_json(model, read_text, "tokenizer_config.json"),
        chat_template=read_text("chat_template.jinja"),
        special_tokens_map=_read_json(model, read_text, "special_tokens_map.json"),
        generation_config=_read_json(model, read_text, "generation_config.json"),
        model_eos=model_eos,
    )


def read_config(files: ModelFiles) -> dict[str, Any]:
    config = _read_json(files.name, files.read_text, "config.json")
    if config is None:
        raise CorruptModelError(f"{files.name} has no config.json", hint="fetch the model again")
    return config


def read_processor(files: ModelFiles) -> Mapping[str, Any] | None:
    """The settings of a model's image processor; None where there is no file of them."""
    processor = _read_json(files.name, files.read_text, "processor_config.json") or {}
    inner = processor.get("image_processor")
    return inner if isinstance(inner, dict) else _read_json(files.name, files.read_text, PROCESSOR_FILE)


def open_tensors(files: ModelFiles, *, with_tokenizer: bool = True) -> TensorFile:
    """The tensors as the files have them; headers are read, and no config. Without the tokenizer that a GGUF file has
    in its header, nothing is made of it."""
    if files.kind == "gguf":
        return open_gguf_files(files.open, files.weight_files, with_tokenizer=with_tokenizer)
    main = files.open(files.main_file)
    with contextlib.ExitStack() as on_error:
        on_error.callback(main.close)
        if files.main_file.endswith(".json"):
            return open_sharded(files.open, bytes(main.read(0, main.size)))
        tensors = open_safetensors(main)
        on_error.pop_all()
        return tensors


def _read_json(model: str, read_text: ReadText, name: str) -> dict[str, Any] | None:
    text = read_text(name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(
            f"{name} of {model} is not JSON: {error}", hint="fetch the model again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptModelError(f"{name} of {model} is not a JSON object", hint="fetch the model again")
    return value

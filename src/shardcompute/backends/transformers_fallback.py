"""Fallback to `transformers`: any causal model that it knows and our families do not, cut between its layers.

The model's own modules compute. A slice keeps the layers `[start, stop)` in the model and drops the others; hooks
feed the first of them with the rows that came from the slice before (whatever the model did to its embeddings is
discarded there) and take the rows behind the last one. Before it is cut, the whole model computes a short prompt;
the slice must then give the same rows and survive a truncation, or the model is refused. Slower than a family of
ours: one segment at a time, no quantisation, no graphs, and all weights are read before most are dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from shardcompute.backends.executor import ExecutorOptions, KvUsage, SynchronousSteps
from shardcompute.backends.kv import PageBudget
from shardcompute.backends.matrix import Array
from shardcompute.backends.torch.device import choose_device, choose_dtype
from shardcompute.core.batch import PAGE_TOKENS, Segment, count_rows
from shardcompute.core.errors import CapacityError, UnsupportedModelError, UsageError

_PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
_CUT = 5


def layer_count(folder: Path) -> int:
    """How many decoder layers the model in `folder` has."""
    return int(_read_config(folder).num_hidden_layers)


def context_length(folder: Path) -> int:
    """How many tokens the model in `folder` was made for; a thousand where its config does not say."""
    return int(getattr(_read_config(folder), "max_position_embeddings", None) or 1024)


def vocab_size(folder: Path) -> int:
    return int(_read_config(folder).vocab_size)


class TransformersExecutor(SynchronousSteps):
    """See Executor. Layers `[stage_start, stage_stop)` of the model in `folder`, embedding and head at its ends."""

    def __init__(self, folder: Path, stage_start: int, stage_stop: int, options: ExecutorOptions) -> None:
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        if device.type == "cpu":
            torch.set_num_threads(options.threads)
        self._slice = _load_slice(folder, stage_start, stage_stop, dtype)
        token_bytes = self._slice.check()
        self._slice.to(device)
        page_bytes = token_bytes * PAGE_TOKENS
        self._budget = PageBudget(page_bytes, options.kv_bytes // page_bytes, options.context_length)
        if self._budget.total_pages < 1:
            raise CapacityError(
                f"{options.kv_bytes} bytes of KV memory do not hold one page ({page_bytes} bytes)",
                hint="give more with --kv-memory",
            )
        self._max_rows = options.max_rows
        self._caches: dict[int, Any] = {}
        self._hidden: Array = np.empty((0, self._slice.hidden), dtype=np.float32)

    @property
    def hidden(self) -> int:
        return self._slice.hidden

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        rows = count_rows(segments)
        expected = (rows,) if self._slice.is_first else (rows, self._slice.hidden)
        if inputs.shape != expected or rows > self._max_rows:
            raise UsageError(
                f"a step of {rows} rows (at most {self._max_rows}) got inputs of shape {inputs.shape}"
            )
        if self._slice.is_first and not 0 <= inputs.min() <= inputs.max() < self._slice.vocab_size:
            raise UsageError(f"token ids must lie in [0, {self._slice.vocab_size})")
        self._budget.check(segments)
        tensor = torch.from_numpy(np.array(inputs))
        results, hidden, row = [], [], 0
        for segment in segments:
            cache = self._caches.setdefault(segment.session, DynamicCache())
            truncate(cache, segment.start)
            part = tensor[row : row + segment.count]
            results.append(
                self._slice.run(part, segment.start, segment.logit_rows, cache, keeps_hidden=keeps_hidden)
            )
            hidden.append(self._slice.hidden_rows)
            self._budget.take(segment)
            row += segment.count
        if keeps_hidden:
            self._hidden = torch.cat(hidden).float().cpu().numpy()
        joined: Array = torch.cat(results).float().cpu().numpy()
        return joined

    def hidden_rows(self) -> Array:
        return self._hidden

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        raise CapacityError("models that run through transformers share no memory between sessions")

    def close_session(self, session: int) -> None:
        self._budget.release(session)
        self._caches.pop(session, None)

    def session_length(self, session: int) -> int:
        return self._budget.lengths.get(session, 0)

    def sessions(self) -> list[int]:
        return list(self._budget.lengths)

    def kv_usage(self) -> KvUsage:
        return self._budget.usage()

    def close(self) -> None:
        self._caches.clear()


def truncate(cache: Any, length: int) -> None:
    """Forget everything from position `length` on."""
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)


@dataclass(frozen=True, slots=True)
class _Truth:
    """What the whole model computed: rows into the slice and out of it."""

    inputs: torch.Tensor
    outputs: torch.Tensor


class _Slice:
    """A model that has only its layers `[start, stop)` left."""

    def __init__(self, model: Any, owner: Any, name: str, start: int, stop: int) -> None:
        layers = getattr(owner, name)
        self.is_first = start == 0
        self.is_last = stop == len(layers)
        self.hidden = int(model.config.get_text_config().hidden_size)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._truth = _compute_truth(model, layers, start, stop)
        kept = torch.nn.ModuleList(layers[start:stop])
        setattr(owner, name, kept)
        _renumber(model, kept, start, stop)
        if not self.is_first:
            model.set_input_embeddings(torch.nn.Identity())
        # Without its head, the model is run as far as its last hidden rows.
        self._model = model if self.is_last else model.base_model
        self._accepts = set(inspect.signature(self._model.forward).parameters)
        self._fed: torch.Tensor | None = None
        self._taken: torch.Tensor | None = None
        self.hidden_rows = torch.empty((0, self.hidden))
        """Of the last run's logit rows, where they were to be kept."""
        kept[0].register_forward_pre_hook(self._feed, with_kwargs=True)
        kept[-1].register_forward_hook(self._take)

    def to(self, device: torch.device) -> None:
        self._model.to(device)

    def run(
        self, inputs: torch.Tensor, start: int, logit_rows: int, cache: Any, *, keeps_hidden: bool = False
    ) -> torch.Tensor:
        """Rows of one session behind the slice, or the logits of the last `logit_rows` of them."""
        device = next(self._model.parameters()).device
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if "position_ids" in self._accepts:
            options["position_ids"] = torch.arange(start, start + len(inputs), device=device)[None]
        if self.is_first:
            options["input_ids"] = inputs.to(device)[None]
        else:
            dtype = next(self._model.parameters()).dtype
            options["inputs_embeds"] = self._fed = inputs.to(device, dtype)[None]
        if self.is_last and "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = max(logit_rows, 1)
        if self.is_last and keeps_hidden:
            options["output_hidden_states"] = True
        with torch.inference_mode():
            result = self._model(**options)
        if not self.is_last:
            assert self._taken is not None
            return self._taken[0]
        if keeps_hidden:
            self.hidden_rows = result.hidden_states[-1][0, len(inputs) - logit_rows :]
        logits: torch.Tensor = result.logits[0]
        return logits[len(logits) - logit_rows :]

    def check(self) -> int:
        """Compute the truth again, in two steps and with a truncation; the bytes of KV per token."""
        truth = self._truth
        cache = DynamicCache()
        outputs = []
        try:
            self.run(truth.inputs[:_CUT], 0, 1, cache)
            self.run(truth.inputs[:2], _CUT, 1, cache)
            token_bytes = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
            truncate(cache, 0)
            outputs.append(self.run(truth.inputs[:_CUT], 0, _CUT, cache))
            self.run(truth.inputs[:2], _CUT, 1, cache)
            truncate(cache, _CUT)
            outputs.append(self.run(truth.inputs[_CUT:], _CUT, len(_PROMPT) - _CUT, cache))
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError) as error:
            raise _refusal(f"its layers cannot be run apart: {error}") from error
        ours = torch.cat(outputs).float()
        gap = (ours - truth.outputs).norm() / truth.outputs.norm()
        if not gap < (1e-3 if next(self._model.parameters()).dtype == torch.float32 else 3e-2):
            raise _refusal(f"its layers compute something else when they are cut apart (error {gap:.1e})")
        return int(token_bytes) // (_CUT + 2)

    def _feed(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._fed is None:
            return None
        fed, self._fed = self._fed, None
        if args:
            return (fed, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": fed}

    def _take(self, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        self._taken = _rows(output)


def _load_slice(folder: Path, start: int, stop: int, dtype: torch.dtype) -> _Slice:
    config = _read_config(folder)
    if not 0 <= start < stop <= config.num_hidden_layers:
        raise UsageError(f"no such stage: [{start}, {stop}) of {config.num_hidden_layers} layers")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        ).eval()
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise _refusal(f"transformers cannot load it: {error}") from error
    owner, name = _find_layers(model, int(config.num_hidden_layers))
    return _Slice(model, owner, name, start, stop)


def _read_config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
    except (ValueError, KeyError, OSError) as error:
        raise _refusal(f"transformers does not know it: {error}") from error
    if not hasattr(text, "num_hidden_layers"):
        raise _refusal("its configuration does not say how many layers it has")
    return text


def _find_layers(model: Any, count: int) -> tuple[Any, str]:
    """The module that owns the list of decoder layers, and the list's name in it."""
    found = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]
    if len(found) != 1:
        raise _refusal(f"it has {len(found)} lists of {count} layers where one is expected")
    return found[0]


def _compute_truth(model: Any, layers: Any, start: int, stop: int) -> _Truth:
    ids = torch.tensor(_PROMPT) % int(model.config.get_text_config().vocab_size)
    seen: dict[str, torch.Tensor] = {}

    def note_input(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["in"] = args[0] if args else kwargs["hidden_states"]

    def note_output(layer: Any, args: tuple[Any, ...], output: Any) -> None:
        seen["out"] = _rows(output)

    hooks = [
        layers[start].register_forward_pre_hook(note_input, with_kwargs=True),
        layers[stop - 1].register_forward_hook(note_output),
    ]
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits
    for hook in hooks:
        hook.remove()
    inputs, outputs = seen["in"][0], seen["out"][0]
    if inputs.dim() != 2 or inputs.shape != outputs.shape:
        raise _refusal(f"its layers pass on {tuple(outputs.shape)} where rows of one width are expected")
    last = logits[0] if stop == len(layers) else outputs
    return _Truth(ids if start == 0 else inputs, last.float())


def _renumber(model: Any, kept: Any, start: int, stop: int) -> None:
    """Layers find their KV, and models their kinds of layers, by number: they count from 0 now."""
    for module in kept.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx -= start
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        if getattr(config, "num_hidden_layers", None) is not None:
            config.num_hidden_layers = stop - start
        if vars(config).get("layer_types") is not None:
            config.layer_types = config.layer_types[start:stop]


def _rows(output: Any) -> torch.Tensor:
    rows: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return rows


def _refusal(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this model cannot be run through transformers: {reason}", hint="choose a model of a known family"
    )

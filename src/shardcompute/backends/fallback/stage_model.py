"""A model of `transformers` that has only some of its layers: built empty, cut, and given its own tensors.

The model's own `forward` runs. Layers that are elsewhere are stand-ins: those before the stage pass on what nobody
looks at, the first held layer is given the rows that came in, and the stand-in behind the last one takes the rows that
it is called with and ends the run there. Positions, masks and rotary embeddings are thereby made by the model itself,
layers keep their numbers, and whatever happens between two layers happens in the stage before the cut.

A stage is checked when it is opened: its rows must not depend on what the stand-ins pass on, which they would where
layers share more than rows, and must be the same in several steps and after a cut.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from shardcompute.backends.fallback.configuration import (
    as_refusal,
    read_causal_config,
    refusal,
    text_config,
)
from shardcompute.backends.fallback.sessions import CachedSession, StageCache
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError

_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_SPARE_ELEMENTS = 1 << 20
_MOST_BUFFER_BYTES = 512 << 20
_PROBE_ROWS, _PROBE_CUT = 8, 5
_ROW_BY_ROW = {"mamba", "falcon_mamba", "jamba"}
"""Model types whose layers take up a recurrent state for one row at a time only."""
_OTHER_MEDIA = re.compile(r"vision|visual|audio|image|multi_modal")
_ARITIES = (0, 2, 1, 3)
_building = threading.Lock()
"""Number formats and devices are the process's while a model is built."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that is read when it is wanted: its number type as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """As `transformers` asks for a tensor of a file."""
        # In memory of torch's own: where numbers lie chooses among kernels, and is the same in every stage then.
        tensor = torch.empty(self.shape, dtype=_TYPES[self.dtype])
        if tensor.numel():
            content = np.frombuffer(self.read(), dtype=np.uint8)
            tensor.view(-1).view(torch.uint8).numpy()[:] = content
        return tensor[index]


@dataclass(frozen=True, slots=True)
class FallbackStage:
    """Layers `[start, stop)` of the model that `config` describes, and the tensors that they and its ends need."""

    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    start: int
    stop: int
    total: int

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.total


@dataclass(frozen=True, slots=True)
class SessionBytes:
    """What a session takes: for each token, and whatever its length."""

    token_bytes: int
    state_bytes: int


class _StageEnd(Exception):  # noqa: N818 - no error: how a run ends before the model does
    """The rows behind the stage are there."""


class _StepsDifferError(Exception):
    """Rows in several steps are not what they are in one."""


class StageModel:
    """A model with layers `[start, stop)` alone. One caller at a time."""

    def __init__(self, stage: FallbackStage, device: torch.device, dtype: torch.dtype) -> None:
        config = read_causal_config(stage.config)
        self._text = text_config(config)
        if self._text.num_hidden_layers != stage.total:
            raise CorruptModelError(
                f"the configuration counts {self._text.num_hidden_layers} layers and the weights {stage.total}",
                hint="fetch the model again",
            )
        self.stage = stage
        self.hidden = int(self._text.hidden_size)
        self.vocab_size = int(self._text.vocab_size)
        self._cut = _StageCut(stage)
        self._model = _load(config, stage, self._cut, device, dtype)
        self._device, self._dtype = device, dtype
        accepts = inspect.signature(self._model.forward).parameters
        self._accepts = set(accepts)
        takes_more = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepts.values())
        inner = getattr(self._model, self._model.base_model_prefix, None)
        if takes_more and inner is not None:
            self._accepts |= set(inspect.signature(inner.forward).parameters)
        self.hidden_rows = torch.empty((0, self.hidden))
        """Of the last run's logit rows: what the head made logits of."""
        self._head_inputs: torch.Tensor | None = None
        if stage.is_last:
            head = self._model.get_output_embeddings()
            if head is None:
                raise refusal("its head cannot be told from its layers")
            head.register_forward_pre_hook(self._note_head)
        self._embedding_width = self._cut.embedding_width or self.hidden
        self._is_row_by_row = getattr(config, "model_type", "") in _ROW_BY_ROW

    def open_session(self) -> CachedSession:
        try:
            return CachedSession(self._new_cache)
        except Exception as error:
            raise as_refusal(error, "its cache cannot be made") from error

    def run(self, session: CachedSession, rows: torch.Tensor, start: int, logit_rows: int) -> torch.Tensor:
        """Rows of a session from position `start` on: what comes behind the stage or, from the last one, the logits of
        the last `logit_rows` of them. Truncates the session at `start` first."""
        wanted = logit_rows if self.stage.is_last else len(rows)
        again = session.cut(start)
        if again is not None:
            rows = torch.cat([again.to(rows.dtype), rows])
        session.begin(rows)
        cache, is_single = session.cache, self._is_row_by_row and session.cache.length > 0
        results, hidden = [], []
        for part in rows.split(1) if is_single else (rows,):
            results.append(self._forward(part, cache.length, cache, min(max(wanted, 1), len(part))))
            cache.length += len(part)
            if self._head_inputs is not None:
                hidden.append(self._head_inputs)
        if hidden:
            self.hidden_rows = _last(torch.cat(hidden), wanted)
        return _last(torch.cat(results), wanted)

    def measure(self) -> SessionBytes:
        """Check that the stage can be run apart from the others; what a session of it takes. UnsupportedModelError
        where it cannot."""
        try:
            self._learn_arity()
            try:
                return self._check()
            except _StepsDifferError:
                if self._is_row_by_row or not self.open_session().cache.is_recurrent:
                    raise
            self._is_row_by_row = True
            return self._check()
        except _StepsDifferError as error:
            raise refusal(f"its layers compute something else step by step (error {error})") from error
        except (UnsupportedModelError, CorruptModelError):
            raise
        except Exception as error:
            if is_out_of_memory_like(error):
                raise
            raise as_refusal(error, "its layers cannot be run apart") from error

    # Inside

    def _new_cache(self) -> StageCache:
        stage = self.stage
        return StageCache(self._text, stage.start, stage.stop, stage.total)

    def _forward(self, rows: torch.Tensor, start: int, cache: StageCache, kept_logits: int) -> torch.Tensor:
        cut, count = self._cut, len(rows)
        options: dict[str, Any] = {"use_cache": True}
        options["cache_params" if "cache_params" in self._accepts else "past_key_values"] = cache
        positions = torch.arange(start, start + count, device=self._device)
        if "position_ids" in self._accepts:
            options["position_ids"] = positions[None]
        if "cache_position" in self._accepts:
            options["cache_position"] = positions
        if self.stage.is_first:
            options["input_ids"] = rows.to(self._device, torch.long)[None]
        else:
            shape = (1, count, self._embedding_width)
            options["inputs_embeds"] = cut.noise(shape, self._device, self._dtype)
            cut.fed = rows.to(self._device, self._dtype)[None]
        if self.stage.is_last and "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = kept_logits
        try:
            with torch.inference_mode():
                logits: torch.Tensor = self._model(**options).logits[0]
        except _StageEnd:
            assert cut.taken is not None
            taken, cut.taken = cut.taken, None
            if taken.dim() != 3 or taken.shape[1:] != (count, self.hidden):
                raise refusal(f"its layers pass on {tuple(taken.shape)} where rows are expected") from None
            return taken[0]
        finally:
            cut.fed = None
        if not self.stage.is_last:
            raise refusal("its layers are not run one after the other")
        return logits

    def _note_head(self, head: Any, args: tuple[Any, ...]) -> None:
        self._head_inputs = args[0].reshape(-1, args[0].shape[-1])

    def _probe(self, session: CachedSession, inputs: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return self.run(session, inputs[start:stop], start, stop - start)

    def _learn_arity(self) -> None:
        """Find out what the model expects its layers to return: rows, or rows and something more."""
        for arity in _ARITIES:
            self._cut.arity = arity
            try:
                self._probe(self.open_session(), self._probe_rows(), 0, _PROBE_ROWS)
                return
            except (ValueError, TypeError, IndexError):
                if self.stage.is_first or arity == _ARITIES[-1]:
                    raise

    def _check(self) -> SessionBytes:
        inputs = self._probe_rows()
        session = self.open_session()
        whole = self._probe(session, inputs, 0, _PROBE_ROWS)
        if not bool(torch.isfinite(whole).all()):
            raise refusal("its layers give no finite numbers")
        token_bytes = -(-session.cache.kv_bytes() // _PROBE_ROWS)
        state_bytes = session.cache.state_bytes()
        with self._cut.noisy():
            other = self._probe(self.open_session(), inputs, 0, _PROBE_ROWS)
        if not torch.equal(whole, other):
            raise refusal(
                "its layers need more of those before them than their rows",
                "serve it from one machine that holds all of it (`run`, or `load --parallel pp=1`)",
            )
        session = self.open_session()
        parts = [self._probe(session, inputs, 0, _PROBE_CUT)]
        self._probe(session, inputs, _PROBE_CUT, _PROBE_CUT + 2)
        parts.append(self._probe(session, inputs, _PROBE_CUT, _PROBE_CUT + 1))
        parts.append(self._probe(session, inputs, _PROBE_CUT + 1, _PROBE_ROWS))
        gap = (torch.cat(parts).float() - whole.float()).norm() / whole.float().norm().clamp_min(1e-30)
        if not gap < (1e-3 if self._dtype == torch.float32 else 5e-2):
            raise _StepsDifferError(f"{gap:.1e}")
        return SessionBytes(int(token_bytes), int(state_bytes))

    def _probe_rows(self) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(7)
        if self.stage.is_first:
            return torch.randint(0, self.vocab_size, (_PROBE_ROWS,), generator=numbers)
        return torch.randn((_PROBE_ROWS, self.hidden), generator=numbers)


class _StageCut:
    """What stand-ins and the held layers between them hand to each other."""

    def __init__(self, stage: FallbackStage) -> None:
        self._stage = stage
        self.fed: torch.Tensor | None = None
        self.taken: torch.Tensor | None = None
        self.embedding_width = 0
        self.arity = 0
        """Of what stand-ins return: 0 for the rows by themselves, else a tuple that begins with them."""
        self._is_noisy = False

    @contextlib.contextmanager
    def noisy(self) -> Iterator[None]:
        """What nobody should look at is not zero but noise inside the block."""
        self._is_noisy = True
        try:
            yield
        finally:
            self._is_noisy = False

    def noise(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if self._is_noisy:
            return torch.randn(shape, device=device, dtype=dtype)
        return torch.zeros(shape, device=device, dtype=dtype)

    def apply(self, model: Any, total: int) -> None:
        """Drop what the stage does not hold from an empty model."""
        _drop_other_media(model)
        owner, name = find_layers(model, total)
        layers, stage = getattr(owner, name), self._stage
        embedding = model.get_input_embeddings()
        self.embedding_width = int(embedding.weight.shape[-1])
        for index in range(total):
            if not stage.start <= index < stage.stop:
                layers[index] = _StandIn(layers[index], self, is_behind=index >= stage.stop)
        is_tied = bool(model.all_tied_weights_keys)
        keeps_both = is_tied and stage.is_last
        if not stage.is_first and not keeps_both:
            model.set_input_embeddings(_EmptyTable(self.embedding_width))
        if not stage.is_last:
            model.set_output_embeddings(torch.nn.Identity())
        if is_tied and not keeps_both:
            model.all_tied_weights_keys = {}
            for each in model.modules():
                if getattr(each, "_tied_weights_keys", None):
                    each._tied_weights_keys = None
        for index in range(stage.start, stage.stop):
            layers[index].register_forward_pre_hook(self._feed, with_kwargs=True)

    def pass_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_behind: bool) -> Any:
        rows: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        if is_behind:
            self.taken = rows
            raise _StageEnd
        passed = self.noise(tuple(rows.shape), rows.device, rows.dtype)
        return (passed, *(None,) * (self.arity - 1)) if self.arity else passed

    def _feed(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the first held layer what came in, and each of them rows that lie in one piece: how they lie may choose
        among kernels, and behind a cut they do so."""
        rows = self.fed if self.fed is not None else (args[0] if args else kwargs["hidden_states"])
        fed, self.fed = rows.clone(memory_format=torch.contiguous_format), None
        if args:
            return (fed, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": fed}


class _StandIn(torch.nn.Module):  # type: ignore[misc]
    """In the place of a layer that is elsewhere; what a model asks of its layers, the empty one still answers."""

    def __init__(self, layer: torch.nn.Module, cut: _StageCut, *, is_behind: bool) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_cut", cut)
        object.__setattr__(self, "_is_behind", is_behind)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._cut.pass_on(args, kwargs, is_behind=self._is_behind)


class _EmptyTable(torch.nn.Module):  # type: ignore[misc]
    """In the place of an embedding that is elsewhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding_dim = width


def _drop_other_media(model: Any) -> None:
    """Encoders of images and sound: text is computed without them."""
    for name, _ in [
        each for each in model.named_modules() if _OTHER_MEDIA.search(each[0].rpartition(".")[2])
    ]:
        parent, _, own = name.rpartition(".")
        with contextlib.suppress(AttributeError):  # inside one that is gone already
            setattr(model.get_submodule(parent), own, torch.nn.Identity())


def find_layers(model: Any, count: int) -> tuple[Any, str]:
    """The module that owns the list of decoder layers, and the list's name in it."""
    found = [
        (sum(weight.numel() for weight in child.parameters()), order, module, name)
        for order, module in enumerate(model.modules())
        for name, child in module.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]
    if not found:
        raise refusal(f"it has no list of {count} layers")
    *_, owner, name = max(found, key=lambda each: (each[0], -each[1]))
    return owner, name


def _load(config: Any, stage: FallbackStage, cut: _StageCut, device: torch.device, dtype: torch.dtype) -> Any:
    known = AutoModelForCausalLM._model_mapping[type(config)]
    if isinstance(known, (tuple, list)):
        known = known[0]

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        known.__init__(self, *args, **kwargs)
        cut.apply(self, stage.total)
        _check_sizes(self, stage)

    # The same name: conversions of stored tensors are looked up by it.
    staged: Any = type(known.__name__, (known,), {"__init__": build, "__module__": known.__module__})
    for name, tensor in stage.tensors.items():
        if tensor.dtype not in _TYPES:
            raise refusal(
                f"its tensor {name} is stored as {tensor.dtype}", "take the checkpoint in 16 or 32 bits"
            )
    verbosity = transformers_logging.get_verbosity()
    with _building:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            model, report = staged.from_pretrained(
                None,
                config=config,
                state_dict=dict(stage.tensors),
                dtype=dtype,
                output_loading_info=True,
                device_map={"": str(device)} if device.type != "cpu" else None,
            )
        except Exception as error:
            if is_out_of_memory_like(error):
                raise
            raise as_refusal(error, "transformers cannot load it") from error
        finally:
            transformers_logging.set_verbosity(verbosity)
    unknown = sorted(report["unexpected_keys"])
    if unknown:
        raise refusal(
            f"{len(unknown)} of its tensors belong to nothing that its type has, such as {unknown[0]}"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CorruptModelError(
            f"{len(missing)} tensors of layers {stage.start} to {stage.stop - 1} are not in the checkpoint, "
            f"such as {missing[0]}",
            hint="fetch the model again; if it is complete, this model's layers share weights and need one machine",
        )
    return model.eval()


def _check_sizes(model: Any, stage: FallbackStage) -> None:
    """An empty model costs nothing; filled, it may hold no more than the checkpoint has."""
    wanted = sum(weight.numel() for weight in model.parameters())
    stored = sum(_elements(tensor.shape) for tensor in stage.tensors.values())
    if wanted > stored + stored // 8 + _SPARE_ELEMENTS:
        raise CorruptModelError(
            f"the configuration asks for {wanted} weights where the checkpoint has {stored}",
            hint="fetch the model again: its configuration and weights do not belong together",
        )
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    if buffer_bytes > _MOST_BUFFER_BYTES:
        raise refusal(f"its tables take {buffer_bytes >> 20} MiB besides its weights")


def _last(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows[len(rows) - count :]


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def is_out_of_memory_like(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))

"""What a model's files say about it, without loading its weights; also for models that cannot be run here."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardcompute.backends.footprint import holding_of
from shardcompute.control.sizes import sizes_of
from shardcompute.control.state import Model
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.models.families import HF_SEEING, is_fallback, is_foreign, refuse_foreign
from shardcompute.models.spec import ModelSpec, Rope, VisionSpec, whole
from shardcompute.node.admin.dry_run import size_up
from shardcompute.runtime.fallback import fallback_remark
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint, open_tensors
from shardcompute.weights.formats.bytes import ByteSource
from shardcompute.weights.formats.mlx_file import open_mlx, without_mlx
from shardcompute.weights.formats.tensor_file import TensorFile, read_expert_matrix, read_matrix
from shardcompute.weights.gguf_stage import CUTTABLE, EXACT_ROWS
from shardcompute.weights.held import held_in_words, stored_form
from shardcompute.weights.outline import outline
from shardcompute.weights.quantised.schemes import open_quantised, scheme_of
from shardcompute.weights.sources.catalogue import KnownModel, find_known_reference
from shardcompute.weights.sources.resolve import ModelFiles

_USUAL_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class WeightType:
    """Tensors of one number format; `held` says by holder as what its matrices are held, where there are any."""

    name: str
    tensors: int
    size_bytes: int
    held: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the model is made of, and `notes` on what is special about it."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context_length: int
    vocabulary: int
    parameters: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that running the model on a CPU takes, and those of its weights in the file, which are not the same;
    `context` is that of `kv_reserved_bytes`."""

    file_bytes: int
    held_weights_bytes: int
    scratch_bytes: int
    kv_bytes_per_token: int
    kv_reserved_bytes: int
    context: int


@dataclass(frozen=True, slots=True)
class Description:
    """A model on paper. `problem` and `hint` are set, and `shape` may be missing, where it cannot be run."""

    name: str
    reference: str
    kind: str
    architecture: str
    size_bytes: int
    file: str
    quantisation: str = ""
    """The method that a `quantization_config` names, and what of it is not done here."""
    weight_types: tuple[WeightType, ...] = ()
    shape: ModelShape | None = None
    memory: Memory | None = None
    has_chat_template: bool | None = None
    llamacpp: str = ""
    """How the llamacpp backend can run the files as they are; nothing where it cannot."""
    problem: str | None = None
    hint: str = ""
    runs: str = ""
    """How it is run where our own kernels do not."""
    commit: str | None = None
    licence: str = ""
    abilities: tuple[str, ...] = ()
    """What the catalogue says of it: its licence, and what its chat template is made for."""
    is_fetched: bool = True
    """Its files, or their headers, were read; else all of this is what the catalogue says."""
    sized: Model | None = None
    """As placement counts it."""


def describe_known(known: KnownModel) -> Description:
    """What the catalogue says about a model that is not here; nobody is asked."""
    checkpoint = outline(known)
    sized = _sized(checkpoint)
    return Description(
        name=checkpoint.name,
        reference=known.reference,
        kind=checkpoint.files.kind,
        architecture=str(known.config["model_type"]),
        size_bytes=known.file_bytes,
        file="",
        weight_types=_weight_types(checkpoint.tensors),
        shape=replace(_shape_of(checkpoint), notes=()),
        memory=_memory_of(checkpoint, sized),
        has_chat_template=True,
        licence=known.licence,
        abilities=known.abilities,
        is_fetched=False,
        sized=sized,
    )


def describe(files: ModelFiles) -> Description:
    """Reads headers, config and tokenizer. Raises CorruptModelError for files that are damaged."""
    tensors: TensorFile | None = None
    shape = memory = chat = sized = None
    problem = hint = runs = quantisation = ""
    with contextlib.ExitStack() as stack:
        files = _closed_by(stack, files)
        try:
            tensors = open_tensors(files)
            _, quantization = without_mlx(_read_object(files.read_text("config.json")))
            if quantization is not None:
                tensors = open_mlx(tensors, quantization)
            checkpoint = open_checkpoint(files)
            tensors = open_quantised(tensors, checkpoint.quantization)
            shape = _shape_of(checkpoint)
            quantisation = _quantisation(checkpoint)
            chat = checkpoint.tokenizer().has_chat_template
            refuse_foreign(checkpoint.spec)
            sized = _sized(checkpoint)
            memory = _memory_of(checkpoint, sized)
            runs = fallback_remark(checkpoint.spec)
            checkpoint.source(whole(checkpoint.spec))
            if not runs:
                _check_types(tensors)
        except UnsupportedModelError as error:
            problem, hint = error.message, error.hint
        known = find_known_reference(str(files.reference))
        return Description(
            name=files.name,
            reference=str(files.reference),
            kind=files.kind,
            architecture=_architecture(files, tensors),
            size_bytes=files.total_bytes,
            file=str(files.folder / files.main_file) if files.folder else files.main_file,
            quantisation=quantisation,
            weight_types=_weight_types(tensors),
            shape=shape,
            memory=memory,
            has_chat_template=chat,
            llamacpp=_llamacpp(tensors) if tensors and files.kind == "gguf" and not problem else "",
            problem=problem or None,
            hint=hint,
            runs=runs,
            commit=files.commit,
            licence=known.licence if known else "",
            abilities=known.abilities if known else (),
            sized=sized,
        )


def _closed_by(stack: contextlib.ExitStack, files: ModelFiles) -> ModelFiles:
    """The same files, of which every one that gets opened is closed in the end, whatever fails in between."""

    def opening(opener: Callable[[], ByteSource]) -> Callable[[], ByteSource]:
        return lambda: stack.enter_context(contextlib.closing(opener()))

    return replace(files, files={name: opening(opener) for name, opener in files.files.items()})


def _architecture(files: ModelFiles, tensors: TensorFile | None) -> str:
    if files.kind == "gguf":
        return str(tensors.metadata.get("general.architecture", "?")) if tensors else "?"
    config = _read_object(files.read_text("config.json"))
    return str(config.get("model_type", "?"))


def _llamacpp(tensors: TensorFile) -> str:
    stages = "or several" if tensors.metadata.get("general.architecture") in CUTTABLE else "alone"
    told = f"--backend llamacpp runs the blocks as they are, in one stage {stages}"
    unsure = sorted({entry.dtype for entry in tensors.entries.values() if len(entry.shape) > 1} - EXACT_ROWS)
    if not unsure:
        return told
    return f"{told}, unless rows of {', '.join(unsure)} are not exact there, which it finds out at start"


def _read_object(text: str | None) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text or "{}")
        if isinstance(value, dict):
            return value
    return {}


def _quantisation(checkpoint: Checkpoint) -> str:
    if not checkpoint.quantization:
        return ""
    scheme = scheme_of(checkpoint.quantization)
    return f"{scheme.method}; {scheme.note}" if scheme.note else scheme.method


def _weight_types(tensors: TensorFile | None) -> tuple[WeightType, ...]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    held: dict[str, Mapping[str, str]] = {}
    for name, entry in tensors.entries.items() if tensors else ():
        counts[entry.dtype] += 1
        sizes[entry.dtype] += entry.size_bytes
        if tensors and len(entry.shape) > 1 and entry.dtype not in held:
            held[entry.dtype] = held_in_words(stored_form(tensors.entries, name))
    return tuple(
        WeightType(name, counts[name], size, held.get(name, {})) for name, size in sizes.most_common()
    )


def _check_types(tensors: TensorFile) -> None:
    """Read a row of one matrix of every type; UnsupportedModelError for a type that no kernel takes."""
    matrices = {entry.dtype: entry for entry in tensors.entries.values() if len(entry.shape) in (2, 3)}
    for entry in matrices.values():
        if len(entry.shape) == 2:
            read_matrix(tensors, entry.name, (0, 1))
        else:
            read_expert_matrix(tensors, entry.name, 0, (0, 1))


def _shape_of(checkpoint: Checkpoint) -> ModelShape:
    spec, layout = checkpoint.spec, checkpoint.layout
    places = {
        (place.stored, place.expert, place.rows, place.every): math.prod(place.shape)
        for part in (layout.model, *layout.layers)
        for place in part.values()
    }
    return ModelShape(
        family=spec.family,
        layers=spec.layer_count,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate,
        context_length=spec.context_length,
        vocabulary=spec.vocab_size,
        parameters=sum(places.values()),
        notes=(*_notes(spec), *_left_out(checkpoint)),
    )


def _sized(checkpoint: Checkpoint) -> Model:
    context = min(checkpoint.spec.context_length, _USUAL_CONTEXT)
    return size_up(checkpoint, "native", kv_tokens=context, context_length=context)


def _memory_of(checkpoint: Checkpoint, model: Model) -> Memory:
    spec = checkpoint.spec
    per_token = spec.kv_bytes_per_token_and_layer() * spec.layer_count
    parts = sizes_of(model).on(holding_of("onnx", "cpu")).parts(0, model.layer_count)
    return Memory(
        file_bytes=checkpoint.stage_bytes(whole(spec)),
        held_weights_bytes=parts.weights_bytes,
        scratch_bytes=parts.scratch_bytes,
        kv_bytes_per_token=per_token,
        kv_reserved_bytes=parts.kv_bytes,
        context=model.kv_tokens,
    )


def _left_out(checkpoint: Checkpoint) -> list[str]:
    """What the files hold and we do not run."""
    is_blind = checkpoint.spec.vision is None and checkpoint.config.get("model_type") in HF_SEEING
    return ["images are not taken: what sees them is left out, text is answered"] if is_blind else []


def _describe_tower(vision: VisionSpec) -> str:
    most = vision.positions or vision.size.most_pixels // vision.patch**2
    rows = f"{'' if vision.size.edge else 'up to '}{most // vision.merge**2:,} tokens"
    return f"takes images of {rows} each: a tower of {vision.layers} layers, on the first stage, as the file has it"


def _notes(spec: ModelSpec) -> list[str]:
    notes = [_describe_rope(spec, rope) for rope in spec.ropes if any(rope.inverse_frequencies)]
    count = spec.layer_count
    still = sum(layer.rope is None for layer in spec.layers)
    if still and not is_foreign(spec) and not is_fallback(spec):
        notes.append(f"{still} of {count} layers do not rotate")
    windows = Counter(layer.window for layer in spec.layers if layer.window is not None)
    notes += [f"{layers} of {count} layers see {window} positions" for window, layers in windows.items()]
    chunks = Counter(layer.chunk for layer in spec.layers if layer.chunk is not None)
    notes += [
        f"{layers} of {count} layers see their own chunk of {chunk}" for chunk, layers in chunks.items()
    ]
    notes += [
        f"a context of more than {rope.long_beyond:,} turns by the long factors at every position"
        for rope in spec.ropes
        if rope.long_frequencies is not None
    ]
    if any(rope.growth is not None for rope in spec.ropes):
        notes.append("queries grow with position")
    if spec.vision is not None:
        notes.append(_describe_tower(spec.vision))
    if spec.experts is not None:
        sparse = sum(layer.is_sparse for layer in spec.layers)
        notes.append(
            f"{sparse} of {count} layers have {spec.experts.count} experts, {spec.experts.per_token} per token"
            + (", and a block that all tokens share" if spec.experts.shared_intermediate else "")
        )
    if spec.latent is not None:
        latent = spec.latent
        notes.append(
            f"latent attention: {latent.kv_rank} + {latent.rotated} numbers are kept of a token, for all heads"
        )
    if spec.is_whole:
        notes.append("its layers share more than rows: one machine must hold all of it")
    if spec.state_bytes:
        notes.append("layers keep recurrent states: drafts are off unless a request asks for them")
    if spec.qk_norm != "none":
        notes.append("queries and keys are normalised")
    if spec.attention_softcap is not None or spec.logit_softcap is not None:
        notes.append("scores are capped")
    if spec.has_sinks:
        notes.append("attention has sinks")
    if spec.tied_head:
        notes.append("the head shares the embedding")
    return notes


def _describe_rope(spec: ModelSpec, rope: Rope) -> str:
    frequencies = rope.inverse_frequencies
    turned = 2 * len(frequencies)
    entries = "all" if turned == spec.head_dim else f"{turned} of {spec.head_dim}"
    text = f"rope over {entries} entries of a head"
    if len(frequencies) > 1:
        base = (frequencies[0] / frequencies[1]) ** len(frequencies)
        usual = all(
            math.isclose(value, base ** (-index / len(frequencies)), rel_tol=1e-3)
            for index, value in enumerate(frequencies)
        )
        text += f", base {base:,.0f}" if usual else ", scaled"
    return text if rope.amplitude == 1.0 else f"{text}, amplitude {rope.amplitude:.4g}"

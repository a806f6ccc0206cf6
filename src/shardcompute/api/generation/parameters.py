"""Request parameters: from a body to complete `GenerationRequest`s, whichever protocol it came by.

Defaults are temperature 1, top_p 1. Without a seed the server draws one of 63 bits for each prompt;
with one, a prompt's answer does not depend on the other prompts of the request.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardcompute.api.body import Limits, RequestBody
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.model_names import match_short_name
from shardcompute.api.generation.schemas import GenerationBody
from shardcompute.core.errors import PromptTooLongError, UnknownModelError, UsageError
from shardcompute.core.generation import GenerationRequest, Grammar, Sampling, Speculation
from shardcompute.core.pictures import Picture
from shardcompute.decoding import derive_seed
from shardcompute.node.service import ServedModel, Service, TextCodec

SEED_BITS = 63
_ONLY_ONE = frozenset({"default", "default:latest"})

REFUSED: Mapping[str, object] = MappingProxyType(
    {
        "allowed_token_ids": None,
        "audio": None,
        "bad_words": [],
        "best_of": 1,
        "chat_template": None,
        "chat_template_kwargs": {},
        "continue_final_message": False,
        "documents": [],
        "dry_multiplier": 0,
        "dynatemp_range": 0,
        "function_call": "none",
        "functions": [],
        "grammar": "",
        "guided_grammar": None,
        "length_penalty": 1,
        "max_completion_tokens": None,
        "max_new_tokens": None,
        "max_output_tokens": None,
        "min_tokens": 0,
        "mirostat": 0,
        "modalities": ["text"],
        "n_predict": None,
        "no_repeat_ngram_size": 0,
        "prompt_logprobs": None,
        "repeat_penalty": 1,
        "samplers": None,
        "skip_special_tokens": True,
        "stop_sequences": [],
        "tfs_z": 1,
        "truncate_prompt_tokens": None,
        "typical_p": 1,
        "use_beam_search": False,
        "web_search_options": None,
        "xtc_probability": 0,
    }
)
"""Parameters of other servers that would change the answer, with the value that changes nothing."""


_OWN_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("max_completion_tokens", "max_new_tokens", "max_output_tokens", "n_predict"), "use max_tokens"
        ),
        "functions": "use tools",
        "function_call": "use tool_choice",
        "repeat_penalty": "use repetition_penalty",
        "stop_sequences": "use stop",
    }
)
"""What to send instead, where there is such a thing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The generations that answer one request: `n` for each prompt, prompt by prompt."""

    model: ServedModel
    codec: TextCodec
    requests: tuple[GenerationRequest, ...]
    choices_per_prompt: int
    unenforced: tuple[str, ...] = ()
    """Names of tools that calls are not wholly held to."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests[:: self.choices_per_prompt])


def choose_model(service: Service, name: str | None) -> ServedModel:
    """The model called `name`, be it by a short name (see `model_names`), or the only one there is (also as "default");
    CapacityError while it is loading, or cannot be served, which says what is missing."""
    obstacle = service.obstacle()
    if obstacle is not None:
        raise obstacle
    served = service.models()
    only = served if len(served) == 1 else [model for model in served if not model.base]
    if (not name or name in _ONLY_ONE) and len(only) == 1:
        return only[0]
    by_name = {model.name: model for model in served}
    names = ", ".join(by_name)
    if not name:
        raise RequestError("The request names no model.", hint=f"name one of: {names}", param="model")
    meant = [name] if name in by_name else match_short_name(name, by_name)
    if not meant:
        short, _, adapter = name.rpartition(":")
        full = [f"{base}:{adapter}" for base in match_short_name(short, by_name)]
        meant = [each for each in full if each in by_name]
    if len(meant) > 1:
        message = f"The name {name!r} stands for several models that are served here."
        raise UnknownModelError(message, hint=f"use one of: {', '.join(meant)}")
    if not meant:
        raise UnknownModelError(f"The model {name!r} is not served here.", hint=f"served here: {names}")
    return by_name[meant[0]]


def refuse_unsupported(body: RequestBody) -> None:
    """Unknown fields are ignored, except where that would silently change the answer."""
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED and value is not None and value != REFUSED[name]:
            message = f"The parameter {name} is not supported and would change the answer."
            raise unsupported(name, message, hint=_OWN_NAMES.get(name, "leave it out"))


def plan_generations(
    model: ServedModel,
    codec: TextCodec,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    prompt_param: str,
    limits: Limits,
    grammar: Grammar | None = None,
    shown_ids: frozenset[int] = frozenset(),
    unenforced: tuple[str, ...] = (),
    pictures: tuple[Picture, ...] = (),
) -> Plan:
    """`max_tokens` None means up to the end of the context."""
    choices = body.n or 1
    if len(prompts) * choices > limits.max_choices:
        message = f"{len(prompts)} prompts with n = {choices} are more than {limits.max_choices} answers."
        raise RequestError(message, hint="split the request", param="n" if choices > 1 else prompt_param)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    stop_ids = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else codec.eos_ids)
    # What is the same for all choices is made once and shared between them.
    sampling = _sampling(body, codec, logprobs=logprobs, grammar=grammar)
    requests = []
    for prompt in map(tuple, prompts):
        room = _check_prompt(prompt, max_tokens, model, prompt_param)
        seed = body.seed if body.seed is not None else secrets.randbits(SEED_BITS)
        for choice in range(choices):
            request = GenerationRequest(
                prompt=prompt,
                max_tokens=room if max_tokens is None else max_tokens,
                sampling=replace(sampling, seed=derive_seed(seed, choice)),
                stop=stop,
                stop_ids=stop_ids,
                include_stop=bool(body.include_stop_str_in_output),
                prompt_logprobs=prompt_logprobs,
                speculation=_speculation(body),
                cache_salt=body.cache_salt or "",
                shown_ids=shown_ids,
                pictures=pictures,
            )
            requests.append(request)
    return Plan(model, codec, tuple(requests), choices, unenforced)


def check_ids(codec: TextCodec, ids: Iterable[int], param: str) -> None:
    """Ids without a token, padding of the vocabulary included, are the client's mistake, not ours."""
    for token_id in set(ids):
        try:
            is_known = codec.token_bytes(token_id) != b""
        except (LookupError, ValueError, OverflowError, UsageError):
            is_known = False
        if not is_known:
            message = f"{param}: the model has no token {token_id}."
            raise RequestError(message, hint="use ids from /tokenize", param=param, code="invalid_value")


def _check_prompt(prompt: Sequence[int], max_tokens: int | None, model: ServedModel, param: str) -> int:
    """How many tokens of answer the context has room for."""
    if not prompt:
        raise RequestError("The prompt has no tokens.", hint="send at least one", param=param)
    room = model.context_length - len(prompt)
    if room < (max_tokens or 1):
        asked = "" if max_tokens is None else f", and {max_tokens} more were asked for as the answer"
        what = f"the prompt is too long: it has {len(prompt)} tokens{asked}"
        raise context_exceeded(model, what, param, hint="shorten the prompt or lower max_tokens")
    return room


@contextmanager
def naming_prompt(param: str) -> Iterator[None]:
    """Errors of prompts that are far too long to be counted name the parameter too."""
    try:
        yield
    except PromptTooLongError as error:
        code = "context_length_exceeded"
        raise RequestError(error.message, hint=error.hint, param=param, code=code) from error


def context_exceeded(model: ServedModel, what: str, param: str, *, hint: str) -> RequestError:
    """The error of what does not fit, in the words by which clients know it and cut their conversation."""
    message = f"This model's maximum context length is {model.context_length} tokens. However, {what}."
    return RequestError(message, hint=hint, param=param, code="context_length_exceeded")


def _sampling(
    body: GenerationBody, codec: TextCodec, *, logprobs: int | None, grammar: Grammar | None
) -> Sampling:
    return Sampling(
        temperature=_given(body.temperature, 1.0),
        top_k=max(body.top_k or 0, 0),
        top_p=_given(body.top_p, 1.0),
        min_p=_given(body.min_p, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, codec),
        logprobs=logprobs,
        grammar=grammar,
    )


def _speculation(body: GenerationBody) -> Speculation | None:
    asked = body.speculation
    return None if asked is None else Speculation(asked.drafter, asked.tokens, asked.frames)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(bias: Mapping[str, float], codec: TextCodec) -> Mapping[int, float]:
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(
                f"logit_bias: {key!r} is no token id.", param="logit_bias", code="invalid_value"
            )
        by_id[int(key)] = value
    check_ids(codec, by_id, "logit_bias")
    return MappingProxyType(by_id)

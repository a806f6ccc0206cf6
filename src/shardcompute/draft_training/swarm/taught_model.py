"""A model that a cluster serves, as whoever teaches a draft head sees it: its ends, its text and its states.

All of it is asked for over HTTP, as an operator. States come from a machine that may be wrong: what cannot be states is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import BackendError, CorruptModelError
from shardcompute.core.generation import MAX_STATES_BYTES, GenerationRequest, Sampling
from shardcompute.draft_training.dialogue import ChosenTokens
from shardcompute.draft_training.teacher import TableSource, read_rows
from shardcompute.models.draft_head import DRAFT_HEAD, DraftHeadWeights, decode_draft_head
from shardcompute.models.spec import ModelSpec, head_stage
from shardcompute.weights.attached import read_attachment
from shardcompute.weights.card import Card, decode_card, row_range
from shardcompute.weights.formats.bytes import check_range
from shardcompute.weights.formats.tensor_file import TensorEntry
from shardcompute.weights.served import MOST_READ_BYTES, shard_source
from shardcompute.weights.tokenizer_pack import TOKENIZER, unpack_tokenizer

if TYPE_CHECKING:
    from shardcompute.models.tokenizer import Tokenizer

_LARGEST = 1e3
"""Of a number in a state of a mean square of 1: more than the square root of any model's width."""
States = NDArray[np.float16]


class TeachingClient(Protocol):
    """What is asked of a cluster (`cluster_client.ClusterClient`). May be called from several threads."""

    def teaching_context(self, model: str) -> int:
        """The most tokens of a session."""
        ...

    def teaching_card(self, model: str) -> bytes: ...

    def teaching_tensor(self, model: str, name: str, offset: int, length: int) -> bytes: ...

    def teaching_speech(self, model: str, request: GenerationRequest) -> list[int]: ...

    def teaching_states(self, model: str, tokens: Sequence[int]) -> bytes: ...


class TaughtModel:
    """One model of a cluster. Its ends are those of `teacher.ModelEnds`."""

    def __init__(self, client: TeachingClient, model: str) -> None:
        self._client = client
        self._model = model
        self.card: Card = decode_card(client.teaching_card(model))
        self._tensors = _EndTensors(client, model, self.card)
        self._tokenizer: Tokenizer | None = None
        # The last token of a session is picked, and the state of the one before it is wanted too.
        room = MAX_STATES_BYTES // (2 * self.spec.hidden)
        self.most_tokens = min(client.teaching_context(model) - 1, self.spec.context_length - 1, room)

    @property
    def name(self) -> str:
        return self.card.model

    @property
    def spec(self) -> ModelSpec:
        return self.card.spec

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            content = read_attachment(self._tensors, TOKENIZER)
            if content is None:
                raise CorruptModelError(
                    f"{self.name} is served without its tokenizer", hint="run one release on all nodes"
                )
            self._tokenizer = unpack_tokenizer(content)
        return self._tokenizer

    def draft_head(self) -> DraftHeadWeights | None:
        """The one that is in use."""
        content = read_attachment(self._tensors, DRAFT_HEAD)
        return None if content is None else decode_draft_head(content, self.spec.hidden, self.spec.vocab_size)

    def vector(self, name: str) -> Float32:
        return self._source().vector(name)

    def rows(self, name: str, ids: NDArray[np.int32]) -> Float32:
        return read_rows(self._source(), name, ids)

    def speak(self, prompt: Sequence[int], count: int, speech: ChosenTokens, seed: int) -> list[int]:
        """The next tokens, `count` of them or up to a stop."""
        sampling = Sampling(temperature=speech.temperature, top_p=speech.top_p, seed=seed)
        wanted = GenerationRequest(tuple(prompt), count, sampling, stop_ids=speech.stops)
        said = self._client.teaching_speech(self._model, wanted)
        if len(said) > count or any(not 0 <= token < self.spec.vocab_size for token in said):
            raise BackendError(f"{self.name} said what cannot be {count} of its tokens")
        return said

    def states(self, tokens: Sequence[int]) -> States:
        """The final state of each token of a text, of a mean square of 1."""
        content = self._client.teaching_states(self._model, tokens)
        hidden = self.spec.hidden
        if len(content) != 2 * hidden * len(tokens):
            raise BackendError(
                f"{len(content)} bytes came as the states of {len(tokens)} tokens of {self.name}, which have "
                f"{2 * hidden} each"
            )
        states = np.frombuffer(content, "<f2").reshape(len(tokens), hidden)
        return check_states(states)

    def _source(self) -> TableSource:
        return shard_source(self.card, self._tensors, head_stage(self.spec))


def check_states(states: States) -> States:
    """BackendError where these are no states: they hold numbers that are none, or far too large ones."""
    wide = states.astype(np.float32)
    if not np.isfinite(wide).all() or np.abs(wide).max(initial=0.0) > _LARGEST:
        raise BackendError(
            "a last stage gave states that are none", hint="its machine computes wrongly: see `status`"
        )
    return states


class _EndTensors:
    """A `TensorFile` of which only the model's ends can be read, in pieces, as they are asked for."""

    def __init__(self, client: TeachingClient, model: str, card: Card) -> None:
        self._client = client
        self._model = model
        self.name = f"{model} from its cluster"
        self.entries: Mapping[str, TensorEntry] = card.entries
        self.metadata: Mapping[str, Any] = {}

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        check_range(name, self.entries[name].size_bytes, offset, length)
        content = bytearray()
        while len(content) < length:
            count = min(MOST_READ_BYTES, length - len(content))
            content += self._client.teaching_tensor(self._model, name, offset + len(content), count)
        return memoryview(content)

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        return self.read_bytes(name, *row_range(self.entries[name], start, stop))

    def close(self) -> None:
        """Nothing is open between two reads."""

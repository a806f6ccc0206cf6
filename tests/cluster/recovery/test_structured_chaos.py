"""Generated schemas, drafted or not, while machines die and links break: valid JSON, and the same as undisturbed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcompute.core.generation import GenerationRequest, Grammar, Speculation
from support.models.schemas import Schema, held_to, schemas
from support.swarm.lab import Alone, LabSwarm, swarm

ROOMS = (2,) * 6
"""At least three machines hold the model, and the last a head to draft with; the others stand by."""
TOKENS = 160
SPECULATIONS = (Speculation("off"), Speculation("ngram", 4, 2), Speculation("head", 3))
"""One answer with each."""
pytestmark = pytest.mark.usefixtures("bold")


@dataclass(frozen=True, slots=True)
class Wish:
    schema: Schema
    prompt: str
    seed: int

    def request(self, alone: Alone) -> GenerationRequest:
        """Undrafted."""
        tokenizer = alone.service.tokenizer
        grammar = Grammar("json_schema", json.dumps(self.schema))
        held = held_to(grammar, tuple(tokenizer.encode(self.prompt)), tokenizer.eos_ids, self.seed)
        return replace(held, max_tokens=TOKENS, speculation=SPECULATIONS[0])


def _several(schema: Schema) -> Schema:
    """Long enough that harm comes in the middle of it."""
    return {"type": "array", "items": schema, "minItems": 8, "maxItems": 12}


wishes = st.builds(
    Wish, schemas.map(_several), st.text(min_size=1, max_size=12), st.integers(min_value=0, max_value=5)
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny: Path, heads: Path, bold: None) -> Iterator[LabSwarm]:
    folder = tmp_path_factory.mktemp("swarm")
    with swarm(folder, tiny, layers=ROOMS, standbys=1, draft_heads=heads) as lab:
        yield lab
        lab.wait_quiet()


def cut(lab: LabSwarm, stage: int) -> None:
    """The link by which a stage gets its frames breaks."""
    around = (lab.cluster.node, *lab.chain().nodes)
    lab.cut(around[stage], around[stage + 1])


def kill(lab: LabSwarm, stage: int) -> None:
    """A stage's machine dies, and is started again for the next example."""
    victim = lab.stage(stage)
    lab.kill(victim)
    lab.revive(victim)


def try_out(lab: LabSwarm, alone: Alone, asked: Sequence[Wish], tokens: int, harm: Callable[[], None]) -> int:
    """Does harm once each answer has so many tokens. Returns how many were still under way."""
    plain = [wish.request(alone) for wish in asked]
    expected = [alone.answer(request) for request in plain]
    lab.wait_serving(standbys=1)
    drafted = zip(plain, SPECULATIONS, strict=True)
    talks = [lab.start(replace(request, speculation=wish)) for request, wish in drafted]
    lab.wait_until(
        lambda: all(talk.is_over or len(talk.tokens) >= tokens for talk in talks), "tokens of all answers"
    )
    under_way = sum(not talk.is_over for talk in talks)
    harm()
    answers = [talk.result() for talk in talks]
    assert answers == expected
    for wish, answer in zip(asked, answers, strict=True):
        assert answer.finish in ("stop", "length")
        if answer.finish == "stop":
            jsonschema.validate(json.loads(answer.text), wish.schema)
    return under_way


@pytest.mark.parametrize(
    "examples", [3, pytest.param(75, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("harm", [cut, kill])
def test_answers_follow_their_schema_whatever_breaks(
    lab: LabSwarm, alone: Alone, harm: Callable[[LabSwarm, int], None], examples: int
) -> None:
    harmed = 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        asked=st.tuples(*[wishes] * len(SPECULATIONS)),
        place=st.sampled_from([0.0, 0.5, 0.99]),
        tokens=st.sampled_from([1, 3, 6, 10]),
    )
    def run(asked: tuple[Wish, ...], place: float, tokens: int) -> None:
        nonlocal harmed
        harmed += try_out(lab, alone, asked, tokens, lambda: harm(lab, int(place * len(lab.chain().nodes))))

    run()
    assert harmed > 0

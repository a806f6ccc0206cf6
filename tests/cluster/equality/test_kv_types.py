"""Keys and values of fewer bits: every stage rounds them alike, so neither cuts nor failures change a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.core.kv_types import KV_TYPES, KvType, kv_token_bytes
from support.models.requests import prompts, scored
from support.swarm.lab import SPREAD, Alone, open_alone, open_tiny, swarm


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_tokens_do_not_depend_on_the_split_or_on_who_goes_on(
    tmp_path: Path, tiny: Path, kv_type: KvType
) -> None:
    with (
        open_alone(tiny, kv_type=kv_type) as service,
        swarm(tmp_path, tiny, layers=(4, 4, 4), stages=3, placing=SPREAD, kv_type=kv_type) as lab,
    ):
        alone = Alone(service)
        requests = [scored(prompt, 60) for prompt in prompts(service.tokenizer)[:3]]
        talks = [lab.start(request) for request in requests]
        lab.wait_until(lambda: all(len(talk.tokens) > 4 for talk in talks), "some tokens")
        lab.kill(lab.stage(1))
        assert [talk.result() for talk in talks] == [alone.answer(request) for request in requests]


def test_the_type_is_the_models_and_so_is_what_it_costs(tmp_path: Path, tiny: Path) -> None:
    with open_alone(tiny) as service, swarm(tmp_path, tiny, layers=(3, 3), stages=2, kv_type="int8") as lab:
        model = lab.state.models[lab.model].model
        with open_tiny(tiny) as checkpoint:
            spec = checkpoint.spec
        assert model.kv_type == "int8"
        assert model.kv_bytes_per_token_and_layer == kv_token_bytes("int8", spec.kv_shape)
        request = scored(prompts(service.tokenizer)[0], 30)
        assert lab.ask(request) != Alone(service).answer(request), "log-probabilities tell 8 bits from more"

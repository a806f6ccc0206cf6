"""Keys and values of fewer bits: every stage rounds them alike, so neither cuts nor failures change a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.core.errors import WouldReplaceError
from shardcompute.core.kv_types import KV_TYPES, KvType, kv_token_bytes
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from support.models.requests import prompts, scored
from support.models.tiny_checkpoint import save_tiny_llama
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


def test_each_model_has_its_own_type_also_after_a_restart(tmp_path: Path, tiny: Path) -> None:
    another = save_tiny_llama(tmp_path / "another", seed=2)
    settings = Settings(data_dir=tmp_path, offline=True)
    with (
        open_alone(tiny) as wide,
        open_alone(another, kv_type="int8") as narrow,
        swarm(tmp_path, tiny, layers=(8, 8), stages=1) as lab,
    ):
        request = scored(prompts(wide.tokenizer)[0], 30)

        def check(admin: ClusterAdmin) -> None:
            lab.wait_serving("another")
            lab.wait_serving("tiny")
            assert lab.ask(request, "tiny") == Alone(wide).answer(request)
            assert lab.ask(request, "another") == Alone(narrow).answer(request)
            assert {view.name: view.kv_type for view in admin.state().models} == {
                "tiny": "float32",
                "another": "int8",
            }

        with ClusterAdmin(lab.cluster, settings) as admin:
            few, many = admin.plan(str(another), kv_type="int8"), admin.plan(str(another))
            assert 0 < few.parts.kv_reserved_bytes < many.parts.kv_reserved_bytes
            admin.load_model(str(another), kv_type="int8")
            check(admin)
            # Another number of chains changes nothing else, another type is another model to those who use it.
            assert admin.plan(str(another)).parts == few.parts
            admin.load_model(str(another))
            lab.wait_until(lambda: not admin.state().fetches, "the order is carried out")
            assert lab.cluster.remembered()[0].kv_type == "int8"
            with pytest.raises(WouldReplaceError, match="another as it is served now"):
                admin.load_model(str(another), kv_type="float16")
        lab.kill_cluster()
        lab.open_cluster()
        lab.serve("tiny")
        with ClusterAdmin(lab.cluster, settings) as admin:
            admin.restore(without="tiny")
            check(admin)

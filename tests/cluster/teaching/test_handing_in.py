"""Who may ask a cluster for states and hand a draft head in, what is refused, and who drafts with it then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shardcompute.api.cluster import teaching
from shardcompute.cluster_client import ClusterClient
from shardcompute.core.errors import AuthError, BackendError, ShardComputeError, UnknownModelError, UsageError
from shardcompute.core.generation import GenerationRequest, Sampling, Speculation
from shardcompute.models.draft_head import DraftHeadWeights, encode_draft_head
from shardcompute.node.admin.view_builder import view_chains
from shardcompute.security import KeyRole
from shardcompute.weights.card import decode_card
from support.api.bridge import Bridge
from support.models.draft_heads import random_draft_head
from support.models.requests import greedy, prompts
from support.models.tiny_checkpoint import HIDDEN, VOCABULARY
from support.swarm.lab import Alone, LabSwarm, open_tiny, swarm

FAR_S = 0.1
NAME = "made-up"


@pytest.fixture
def head(made_up: Path) -> DraftHeadWeights:
    with open_tiny(made_up) as checkpoint:
        return random_draft_head(checkpoint.spec)


def requests_of(client: ClusterClient) -> dict[str, Callable[[], object]]:
    """Everything that teaching asks for."""
    return {
        "card": lambda: client.teaching_card(NAME),
        "tensor": lambda: client.teaching_tensor(NAME, "model.norm.weight", 0, 8),
        "speech": lambda: client.teaching_speech(NAME, GenerationRequest((1, 2), 4)),
        "states": lambda: client.teaching_states(NAME, [1, 2, 3]),
        "draft-head": lambda: client.take_draft_head(NAME, b"none"),
    }


def app_of(client: ClusterClient) -> Any:
    transport = client._http._transport
    assert isinstance(transport, Bridge)
    return transport._app


@pytest.mark.parametrize("role", [KeyRole.USE, KeyRole.OBSERVE, None])
def test_only_operators_may(client: ClusterClient, role: KeyRole | None) -> None:
    key = None if role is None else client.create_key("somebody", role=str(role)).key
    with ClusterClient("http://127.0.0.1", api_key=key, transport=Bridge(app_of(client))) as other:
        for ask in requests_of(other).values():
            with pytest.raises(AuthError):
                ask()


def test_text_and_states_are_those_of_the_model(client: ClusterClient, truth: Alone) -> None:
    text = prompts(truth.service.tokenizer)[0]
    expected = truth.answer(greedy(text, 12))
    assert client.teaching_speech(NAME, GenerationRequest(tuple(text), 12)) == [t.id for t in expected.tokens]
    drawn = Sampling(temperature=0.9, top_p=0.8, seed=5)
    said = client.teaching_speech(NAME, GenerationRequest(tuple(text), 12, drawn))
    assert said == [t.id for t in truth.answer(GenerationRequest(tuple(text), 12, drawn)).tokens]
    stopped = client.teaching_speech(NAME, GenerationRequest(tuple(text), 12, stop_ids=frozenset({said[0]})))
    assert len(stopped) <= 12
    wanted = GenerationRequest(
        tuple(text), max_tokens=1, prompt_logprobs=0, sampling=Sampling(wants_states=True)
    )
    alone = truth.answer(wanted)
    rows = b"".join(choice.hidden for choice in (*alone.prompt[1:], *alone.tokens))
    assert client.teaching_states(NAME, text) == rows
    assert np.isfinite(np.frombuffer(rows, "<f2").astype(np.float32)).all()


def test_layers_are_read_by_nobody_and_ends_within_bounds(client: ClusterClient) -> None:
    card = decode_card(client.teaching_card(NAME))
    place = card.layout.model["norm"].stored
    assert len(client.teaching_tensor(NAME, place, 0, 16)) == 16
    layer = next(iter(card.layout.layers[0].values())).stored
    for name in (layer, "nothing", "@vocabulary/x"):
        with pytest.raises(UsageError, match="not among what teaching reads"):
            client.teaching_tensor(NAME, name, 0, 16)
    for offset, length in ((0, card.entries[place].size_bytes + 1), (1 << 40, 4)):
        with pytest.raises(UsageError, match="cannot be read"):
            client.teaching_tensor(NAME, place, offset, length)
    for offset, length in ((-1, 4), (0, 0), (0, 1 << 30)):
        with pytest.raises(ShardComputeError):
            client.teaching_tensor(NAME, place, offset, length)
    with pytest.raises(UnknownModelError):
        client.teaching_card("another")
    with pytest.raises(UnknownModelError):
        client.teaching_speech("another", GenerationRequest((1,), 1))


def test_what_cannot_be_a_draft_head_is_refused(
    client: ClusterClient, head: DraftHeadWeights, lab: LabSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = encode_draft_head(head)
    foreign = replace(head, ids=np.asarray([1, VOCABULARY], np.int32))
    cases = (b"", b"x" * 4096, content[:-1], content + b"x", encode_draft_head(foreign))
    for case in cases:
        with pytest.raises(UsageError, match="no draft head for a model of width"):
            client.take_draft_head(NAME, case)
    with pytest.raises(UnknownModelError):
        client.take_draft_head("another", content)
    sent = client._http.post(f"/cluster/teaching/{NAME}/draft-head", json={})
    assert sent.status_code == 415
    monkeypatch.setattr(teaching, "MOST_HEAD_BYTES", 1000)
    sent = client._http.post(
        f"/cluster/teaching/{NAME}/draft-head",
        content=content,
        headers={"content-type": "application/octet-stream"},
    )
    assert isinstance(sent, httpx.Response)
    assert sent.status_code == 413
    assert not lab.cluster.pool.draft_heads(), "nothing of this was taken"


def test_states_of_too_much_text_or_of_a_wrong_machine_are_refused(
    client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teaching, "MAX_STATES_BYTES", 2 * HIDDEN * 4)
    assert len(client.teaching_states(NAME, [1, 2, 3, 4])) == 2 * HIDDEN * 4
    with pytest.raises(ShardComputeError, match="more than"):
        client.teaching_states(NAME, [1, 2, 3, 4, 5])
    monkeypatch.setattr("shardcompute.runtime.tail.pack_state", lambda state: b"short")
    with pytest.raises(BackendError, match="gave 3 states of"):
        client.teaching_states(NAME, [1, 2, 3])


def test_a_hosted_driver_hears_of_it(
    tmp_path: Path, made_up: Path, truth: Alone, head: DraftHeadWeights, connect: Any, bold: None
) -> None:
    heads = tmp_path / "heads"
    with (
        swarm(tmp_path, made_up, layers=(2, 2, 2), stages=3, home_rtt_s=FAR_S, draft_heads=heads) as lab,
        connect(lab) as client,
    ):
        lab.wait_hosted()
        text = prompts(truth.service.tokenizer)[1]
        wanted = GenerationRequest(
            tuple(text), max_tokens=1, prompt_logprobs=0, sampling=Sampling(wants_states=True)
        )
        assert lab.ask(wanted) == truth.answer(wanted)
        taken = client.take_draft_head(NAME, encode_draft_head(head))
        assert (taken.in_use, taken.problems) == (1, ())
        request = greedy(text, 16)
        talk = lab.start(replace(request, speculation=Speculation("head", 4, 1)))
        assert talk.result() == truth.answer(request)
        assert talk.timings is not None
        assert talk.timings.drafted_tokens > 0
        assert lab.host() is not None


def test_whoever_takes_the_last_stage_over_has_it_too(
    tmp_path: Path, made_up: Path, truth: Alone, head: DraftHeadWeights, connect: Any, bold: None
) -> None:
    heads = tmp_path / "heads"
    with (
        swarm(tmp_path, made_up, layers=(2, 2, 2), stages=3, draft_heads=heads) as lab,
        connect(lab) as client,
    ):
        client.take_draft_head(NAME, encode_draft_head(head))
        lab.add_worker(2)
        lab.kill(lab.stage(-1))
        lab.wait_serving(stages=3)

        def at_work() -> dict[str, str]:
            (chain,) = view_chains(lab.state, 0.0, {}, {}, lab.cluster.pool.draft_heads())
            return {each.drafter: each.state for each in chain.drafters}

        lab.wait_until(lambda: at_work().get("head") == "at work", lambda: f"it drafts: {at_work()}")
        request = greedy(prompts(truth.service.tokenizer)[2], 16)
        talk = lab.start(replace(request, speculation=Speculation("head", 4, 1)))
        assert talk.result() == truth.answer(request)
        assert talk.timings is not None
        assert talk.timings.drafted_tokens > 0

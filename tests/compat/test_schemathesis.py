"""Whatever our own OpenAPI document allows, and much that it does not: no answer is a fault of the server.

`schemathesis` makes the requests, the same ones in every run. Besides, what is answered must be what the document
promises.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from shardcompute.api import create_app
from shardcompute.api.access.hosts import AllowedHosts
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.fake_cluster import NOW_S, serving_cluster
from support.swarm.lab import open_alone

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.checks")

_NAME = "shardcompute_api_fakes"
if _NAME not in sys.modules:
    _path = Path(__file__).parents[1] / "unit" / "api" / "fakes.py"
    _spec = importlib.util.spec_from_file_location(_NAME, _path)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
fakes: Any = sys.modules[_NAME]

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
GETS = [
    *("GET /v1/models", "GET /v1/models/{model}", "GET /health", "GET /version", "GET /metrics"),
    *("GET /tokenizer_info", "GET /api/tags", "GET /api/ps", "GET /api/version"),
    *("GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}"),
    "GET /v1/receipts/{receipt_id}",
]
POSTS = [
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"),
    *("POST /v1/embeddings", "POST /v1/responses", "POST /v1/messages", "POST /v1/messages/count_tokens"),
    *("POST /api/chat", "POST /api/generate", "POST /api/embed", "POST /api/embeddings", "POST /api/show"),
    "POST /api/pull",
]
REFUSED = ["POST /api/create", "POST /api/copy", "POST /api/push", "DELETE /api/delete"]
RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
OPENAI = POSTS[:4]
COMPUTING = [
    *((each, mode) for each in OPENAI for mode in (RIGHT, WRONG)),
    *((f"POST {path}", RIGHT) for path in ("/v1/embeddings", "/v1/responses", "/v1/messages", "/api/chat")),
]
POST_KINDS = [(each, mode) for each in POSTS for mode in (RIGHT, WRONG)]
KINDS = [*((each, RIGHT) for each in GETS), *POST_KINDS]
ANY_HOST = AllowedHosts(frozenset({"*"}))
KEY = {"authorization": "Bearer key"}


@cache
def scripted() -> Any:
    """Answers at once, whatever it is asked."""
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(fakes.FakeService(), hosts=ANY_HOST))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tiny model that really computes."""
    with open_alone(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")) as service:
        yield schemathesis.openapi.from_asgi("/openapi.json", create_app(service, hosts=ANY_HOST))


@pytest.fixture
def administered(tmp_path: Path) -> Iterator[Any]:
    """A cluster without machines of its own, steered with a key."""
    settings = Settings(data_dir=tmp_path, offline=True)
    cluster = serving_cluster(500, 500)
    with ClusterAdmin(cluster, settings, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        app = create_app(fakes.FakeService(), api_keys=["operate key"], admin=admin, hosts=ANY_HOST)
        yield schemathesis.openapi.from_asgi("/openapi.json", app, headers=KEY)


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else str(value.value)


def operations(schema: Any) -> dict[str, Any]:
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.label: operation for operation in found}


def try_out(operation: Any, mode: Any, examples: int, model: str = "org/tiny", number: int = 20) -> set[int]:
    """Send so many requests of a kind; every answer must keep the document's promises. The statuses that came."""
    statuses = set()

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and case.body["model"]:
            # Any other is a 404 and shows little.
            case.body["model"] = model
        response = case.call(headers=KEY)
        case.validate_response(response, checks=CHECKS)
        statuses.add(response.status_code)

    send()
    return statuses


def test_every_operation_is_tried() -> None:
    assert sorted(operations(scripted())) == sorted((*GETS, *POSTS, *REFUSED))


@pytest.mark.parametrize("operation", REFUSED)
def test_what_is_refused_is_refused_whatever_is_sent(operation: str) -> None:
    for mode in (RIGHT, WRONG):
        assert try_out(operations(scripted())[operation], mode, 5) <= {400, 415}


@pytest.mark.parametrize(("operation", "mode"), KINDS, ids=name_of)
def test_a_scripted_service(operation: str, mode: Any) -> None:
    statuses: set[int] = set()
    # Unless some requests get through, the others prove nothing about what lies behind the checks. What is made of a
    # seed depends on the modules that are loaded.
    for number in range(20, 25):
        examples = 60 if operation in OPENAI else 15
        statuses |= try_out(operations(scripted())[operation], mode, examples, number=number)
        if 200 in statuses or mode is WRONG or "{" in operation:
            break
    assert max(statuses) < 500
    assert 200 in statuses or mode is WRONG or "{" in operation


@pytest.mark.parametrize(("operation", "mode"), COMPUTING, ids=name_of)
def test_a_service_that_computes(real: Any, operation: str, mode: Any) -> None:
    statuses = try_out(operations(real)[operation], mode, 12 if operation in OPENAI else 4, "tiny")
    assert max(statuses) < 500


def test_the_routes_of_a_cluster(administered: Any) -> None:
    tried = {
        label: operation
        for label, operation in operations(administered).items()
        if "/cluster/" in label and label != "GET /cluster/events"  # which never ends
    }
    assert len(tried) >= 13
    for label, operation in tried.items():
        for mode in (RIGHT, WRONG):
            # 502: a hub is not asked here for models that nobody has.
            assert try_out(operation, mode, 10) <= {200, 400, 401, 404, 502}, label
